"""The stand-ins for SGLang's wrapper and buffers: same shapes, same errors, fresh results."""

from __future__ import annotations

import inspect
import math

import pytest
import torch

import bufpool
from bufpool import DeviceMismatchError, FreshAllocator, OutputMismatchError
from bufpool.adapters import sglang
from bufpool.adapters.sglang import (
    SparsePrefillWorkspace,
    cast_q_fp8_for_q8kv8_prefill,
    q8kv8_padded_num_heads,
    sparse_mla_q8kv8_prefill_fwd,
)
from bufpool.ops import sparse_mla_prefill
from bufpool.testing import assert_write_only

E4M3 = torch.float8_e4m3fn
S_Q, H_Q, S_KV, TOPK = 3, 64, 40, 128
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


@pytest.fixture
def own_default(pool, monkeypatch):
    """A default pool of this test."""
    monkeypatch.setattr("bufpool.pool._default", pool)
    return pool


def make(device="cpu", s_q=S_Q, h_q=H_Q, s_kv=S_KV, topk=TOPK, d_qk=576, lengths=False, sink=False):
    generator = torch.Generator().manual_seed(7)
    indices = torch.randint(0, s_kv, (s_q, 1, topk), generator=generator, dtype=torch.int32)
    indices[torch.rand(s_q, 1, topk, generator=generator) < 0.6] = -1
    arguments = {
        "q": torch.randn(s_q, h_q, d_qk, generator=generator).to(E4M3),
        "kv": torch.randn(s_kv, 1, d_qk, generator=generator).to(E4M3),
        "indices": indices,
        "sm_scale": d_qk**-0.5,
        "q_scale": torch.tensor(0.5),
        "kv_scale": torch.tensor([2.0]),
    }
    if lengths:
        arguments["topk_length"] = torch.randint(0, topk + 1, (s_q,), generator=generator, dtype=torch.int32)
    if sink:
        arguments["attn_sink"] = torch.linspace(-1, 1, h_q)
    return {name: value.to(device) if isinstance(value, torch.Tensor) else value for name, value in arguments.items()}


def same_bits(one, other):
    return all(
        a.dtype is b.dtype and torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))
        for a, b in zip(one, other, strict=True)
    )


def copies(result):
    return [tensor.clone() for tensor in result]


# --- the wrapper ---


def test_signatures_are_those_of_the_original():
    positional = ["q", "kv", "indices", "sm_scale", "q_scale", "kv_scale", "d_v", "attn_sink", "topk_length"]
    parameters = inspect.signature(sparse_mla_q8kv8_prefill_fwd).parameters
    assert [name for name, p in parameters.items() if p.kind is p.POSITIONAL_OR_KEYWORD] == positional
    assert [name for name, p in parameters.items() if p.kind is p.KEYWORD_ONLY] == ["out", "max_logits", "lse", "allocator"]
    assert parameters["d_v"].default == 512
    assert list(inspect.signature(cast_q_fp8_for_q8kv8_prefill).parameters)[:3] == ["q", "padded_num_heads", "out"]
    assert list(inspect.signature(SparsePrefillWorkspace.get).parameters) == ["self", "num_tokens", "dtype"]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("lengths", "sink"), [(False, False), (True, False), (True, True)])
@pytest.mark.parametrize("d_qk", [512, 576])
def test_result_is_that_of_the_operator(pool, device, lengths, sink, d_qk):
    arguments = make(device, lengths=lengths, sink=sink, d_qk=d_qk)
    out, max_logits, lse = sparse_mla_q8kv8_prefill_fwd(**arguments, allocator=pool)
    assert (out.shape, out.dtype) == ((S_Q, H_Q, 512), torch.bfloat16)
    assert (max_logits.shape, max_logits.dtype) == ((S_Q, H_Q), torch.float32)
    assert (lse.shape, lse.dtype) == ((S_Q, H_Q), torch.float32)
    assert same_bits((out, max_logits, lse), sparse_mla_prefill(**arguments, allocator=FreshAllocator()))


def test_two_default_calls_return_independent_storage(own_default):
    arguments = make()
    first = sparse_mla_q8kv8_prefill_fwd(**arguments)
    kept = copies(first)
    arguments["q"] = (arguments["q"].float() * 2).to(E4M3)
    second = sparse_mla_q8kv8_prefill_fwd(**arguments)
    assert not {t.untyped_storage().data_ptr() for t in first} & {t.untyped_storage().data_ptr() for t in second}
    assert same_bits(first, kept)
    assert not same_bits(second, kept)
    assert own_default.stats().acquires == 2


def test_a_view_of_the_real_heads_keeps_the_buffer(own_default):
    arguments = make()
    result = sparse_mla_q8kv8_prefill_fwd(**arguments)
    address = result[0].data_ptr()
    heads = result[0][:, :16]
    del result
    kept = heads.clone()
    arguments["q"] = (arguments["q"].float() * 2).to(E4M3)
    second = sparse_mla_q8kv8_prefill_fwd(**arguments)
    assert second[0].data_ptr() != address
    assert same_bits([heads], [kept])
    del heads, second
    held = [sparse_mla_q8kv8_prefill_fwd(**arguments) for _ in range(2)]
    assert address in {result[0].data_ptr() for result in held}, "the dropped view still held the slot"
    assert own_default.stats().slots == 2


def test_layers_share_one_slot_over_changing_rows(own_default):
    for rows in (1, 5, 3, 8, 2):
        for _ in range(4):
            sparse_mla_q8kv8_prefill_fwd(**make(s_q=rows))
    stats = own_default.stats()
    assert (stats.slots, stats.acquires) == (1, 20)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("tail", [0.0, math.nan, 400.0])
def test_appended_rows_change_nothing(pool, device, tail):
    """A caller appends topk rows for the empty places and leaves -1 in the indices: masked, whatever the rows hold."""
    arguments = make(device)
    plain = copies(sparse_mla_q8kv8_prefill_fwd(**arguments, allocator=pool))
    rows = torch.full((TOPK, 1, 576), tail, device=device).to(E4M3)
    arguments["kv"] = torch.cat([arguments["kv"].view(torch.uint8), rows.view(torch.uint8)]).view(E4M3)
    assert same_bits(sparse_mla_q8kv8_prefill_fwd(**arguments, allocator=pool), plain)


def test_appended_rows_that_indices_name_are_real(pool):
    """A caller who maps -1 to the appended zero rows himself names real rows of score 0, as in the original."""
    arguments = make(s_q=1)
    indices, kv = arguments["indices"], arguments["kv"]
    valid = int((indices >= 0).sum())
    masked = copies(sparse_mla_q8kv8_prefill_fwd(**arguments, allocator=pool))
    arguments["kv"] = torch.cat([kv.view(torch.uint8), torch.zeros(TOPK, 1, 576, dtype=torch.uint8)]).view(E4M3)
    places = torch.arange(TOPK, dtype=torch.int32) + S_KV
    arguments["indices"] = torch.where(indices < 0, places, indices)
    named = sparse_mla_q8kv8_prefill_fwd(**arguments, allocator=pool)
    grown = torch.logaddexp(masked[2].double(), torch.tensor(math.log(TOPK - valid), dtype=torch.float64))
    torch.testing.assert_close(named[2].double(), grown, rtol=1e-5, atol=1e-5)
    shrunk = masked[0].double() * torch.exp(masked[2].double() - grown)[..., None]
    torch.testing.assert_close(named[0].double(), shrunk, rtol=2e-2, atol=1e-2)


def test_rows_without_any_place(pool):
    arguments = make()
    arguments["indices"].fill_(-1)
    out, max_logits, lse = sparse_mla_q8kv8_prefill_fwd(**arguments, allocator=pool)
    assert bool((out == 0).all())
    assert bool((max_logits == -math.inf).all())
    assert bool((lse == math.inf).all())


def test_no_rows(pool):
    result = sparse_mla_q8kv8_prefill_fwd(**make(s_q=0), allocator=pool)
    assert [tuple(t.shape) for t in result] == [(0, H_Q, 512), (0, H_Q), (0, H_Q)]


def test_lengths_are_clamped_and_not_read(pool):
    arguments = make(lengths=True)
    arguments["topk_length"] = torch.tensor([-5, TOPK + 9, TOPK], dtype=torch.int32)
    out, _, _ = sparse_mla_q8kv8_prefill_fwd(**arguments, allocator=pool)
    assert bool((out[0] == 0).all())
    assert bool((out[1] != 0).any())


def test_callers_outputs(pool):
    arguments = make()
    mine = {
        "out": torch.empty(S_Q, H_Q, 512, dtype=torch.bfloat16),
        "max_logits": torch.empty(S_Q, H_Q),
        "lse": torch.empty(S_Q, H_Q),
    }
    result = sparse_mla_q8kv8_prefill_fwd(**arguments, **mine, allocator=pool)
    assert all(one is other for one, other in zip(result, mine.values(), strict=True))
    assert pool.stats().acquires == 0
    partial = sparse_mla_q8kv8_prefill_fwd(**arguments, lse=mine["lse"], allocator=pool)
    assert partial[2] is mine["lse"]
    assert same_bits(partial, result)


def test_write_contract(pool):
    arguments = make(lengths=True)
    spec = bufpool.ops.sparse_mla_spec(H_Q)
    assert_write_only(
        lambda outputs: sparse_mla_q8kv8_prefill_fwd(**arguments, **outputs._asdict()), spec, S_Q, arguments["q"]
    )


def strided(tensor, dim=-1):
    return torch.cat([tensor.view(torch.uint8)] * 2, dim).view(tensor.dtype).narrow(dim, 0, tensor.shape[dim])


WRONG = {
    "q of rank 2": lambda a: {"q": a["q"][0]},
    "q of another dtype": lambda a: {"q": a["q"].to(torch.bfloat16)},
    "q strided": lambda a: {"q": strided(a["q"], 1)},
    "q of 60 heads": lambda a: {"q": a["q"][:, :60].contiguous()},
    "q without heads": lambda a: {"q": a["q"][:, :0]},
    "q of 544 columns": lambda a: {"q": a["q"][..., :544].contiguous(), "kv": a["kv"][..., :544].contiguous()},
    "kv of rank 2": lambda a: {"kv": a["kv"][:, 0]},
    "kv of two heads": lambda a: {"kv": a["kv"].view(S_KV // 2, 2, 576)},
    "kv of another width": lambda a: {"kv": a["kv"][..., :512].contiguous()},
    "kv of another dtype": lambda a: {"kv": a["kv"].view(torch.float8_e5m2)},
    "kv strided": lambda a: {"kv": strided(a["kv"])},
    "kv elsewhere": lambda a: {"kv": a["kv"].to("meta")},
    "indices of rank 2": lambda a: {"indices": a["indices"][:, 0]},
    "indices of int64": lambda a: {"indices": a["indices"].long()},
    "indices of other rows": lambda a: {"indices": a["indices"][:2]},
    "indices of two heads": lambda a: {"indices": a["indices"].repeat(1, 2, 1)},
    "indices strided": lambda a: {"indices": strided(a["indices"])},
    "topk of 100": lambda a: {"indices": a["indices"][..., :100].contiguous()},
    "topk of 0": lambda a: {"indices": a["indices"][..., :0]},
    "d_v of 256": lambda a: {"d_v": 256},
    "sink without lengths": lambda a: {"attn_sink": torch.zeros(H_Q)},
    "sink of other heads": lambda a: {"attn_sink": torch.zeros(H_Q + 1), "topk_length": lengths()},
    "sink of float64": lambda a: {"attn_sink": torch.zeros(H_Q).double(), "topk_length": lengths()},
    "sink strided": lambda a: {"attn_sink": torch.zeros(2 * H_Q)[::2], "topk_length": lengths()},
    "lengths of int64": lambda a: {"topk_length": lengths().long()},
    "lengths of other rows": lambda a: {"topk_length": lengths()[:2]},
    "lengths strided": lambda a: {"topk_length": torch.zeros(2 * S_Q, dtype=torch.int32)[::2]},
    "scale as a number": lambda a: {"q_scale": 1.0},
    "scale of two elements": lambda a: {"kv_scale": torch.ones(2)},
    "scale of float64": lambda a: {"kv_scale": torch.ones(1).double()},
    "scale elsewhere": lambda a: {"q_scale": torch.ones(1, device="meta")},
    "out of another shape": lambda a: {"out": torch.empty(S_Q + 1, H_Q, 512, dtype=torch.bfloat16)},
    "out of another dtype": lambda a: {"out": torch.empty(S_Q, H_Q, 512)},
    "out elsewhere": lambda a: {"out": torch.empty(S_Q, H_Q, 512, dtype=torch.bfloat16, device="meta")},
    "lse strided": lambda a: {"lse": torch.empty(S_Q, 2 * H_Q)[:, ::2]},
    "outputs that alias": lambda a: dict.fromkeys(("max_logits", "lse"), torch.empty(S_Q, H_Q)),
}


def lengths():
    return torch.full((S_Q,), TOPK, dtype=torch.int32)


@pytest.mark.parametrize("case", WRONG)
def test_what_is_a_value_error_there_is_one_here(pool, case):
    arguments = make()
    with pytest.raises(ValueError, match=r"expected|must be on device"):
        sparse_mla_q8kv8_prefill_fwd(**{**arguments, **WRONG[case](arguments)}, allocator=pool)
    assert pool.stats().acquires == 0


def test_wrong_device_names_the_tensor(pool):
    arguments = make()
    arguments["kv"] = arguments["kv"].to("meta")
    with pytest.raises(DeviceMismatchError, match="kv must be on device cpu, got meta"):
        sparse_mla_q8kv8_prefill_fwd(**arguments, allocator=pool)


# --- heads ---


def test_padded_heads():
    assert [q8kv8_padded_num_heads(n) for n in (1, 8, 63, 64, 65, 127, 128)] == [64, 64, 64, 64, 128, 128, 128]


@pytest.mark.parametrize("heads", [0, -1, 129])
def test_padded_heads_out_of_range(heads):
    with pytest.raises(ValueError, match=f"num_heads: expected 1 to 128, got {heads}"):
        q8kv8_padded_num_heads(heads)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("heads", "padded"), [(5, None), (64, None), (65, None), (16, 128)])
def test_cast_pads_with_zeros(pool, device, dtype, heads, padded):
    q = torch.randn(7, heads, 512, dtype=dtype, device=device)
    for _ in range(2):  # the second time on memory that holds the first result
        q_fp8, q_scale = cast_q_fp8_for_q8kv8_prefill(q, padded, allocator=pool)
        assert (q_fp8.shape, q_fp8.dtype) == ((7, padded or q8kv8_padded_num_heads(heads), 512), E4M3)
        assert torch.equal(q_fp8[:, :heads].view(torch.uint8), q.to(E4M3).view(torch.uint8))
        assert int(q_fp8[:, heads:].view(torch.uint8).sum()) == 0
        assert (q_scale.shape, q_scale.dtype, float(q_scale), q_scale.device) == ((), torch.float32, 1.0, q.device)
        q_fp8.view(torch.uint8).fill_(0x55)
        del q_fp8
    assert pool.stats().slots == 1


def test_cast_results_are_independent(own_default):
    q = torch.randn(4, 8, 512, dtype=torch.bfloat16)
    first, first_scale = cast_q_fp8_for_q8kv8_prefill(q)
    kept = first.clone()
    second, second_scale = cast_q_fp8_for_q8kv8_prefill(-q)
    assert first.data_ptr() != second.data_ptr()
    assert first_scale.data_ptr() != second_scale.data_ptr()
    assert same_bits([first], [kept])


def test_cast_into_the_callers_tensor(pool):
    q = torch.randn(4, 8, 512, dtype=torch.bfloat16, requires_grad=True)
    mine = torch.full((4, 64, 512), math.nan).to(E4M3)
    q_fp8, _ = cast_q_fp8_for_q8kv8_prefill(q, out=mine, allocator=pool)
    assert q_fp8 is mine
    assert not mine.requires_grad
    assert torch.equal(mine[:, :8].view(torch.uint8), q.detach().to(E4M3).view(torch.uint8))
    assert int(mine[:, 8:].view(torch.uint8).sum()) == 0
    assert pool.stats().acquires == 0


@pytest.mark.parametrize(
    "wrong",
    [
        {"q": torch.zeros(4, 512)},
        {"q": torch.zeros(4, 8, 576)},
        {"q": torch.zeros(4, 129, 512)},
        {"padded_num_heads": 96},
        {"q": torch.zeros(4, 65, 512), "padded_num_heads": 64},
        {"out": torch.zeros(4, 64, 512)},
        {"out": torch.zeros(3, 64, 512).to(E4M3)},
        {"out": torch.zeros(4, 128, 512).to(E4M3)},
        {"out": torch.zeros(4, 64, 512, device="meta").to(E4M3)},
    ],
)
def test_cast_refuses(pool, wrong):
    with pytest.raises(ValueError, match=r"expected|must be on device"):
        cast_q_fp8_for_q8kv8_prefill(**{"q": torch.zeros(4, 8, 512), **wrong}, allocator=pool)


# --- the scratch ---


@pytest.mark.parametrize("device", DEVICES)
def test_scratch_rows(own_default, device):
    workspace = SparsePrefillWorkspace(torch.device(device))
    for rows in (5, 100, 1):
        for dtype in (torch.bfloat16, E4M3):
            scratch = workspace.get(rows, dtype)
            assert (scratch.shape, scratch.dtype, scratch.device.type) == ((rows, 1, 512), dtype, device)
            assert scratch.is_contiguous()
    assert workspace.get(3).dtype is torch.bfloat16
    assert workspace.get(0).shape == (0, 1, 512)


def test_alternating_dtypes_cost_nothing(own_default):
    workspace = SparsePrefillWorkspace("cpu")
    addresses = {dtype: workspace.get(100, dtype).data_ptr() for dtype in (torch.bfloat16, E4M3)}
    grows = own_default.stats().grows
    for _ in range(5):
        for dtype, address in addresses.items():
            assert workspace.get(90, dtype).data_ptr() == address
    assert own_default.stats().grows == grows
    assert own_default.stats().slots == 2


def test_scratch_keeps_its_address_when_it_grows(own_default):
    workspace = SparsePrefillWorkspace("cpu")
    assert len({workspace.get(rows).data_ptr() for rows in (1, 10, 10_000, 100)}) == 1


def test_held_scratch_is_left_alone(own_default):
    workspace = SparsePrefillWorkspace("cpu", allocator=None)
    first = workspace.get(10)
    first.fill_(3)
    part = first[2:4, 0, :8]
    del first
    workspace.get(10).fill_(4)
    assert bool((part == 3).all())


def test_scratch_refuses_a_negative_count(own_default):
    with pytest.raises(ValueError, match="rows: expected an integer >= 0, got -1"):
        SparsePrefillWorkspace("cpu").get(-1)


def test_errors_share_a_root():
    assert issubclass(OutputMismatchError, ValueError)
    assert set(sglang.__all__) <= set(vars(sglang))


@pytest.mark.gpu
def test_a_captured_forward_replays(pool):
    workspace = SparsePrefillWorkspace("cuda", allocator=pool)
    q = torch.randn(4, 8, 512, dtype=torch.bfloat16, device="cuda")
    arguments = make("cuda", s_q=4, d_qk=512)
    cache = arguments["kv"].to(torch.bfloat16)  # held: the graph reads it at every replay

    def forward():
        scratch = workspace.get(S_KV, torch.bfloat16)
        scratch.copy_(cache)
        q_fp8, q_scale = cast_q_fp8_for_q8kv8_prefill(q, allocator=pool)
        inputs = {**arguments, "kv": scratch.to(E4M3), "q": q_fp8, "q_scale": q_scale}
        return sparse_mla_q8kv8_prefill_fwd(**inputs, allocator=pool)

    expected = copies(forward())
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = forward()
    for tensor in result:
        tensor.zero_()
    forward()
    workspace.get(5000)
    graph.replay()
    torch.cuda.synchronize()
    assert same_bits(result, expected)

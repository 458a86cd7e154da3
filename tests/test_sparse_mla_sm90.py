"""The SM90 kernel against its formula in float64, on the same e4m3 inputs."""

from __future__ import annotations

import dataclasses
import math
import threading
import types
from collections.abc import Callable
from typing import Any

import pytest
import torch

from bufpool import OutputPool, OutputSpec
from bufpool.ops import sparse_mla_prefill, sparse_mla_sm90

HAS_SM90 = torch.cuda.is_available() and sparse_mla_sm90.is_available(torch.device("cuda", 0))

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.sm90,
    pytest.mark.skipif(not HAS_SM90, reason="needs a CUDA device of compute capability 9.0 and cuda.core"),
]

E4M3 = torch.float8_e4m3fn
D_V = 512
INT32_MIN, INT32_MAX = -(2**31), 2**31 - 1

# What differs from float64, and why.
OUT_RELATIVE = 2.2e-2  # norm over the case: P is rounded to e4m3 (1.7e-2 of a long row); few places average less
OUT_RELATIVE_FEW = 3.6e-2  # rows of two or three places: one rounding of P is up to 2^-4, two of them meet
LOGIT_ABSOLUTE, LOGIT_RELATIVE = 1.2e-2, 2e-3  # the FP8 tensor core keeps about 14 bits while it accumulates
BF16_RELATIVE = 2.0**-8


@dataclasses.dataclass
class Inputs:
    """Arguments of one call; the device tensors of the contract."""

    q: torch.Tensor
    kv: torch.Tensor
    indices: torch.Tensor
    sm_scale: float
    q_scale: float | torch.Tensor = 1.0
    kv_scale: float | torch.Tensor = 1.0
    attn_sink: torch.Tensor | None = None
    topk_length: torch.Tensor | None = None

    def row(self, i: int) -> Inputs:
        """The same call for query i alone."""
        length = None if self.topk_length is None else self.topk_length[i : i + 1]
        return dataclasses.replace(self, q=self.q[i : i + 1], indices=self.indices[i : i + 1], topk_length=length)


def random_e4m3(*shape: int, seed: int) -> torch.Tensor:
    generator = torch.Generator("cuda").manual_seed(seed)
    return torch.randn(*shape, device="cuda", generator=generator, dtype=torch.bfloat16).to(E4M3)


def make(d_qk: int, h_q: int, topk: int, s_q: int, s_kv: int, seed: int = 0) -> Inputs:
    generator = torch.Generator("cuda").manual_seed(seed + 1)
    indices = torch.randint(0, s_kv, (s_q, topk), device="cuda", generator=generator, dtype=torch.int32)
    q, kv = random_e4m3(s_q, h_q, d_qk, seed=seed + 2), random_e4m3(s_kv, d_qk, seed=seed + 3)
    return Inputs(q, kv, indices, d_qk**-0.5)


def run(x: Inputs, guard_rows: int = 0) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Launch on NaN-filled outputs; rows behind the active ones must stay NaN."""
    s_q, h_q = x.q.shape[:2]
    rows = s_q + guard_rows
    out = torch.full((rows, h_q, D_V), math.nan, dtype=torch.bfloat16, device="cuda")
    max_logits, lse = (torch.full((rows, h_q), math.nan, device="cuda") for _ in range(2))
    sparse_mla_sm90.launch(
        x.q, x.kv, x.indices, x.sm_scale, x.q_scale, x.kv_scale, x.attn_sink, x.topk_length,
        out[:s_q], max_logits[:s_q], lse[:s_q],
    )  # fmt: skip
    torch.cuda.synchronize()
    for tensor in (out, max_logits, lse):
        assert tensor[s_q:].isnan().all()
    return out[:s_q], max_logits[:s_q], lse[:s_q]


def take(rows: torch.Tensor, at: torch.Tensor) -> torch.Tensor:
    return rows.view(torch.uint8)[at].view(E4M3).double()


def reference(x: Inputs, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """float64 out, max_logits and lse of the given rows, straight from the formula."""
    topk = x.indices.shape[1]
    at = x.indices[rows].long()
    valid = (at >= 0) & (at < x.kv.shape[0])
    if x.topk_length is not None:
        valid &= torch.arange(topk, device="cuda") < x.topk_length[rows, None]
    key = take(x.kv, at.clamp(0, x.kv.shape[0] - 1))
    key[~valid] = 0
    kv_scale = float(x.kv_scale)
    scores = torch.einsum("qhd,qkd->qhk", take(x.q, rows), key) * (x.sm_scale * float(x.q_scale) * kv_scale)
    scores.masked_fill_(~valid[:, None], -math.inf)
    max_logits, lse = scores.amax(-1), torch.logsumexp(scores, -1)
    is_empty = ~valid.any(-1)
    sink = torch.full_like(lse, -math.inf) if x.attn_sink is None else x.attn_sink.double().expand_as(lse)
    weights = torch.exp(scores - torch.logaddexp(lse, sink)[..., None])
    weights[is_empty] = 0
    lse[is_empty] = math.inf
    return kv_scale * torch.einsum("qhk,qkd->qhd", weights, key[..., :D_V]), max_logits, lse


def check(x: Inputs, rows: torch.Tensor | None = None, out_relative: float = OUT_RELATIVE) -> None:
    """Compare with float64, run to run, and each of a few rows with itself alone."""
    s_q = x.q.shape[0]
    got = run(x, guard_rows=3)
    again = run(x)
    for one, other in zip(got, again, strict=True):
        assert torch.equal(one.view(torch.uint8), other.view(torch.uint8)), "differs from run to run"
    if rows is None:
        rows = torch.linspace(0, s_q - 1, min(s_q, 24), device="cuda").long().unique()
    for i in rows[:: max(1, len(rows) // 4)].tolist():
        for whole, alone in zip(got, run(x.row(i)), strict=True):
            assert torch.equal(whole[i : i + 1].view(torch.uint8), alone.view(torch.uint8)), f"row {i} depends on its batch"
    want = reference(x, rows)
    out, max_logits, lse = (tensor[rows].double() for tensor in got)
    for name, have, right in (("max_logits", max_logits, want[1]), ("lse", lse, want[2])):
        same = (have == right) | ((have - right).abs() <= LOGIT_ABSOLUTE + LOGIT_RELATIVE * right.abs())
        assert same.all(), f"{name}: {(~same).sum()} wrong, first {have[~same][:1]} for {right[~same][:1]}"
    assert out.isfinite().all()
    norm = want[0].norm()
    error = (out - want[0]).norm()
    assert error <= out_relative * norm + BF16_RELATIVE * 1e-30, f"out: relative error {(error / norm).item():.2e}"
    is_zero = want[0].abs().amax(-1) == 0
    assert (out[is_zero] == 0).all()


SHAPES = [
    # d_qk, h_q, topk, s_q, s_kv
    (576, 128, 2048, 140, 8192),
    (512, 64, 512, 300, 8192),
    (512, 128, 1024, 140, 8192),
    (576, 1, 1, 1, 1),
    (576, 1, 63, 5, 100),
    (512, 16, 64, 133, 64),
    (576, 32, 65, 265, 3000),
    (512, 63, 127, 40, 3000),
    (576, 65, 128, 200, 3000),
    (512, 80, 129, 70, 3000),
    (576, 100, 190, 140, 3000),
    (576, 128, 2047, 33, 8192),
    (512, 130, 257, 90, 3000),
    (576, 200, 320, 50, 3000),
    (576, 300, 130, 60, 3000),  # 5 head groups, which 132 SMs are no multiple of: a CTA goes from one to another
    (512, 64, 512, 140, 70000),  # kv is more than half of L2
]


@pytest.mark.parametrize(("d_qk", "h_q", "topk", "s_q", "s_kv"), SHAPES)
def test_every_shape_is_right(d_qk: int, h_q: int, topk: int, s_q: int, s_kv: int) -> None:
    check(make(d_qk, h_q, topk, s_q, s_kv), out_relative=OUT_RELATIVE if topk > 64 else OUT_RELATIVE_FEW)


@pytest.mark.parametrize(
    ("d_qk", "h_q", "topk", "bound"), [(576, 128, 2048, 1.69e-2), (512, 64, 512, 2.08e-2), (512, 128, 1024, 1.90e-2)]
)
def test_error_of_long_rows_stays_below_its_bound(d_qk: int, h_q: int, topk: int, bound: float) -> None:
    x = make(d_qk, h_q, topk, 256, 8192)
    generator = torch.Generator("cuda").manual_seed(5)
    x.indices = torch.rand(256, 8192, device="cuda", generator=generator).topk(topk, 1).indices.int()
    check(x, out_relative=bound)


def punch_holes(x: Inputs) -> None:
    """Every kind of invalid index, anywhere."""
    generator = torch.Generator("cuda").manual_seed(7)
    holes = torch.rand(x.indices.shape, device="cuda", generator=generator) < 0.4
    kinds = torch.tensor([-1, INT32_MIN, x.kv.shape[0], INT32_MAX, -x.kv.shape[0]], dtype=torch.int32, device="cuda")
    kind = torch.randint(0, 5, x.indices.shape, device="cuda", generator=generator)
    x.indices = torch.where(holes, kinds[kind], x.indices)


def keep_first(x: Inputs) -> None:
    """Row i has i + 1 valid places: the start of a prompt."""
    place = torch.arange(x.indices.shape[1], device="cuda")
    x.indices = torch.where(place <= torch.arange(x.q.shape[0], device="cuda")[:, None], x.indices, -1)


def empty_some(x: Inputs) -> None:
    x.indices[::3] = -1


def empty_all(x: Inputs) -> None:
    x.indices.fill_(x.kv.shape[0])


def keep_one_deep(x: Inputs) -> None:
    place = torch.arange(x.q.shape[0], device="cuda") * 37 % x.indices.shape[1]
    kept = x.indices.gather(1, place[:, None])
    x.indices = torch.full_like(x.indices, -7).scatter(1, place[:, None], kept)


def duplicate(x: Inputs) -> None:
    x.indices = x.indices // 1000 * 1000


def enlarge(x: Inputs) -> None:
    x.sm_scale *= 15


def rise_slowly(x: Inputs) -> None:
    """Keys sorted by growing score for the first head: the reference rises in almost every block."""
    first = take(x.q[:, 0], torch.arange(x.q.shape[0], device="cuda"))
    scores = torch.einsum("qd,qkd->qk", first, take(x.kv, x.indices.long()))
    x.indices = x.indices.gather(1, scores.argsort(1))
    x.sm_scale *= 4


def fall_slowly(x: Inputs) -> None:
    rise_slowly(x)
    x.indices = x.indices.flip(1).contiguous()


def negate(x: Inputs) -> None:
    x.sm_scale *= -1.5


def negate_tensors(x: Inputs) -> None:
    x.q_scale, x.kv_scale = torch.tensor([-0.7], device="cuda"), torch.tensor(1.3, device="cuda")
    punch_holes(x)


def scale_tensors(x: Inputs) -> None:
    x.q_scale, x.kv_scale = torch.tensor(-2.0, device="cuda"), torch.tensor([[-0.25]], device="cuda")


def scale_to_nothing(x: Inputs) -> None:
    x.sm_scale = 0.0
    punch_holes(x)


def mix_scales(x: Inputs) -> None:
    x.q_scale, x.kv_scale = 0.5, torch.tensor(3.0, device="cuda")


def shorten(x: Inputs) -> None:
    lengths = torch.arange(x.q.shape[0], device="cuda") * 29 % (x.indices.shape[1] + 1)
    lengths[:6] = torch.tensor([0, -5, INT32_MIN, INT32_MAX, x.indices.shape[1], 1], device="cuda")
    x.topk_length = lengths.int()


def sink(x: Inputs) -> None:
    sinks = torch.linspace(-3, 12, x.q.shape[1], device="cuda")
    sinks[0], sinks[1], sinks[2] = math.inf, -math.inf, 80.0
    x.attn_sink = sinks


def shorten_and_sink(x: Inputs) -> None:
    shorten(x)
    sink(x)
    punch_holes(x)


def stride(x: Inputs) -> None:
    """Rows inside wider rows, with NaN between them."""

    def widen(t: torch.Tensor, extra: int) -> torch.Tensor:
        wide = torch.full((*t.shape[:-1], t.shape[-1] + extra), 0x7F, dtype=torch.uint8, device="cuda")
        wide[..., : t.shape[-1]] = t.view(torch.uint8)
        return wide.view(E4M3)[..., : t.shape[-1]]

    s_q, h_q, _ = x.q.shape
    x.q = widen(x.q, 64)
    q = torch.full((s_q, h_q + 3, x.q.stride(1)), 0x7F, dtype=torch.uint8, device="cuda")
    q[:, :h_q, : x.q.shape[2]] = x.q.view(torch.uint8)
    x.q = q.view(E4M3)[:, :h_q, : x.q.shape[2]]
    x.kv = widen(x.kv, 80)
    indices = torch.full((s_q, x.indices.shape[1] + 5), 3, dtype=torch.int32, device="cuda")
    indices[:, 5:] = x.indices
    x.indices = indices[:, 5:]


def poison_neighbours(x: Inputs) -> None:
    """Rows nobody selects hold NaN; invalid indices would lead to them if they were clamped."""
    s_kv = x.kv.shape[0]
    x.indices = x.indices.clamp(1, s_kv - 2) | 1
    kv = x.kv.view(torch.uint8)
    kv[0::2] = 0x7F
    kv[s_kv - 1] = 0xFF
    x.kv = kv.view(E4M3)
    x.indices.clamp_(max=s_kv - 3 if s_kv % 2 == 0 else s_kv - 2)
    punch_holes(x)


def stand_alone(x: Inputs) -> None:
    """Items of one block: a pair with an empty second one."""
    x.topk_length = torch.full((x.q.shape[0],), 40, dtype=torch.int32, device="cuda")


def alternate(x: Inputs) -> None:
    """Items of one pair and of two by turns, and some without places."""
    x.topk_length = (torch.arange(x.q.shape[0], device="cuda") * 41 % 200).int()


EDITS: list[Callable[[Inputs], None]] = [
    punch_holes, keep_first, empty_some, empty_all, keep_one_deep, duplicate, enlarge, rise_slowly, fall_slowly, negate,
    negate_tensors, scale_tensors, scale_to_nothing, mix_scales, shorten, sink, shorten_and_sink, stride,
    poison_neighbours, stand_alone, alternate,
]  # fmt: skip


@pytest.mark.parametrize(("d_qk", "h_q", "topk", "s_q"), [(576, 128, 512, 150), (512, 72, 200, 420)])
@pytest.mark.parametrize("edit", EDITS, ids=lambda edit: edit.__name__)
def test_every_option_is_right(edit: Callable[[Inputs], None], d_qk: int, h_q: int, topk: int, s_q: int) -> None:
    x = make(d_qk, h_q, topk, s_q, 5000)
    edit(x)
    rows = torch.cat((torch.arange(8), torch.arange(8, s_q, 11))).cuda()
    check(x, rows, OUT_RELATIVE_FEW)


@pytest.mark.parametrize(("d_qk", "h_q", "topk", "s_q"), [(576, 128, 512, 150), (512, 72, 200, 420)])
@pytest.mark.parametrize(
    "edit", [punch_holes, empty_all, shorten_and_sink, stride, poison_neighbours, stand_alone, alternate]
)
def test_asking_for_keys_early_changes_no_bit(
    monkeypatch: pytest.MonkeyPatch, edit: Callable[[Inputs], None], d_qk: int, h_q: int, topk: int, s_q: int
) -> None:
    x = make(d_qk, h_q, topk, s_q, 5000)
    edit(x)
    results = []
    for prefetches in (False, True):
        monkeypatch.setattr(sparse_mla_sm90, "_prefetches_keys", lambda *_, answer=prefetches: answer)
        sparse_mla_sm90._plans.by_shape.clear()
        results.append([tensor.clone() for tensor in run(x)])
    sparse_mla_sm90._plans.by_shape.clear()
    for without, with_it in zip(*results, strict=True):
        assert torch.equal(without.view(torch.uint8), with_it.view(torch.uint8))


def test_a_call_inside_another_one_of_the_same_shape_changes_neither(monkeypatch: pytest.MonkeyPatch) -> None:
    outer, inner = make(576, 128, 300, 20, 1000), make(576, 128, 300, 20, 1000, seed=7)
    wanted = [run(x) for x in (outer, inner)]
    ask_stream, inside = sparse_mla_sm90.raw_stream, []

    def run_inner(device: int) -> int:  # as a finalizer may, before the launch
        monkeypatch.setattr(sparse_mla_sm90, "raw_stream", ask_stream)
        inside.append(run(inner))
        return ask_stream(device)

    monkeypatch.setattr(sparse_mla_sm90, "raw_stream", run_inner)
    found = [run(outer), *inside]
    for want, have in zip(wanted, found, strict=True):
        for one, other in zip(want, have, strict=True):
            assert torch.equal(one.view(torch.uint8), other.view(torch.uint8))
    assert all(len(plan.launches) <= 2 for plan in sparse_mla_sm90._plans.by_shape.values())


def test_keys_are_asked_for_early_where_they_do_not_fit_in_half_of_l2() -> None:
    assert not sparse_mla_sm90._prefetches_keys(512, 32768 * 512, 60 * 2**20)
    assert sparse_mla_sm90._prefetches_keys(512, 65536 * 512, 60 * 2**20)
    assert not sparse_mla_sm90._prefetches_keys(576, 131072 * 576, 60 * 2**20)


@pytest.fixture
def set_sms(monkeypatch: pytest.MonkeyPatch):
    """A function: the kernel believes that the device has so many SMs, so that each CTA goes through many items."""
    l2_bytes = torch.cuda.get_device_properties(0).L2_cache_size

    def set_them(sms: int) -> None:
        properties = types.SimpleNamespace(multi_processor_count=sms, L2_cache_size=l2_bytes)
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: properties)
        sparse_mla_sm90._plans.by_shape.clear()

    yield set_them
    sparse_mla_sm90._plans.by_shape.clear()


def same_bits(one: tuple[torch.Tensor, ...], other: tuple[torch.Tensor, ...]) -> bool:
    return all(torch.equal(a.view(torch.uint8), b.view(torch.uint8)) for a, b in zip(one, other, strict=True))


@pytest.mark.parametrize("h_q", [1, 65, 130])
@pytest.mark.parametrize("d_qk", [576, 512])
def test_items_one_after_another_are_those_alone(set_sms: Callable[[int], None], d_qk: int, h_q: int) -> None:
    # At most 39 items, each first of a CTA; then many on a CTA: of one pair, of three, and without a place in between.
    x = make(d_qk, h_q, 300, 13, 500)
    lengths = [0, 1, 0, 0, 300, 128, 0, 129, 256, 257, 64, 0, 300]
    x.topk_length = torch.tensor(lengths, dtype=torch.int32, device="cuda")
    stride(x)
    set_sms(39)
    alone = run(x)
    for sms in (1, 2, 4, 5):  # 2, 4 and 5 are no multiples of 3 head groups
        set_sms(sms)
        assert same_bits(run(x), alone), f"{sms} SMs"


@pytest.mark.parametrize("h_q", [1, 65])
@pytest.mark.parametrize("d_qk", [576, 512])
def test_nothing_behind_the_last_row_of_q_is_read(set_sms: Callable[[int], None], d_qk: int, h_q: int) -> None:
    # A misread is an illegal access, and the process loses its CUDA context: whatever fails behind it then is no news.
    x = make(d_qk, h_q, 100, 5, 500)
    want = run(x)
    pool, spec = OutputPool(arena="cuda"), OutputSpec(memory=((), torch.uint8))
    pool.acquire(spec, 1, x.q)
    memory = pool.acquire(spec, pool.stats().mapped_bytes, x.q).memory  # all that is mapped: nothing is behind it
    for head_bytes in (d_qk, d_qk + 64):
        strides = ((h_q + 3) * head_bytes, head_bytes, 1)
        span = 4 * strides[0] + (h_q - 1) * head_bytes + d_qk
        q = memory[-span:].as_strided(x.q.shape, strides)
        q.copy_(x.q.view(torch.uint8))
        for sms in (132, 1):
            set_sms(sms)
            assert same_bits(run(dataclasses.replace(x, q=q.view(E4M3))), want)
    del memory, q
    pool.close()


def test_heads_far_apart() -> None:
    # Head 64 begins 2^32 bytes behind head 0.
    x = make(576, 65, 130, 70, 3000)
    want = run(x)
    memory = torch.zeros(65, 2**26, dtype=torch.uint8, device="cuda")
    q = memory[:, : 70 * 576].unflatten(1, (70, 576)).transpose(0, 1)
    q.copy_(x.q.view(torch.uint8))
    assert q.stride() == (576, 2**26, 1)
    assert same_bits(run(dataclasses.replace(x, q=q.view(E4M3))), want)


def test_selected_nan_shows_in_its_rows_only() -> None:
    x = make(576, 64, 128, 12, 1000)
    x.indices.clamp_(min=1)
    x.kv.view(torch.uint8)[0] = 0x7F
    clean = [tensor.clone() for tensor in run(x)]
    x.indices[5, 77] = 0
    got = run(x)
    for before, now in zip(clean, got, strict=True):
        assert now[5].isnan().all()
        keep = torch.arange(12, device="cuda") != 5
        assert torch.equal(before[keep], now[keep])


def test_no_queries_launch_nothing() -> None:
    x = make(576, 128, 64, 1, 100)
    x.q, x.indices = x.q[:0], x.indices[:0]
    out, max_logits, lse = run(x)
    assert out.shape == (0, 128, D_V)
    assert max_logits.shape == lse.shape == (0, 128)


def test_more_queries_than_a_grid_dimension_holds() -> None:
    # 70,000 queries; the last rows of out lie beyond 2^32 elements.
    x = make(576, 128, 64, 70_000, 4096)
    rows = torch.tensor([0, 1, 65_535, 65_536, 65_537, 69_998, 69_999], device="cuda")
    check(x, rows, OUT_RELATIVE_FEW)


def test_offsets_beyond_32_bits() -> None:
    s_kv = 2**32 // 576 + 1000
    x = make(576, 64, 128, 40, 64)
    kv = torch.zeros(s_kv, 576, dtype=torch.uint8, device="cuda")
    kv[-2000:] = random_e4m3(2000, 576, seed=9).view(torch.uint8)
    x.kv = kv.view(E4M3)
    x.indices = (s_kv - 1 - torch.arange(40 * 128, device="cuda") % 2000).view(40, 128).int()
    check(x)


def test_every_option_can_be_captured() -> None:
    x = make(576, 128, 256, 60, 2000)
    shorten_and_sink(x)
    x.q_scale, x.kv_scale = torch.tensor(0.9, device="cuda"), torch.tensor(1.1, device="cuda")
    want = run(x)
    out, max_logits, lse = (torch.full_like(tensor, math.nan) for tensor in want)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        sparse_mla_sm90.launch(
            x.q, x.kv, x.indices, x.sm_scale, x.q_scale, x.kv_scale, x.attn_sink, x.topk_length, out, max_logits, lse
        )
    graph.replay()
    torch.cuda.synchronize()
    for one, other in zip((out, max_logits, lse), want, strict=True):
        assert torch.equal(one, other)


def test_the_first_cuda_call_of_a_thread_may_be_a_launch() -> None:
    x = make(576, 64, 128, 20, 500)
    with OutputPool() as pool:
        arguments = {"q_scale": 1.0, "kv_scale": 1.0, "allocator": pool, "backend": "sm90"}
        first = [tensor.clone() for tensor in sparse_mla_prefill(x.q, x.kv, x.indices, x.sm_scale, **arguments)]
        results: list[Any] = []

        def call() -> None:
            results.append(sparse_mla_prefill(x.q, x.kv, x.indices, x.sm_scale, **arguments))

        thread = threading.Thread(target=call)
        thread.start()
        thread.join()
        (result,) = results  # an error of the thread would have left none
        assert pool.stats().hits == 1
        assert same_bits(tuple(result), tuple(first))


@pytest.mark.slow
def test_ten_thousand_launches_beside_a_busy_stream() -> None:
    shapes = [(576, 128, 256, 97, 3000), (512, 64, 192, 61, 3000), (576, 16, 64, 333, 3000), (576, 80, 130, 20, 3000)]
    calls = [make(*shape, seed=i) for i, shape in enumerate(shapes)]
    punch_holes(calls[0])
    shorten(calls[2])
    sink(calls[3])
    want = [run(x) for x in calls]
    results = [tuple(torch.empty_like(tensor) for tensor in result) for result in want]
    wrong = torch.zeros((), dtype=torch.int64, device="cuda")
    side = torch.cuda.Stream()
    source, target = (torch.empty(2**28, dtype=torch.uint8, device="cuda") for _ in range(2))
    for launch in range(10_000):
        if launch % 20 == 0:
            with torch.cuda.stream(side):
                target.copy_(source)
        i = launch % len(calls)
        x, (out, max_logits, lse) = calls[i], results[i]
        out.fill_(math.nan)
        sparse_mla_sm90.launch(
            x.q, x.kv, x.indices, x.sm_scale, x.q_scale, x.kv_scale, x.attn_sink, x.topk_length, out, max_logits, lse
        )
        for have, right in zip(results[i], want[i], strict=True):
            kind = torch.int16 if have.dtype is torch.bfloat16 else torch.int32
            wrong += (have.view(kind) != right.view(kind)).sum()
    torch.cuda.synchronize()
    assert wrong.item() == 0


def test_strides_of_a_single_row_do_not_count() -> None:
    x = make(576, 64, 100, 1, 500)
    x.q = torch.as_strided(x.q, x.q.shape, (7, 576, 1))
    x.indices = torch.as_strided(x.indices, x.indices.shape, (3, 1))
    check(x)


def test_the_stride_of_a_single_head_does_not_count() -> None:
    x = make(576, 1, 100, 140, 500)
    x.q = torch.as_strided(x.q, x.q.shape, (576, 7, 1))
    check(x, out_relative=OUT_RELATIVE_FEW)

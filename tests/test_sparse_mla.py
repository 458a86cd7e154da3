"""The operator: what it accepts, whose memory it writes, which backend serves. Values are test_reference's matter."""

from __future__ import annotations

import logging
import math
import warnings

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

import bufpool
from bufpool import BufpoolError, DeviceMismatchError, FreshAllocator, OutputMismatchError, OutputPool, PoolLimitError
from bufpool.ops import (
    sparse_mla,
    sparse_mla_prefill,
    sparse_mla_prefill_reference,
    sparse_mla_sm90,
    sparse_mla_spec,
)
from bufpool.testing import assert_write_only

E4M3 = torch.float8_e4m3fn
S_Q, H_Q, TOPK, S_KV, D_QK = 5, 3, 7, 30, 576
INF = float("inf")


def make(s_q=S_Q, h_q=H_Q, topk=TOPK, s_kv=S_KV, d_qk=D_QK, seed=0):
    """Arguments of the operator by name."""
    generator = torch.Generator().manual_seed(seed)
    indices = torch.randint(0, max(1, s_kv), (s_q, topk), generator=generator, dtype=torch.int32)
    indices[torch.rand(s_q, topk, generator=generator) < 0.2] = -1
    return {
        "q": torch.randn(s_q, h_q, d_qk, generator=generator).to(E4M3),
        "kv": torch.randn(s_kv, d_qk, generator=generator).to(E4M3),
        "indices": indices,
        "sm_scale": 0.05,
        "q_scale": torch.tensor([0.5]),
        "kv_scale": torch.tensor([2.0]),
        "attn_sink": torch.linspace(-1, 1, h_q),
        "topk_length": torch.randint(0, topk + 1, (s_q,), generator=generator, dtype=torch.int32),
    }


def expected(arguments):
    """The definition, on memory of its own."""
    s_q, h_q, _ = arguments["q"].shape
    out = torch.empty(s_q, h_q, 512, dtype=torch.bfloat16)
    max_logits, lse = torch.empty(s_q, h_q), torch.empty(s_q, h_q)
    arguments = {"attn_sink": None, "topk_length": None, **arguments}
    sparse_mla_prefill_reference(**arguments, out=out, max_logits=max_logits, lse=lse)
    return out, max_logits, lse


def outputs_for(s_q=S_Q, h_q=H_Q, fill=math.nan, device="cpu"):
    return {
        "out": torch.full((s_q, h_q, 512), fill, dtype=torch.bfloat16, device=device),
        "max_logits": torch.full((s_q, h_q), fill, device=device),
        "lse": torch.full((s_q, h_q), fill, device=device),
    }


def same_bits(one, other):
    return all(
        a.dtype is b.dtype
        and a.shape == b.shape
        and torch.equal(a.reshape(-1).view(torch.uint8), b.reshape(-1).view(torch.uint8))
        for a, b in zip(one, other, strict=True)
    )


class Recorder(FreshAllocator):
    """A fresh allocator that remembers what it was asked for."""

    def __init__(self):
        self.asked = []

    def acquire(self, spec, rows, like):
        self.asked.append((spec, rows))
        return super().acquire(spec, rows, like)


class Dirty:
    """Grow-only buffers full of one value, handed out as slices."""

    def __init__(self, fill, max_rows=200):
        self.fill, self.max_rows, self.buffers = fill, max_rows, {}

    def acquire(self, spec, rows, like):
        if spec not in self.buffers:
            self.buffers[spec] = [
                torch.full((self.max_rows, *shape), self.fill, dtype=dtype)
                for shape, dtype in zip(spec.row_shapes, spec.dtypes, strict=True)
            ]
        return spec.outputs_type(*(buffer[:rows] for buffer in self.buffers[spec]))


@pytest.fixture(params=["pool", "fresh", "default"])
def allocator(request):
    if request.param == "pool":
        with OutputPool() as pool:
            yield pool
    elif request.param == "fresh":
        yield FreshAllocator()
    else:
        before = bufpool.default_pool()
        with OutputPool() as pool:
            bufpool.set_default_pool(pool)
            yield None
            bufpool.set_default_pool(before)


# --- Results ---


@pytest.mark.parametrize("d_qk", [512, 576])
@pytest.mark.parametrize("optional", [(), ("attn_sink",), ("topk_length",), ("attn_sink", "topk_length")])
def test_the_result_is_the_definition(allocator, d_qk, optional):
    arguments = make(d_qk=d_qk)
    for name in {"attn_sink", "topk_length"} - set(optional):
        del arguments[name]
    result = sparse_mla_prefill(**arguments, allocator=allocator)
    assert result._fields == ("out", "max_logits", "lse")
    assert same_bits(result, expected(arguments))


def test_positional_arguments_have_the_documented_order(allocator):
    arguments = make()
    values = list(arguments.values())
    result = sparse_mla_prefill(*values[:6], 512, *values[6:], allocator=allocator)
    assert same_bits(result, expected(arguments))


def test_engine_shapes_give_the_same_bits(allocator):
    arguments = make()
    want = expected(arguments)
    arguments["kv"] = arguments["kv"][:, None]
    arguments["indices"] = arguments["indices"][:, None]
    assert same_bits(sparse_mla_prefill(**arguments, allocator=allocator), want)


def test_strided_rows_and_heads(allocator):
    arguments = make()
    want = expected(arguments)
    wide = torch.zeros(S_Q, H_Q + 2, 640, dtype=torch.uint8).view(E4M3)
    wide[:, 1:-1, 16:592] = arguments["q"]
    arguments["q"] = wide[:, 1:-1, 16:592]
    wide = torch.full((S_KV, 2, 600), 0x7F, dtype=torch.uint8).view(E4M3)
    wide[:, 1, :576] = arguments["kv"]
    arguments["kv"] = wide[:, 1:, :576]
    assert same_bits(sparse_mla_prefill(**arguments, allocator=allocator), want)


@pytest.mark.parametrize("scale", [2, 2.0, np.float32(2), np.float64(2), np.int64(2), torch.tensor(2.0)])
def test_kinds_of_scales(scale):
    arguments = make() | {"q_scale": 2.0, "kv_scale": 2.0}
    want = sparse_mla_prefill(**arguments, allocator=FreshAllocator())
    arguments |= {"q_scale": scale, "kv_scale": scale}
    assert same_bits(sparse_mla_prefill(**arguments, allocator=FreshAllocator()), want)
    if not isinstance(scale, torch.Tensor):
        arguments["sm_scale"] = scale
        sparse_mla_prefill(**arguments, allocator=FreshAllocator())


def test_no_kv_rows(allocator):
    out, max_logits, lse = sparse_mla_prefill(**make(s_kv=0), allocator=allocator)
    assert not out.any()
    assert bool((max_logits == -INF).all())
    assert bool((lse == INF).all())


def test_held_results_stay(allocator):
    """Two calls whose results are both held never share memory; nor does a held view."""
    first, second = make(seed=1), make(seed=2)
    one = sparse_mla_prefill(**first, allocator=allocator)
    view = one.out[1:, :2]
    lse = one.lse
    del one
    two = sparse_mla_prefill(**second, allocator=allocator)
    assert same_bits([view, lse], [expected(first)[0][1:, :2], expected(first)[2]])
    assert same_bits(two, expected(second))


@settings(max_examples=15, deadline=None)
@given(rows=st.lists(st.integers(0, 40), min_size=1, max_size=8), held=st.integers(0, 3))
def test_any_sequence_of_rows_on_a_pool_equals_fresh_memory(rows, held):
    with OutputPool() as pool:
        kept = []
        for seed, s_q in enumerate(rows):
            arguments = make(s_q, seed=seed)
            kept.append((sparse_mla_prefill(**arguments, allocator=pool), expected(arguments)))
            kept = kept[-held:] if held else []
            assert all(same_bits(got, want) for got, want in kept)
        kept.clear()


def test_a_small_call_after_a_big_one_shows_nothing_of_it():
    for fill in (0.0, math.nan, 1e30):
        dirty = Dirty(fill)
        big, small = make(150, seed=1), make(4, seed=2)
        assert same_bits(sparse_mla_prefill(**big, allocator=dirty), expected(big))
        result = sparse_mla_prefill(**small, allocator=dirty)
        assert [tuple(t.shape) for t in result] == [(4, H_Q, 512), (4, H_Q), (4, H_Q)]
        assert same_bits(result, expected(small))
        behind = [buffer[150:] for buffer in next(iter(dirty.buffers.values()))]
        assert same_bits(behind, [torch.full_like(t, fill) for t in behind])


@pytest.mark.parametrize("fill", [0.0, math.nan, 1e30, -INF])
def test_dirty_memory_does_not_show(fill):
    arguments = make()
    mine = outputs_for(fill=fill)
    assert same_bits(sparse_mla_prefill(**arguments, **mine), expected(arguments))
    assert same_bits(sparse_mla_prefill(**arguments, allocator=Dirty(fill)), expected(arguments))


def test_the_operator_only_writes():
    for arguments in (make(), make(s_kv=0), make(9, 1, 1), make() | {"topk_length": torch.zeros(S_Q, dtype=torch.int32)}):
        s_q, h_q, _ = arguments["q"].shape

        def call(outputs, arguments=arguments):
            sparse_mla_prefill(**arguments, **outputs._asdict())

        assert_write_only(call, sparse_mla_spec(h_q), s_q, arguments["q"])


def test_tensors_past_two_to_the_31_elements_and_32_bytes():
    """Memory that is only ever touched at its far end, so that gigabytes cost nothing."""
    arguments = make(2, 2, 3, 4, 512)
    want = expected(arguments)
    stride = 2**32 + 1024
    far_q = torch.empty(stride + 1024, dtype=torch.uint8).view(E4M3).as_strided((2, 2, 512), (stride, 512, 1))
    far_q.copy_(arguments["q"])
    s_kv = 2**32 // 512 + 4
    far_kv = torch.empty((s_kv, 512), dtype=torch.uint8).view(E4M3)
    far_kv[-4:] = arguments["kv"]
    at = 2**31 + 1
    out = torch.zeros(1, dtype=torch.bfloat16).new_empty(at + 2048)
    mine = out[at:].view(2, 2, 512)
    indices = torch.where(arguments["indices"] >= 0, arguments["indices"] + (s_kv - 4), -1)
    arguments |= {"q": far_q, "kv": far_kv, "indices": indices}
    assert same_bits(sparse_mla_prefill(**arguments, out=mine), want)
    with pytest.raises(OutputMismatchError, match=r"^out: .* got 4096 bytes shared with kv "):
        sparse_mla_prefill(**arguments, out=far_kv.view(torch.bfloat16).view(-1)[-2560:-512].view(2, 2, 512))


# --- Rows 0 ---


def test_no_rows_no_launch(allocator, monkeypatch):
    monkeypatch.setitem(sparse_mla._launches, ("auto", torch.device("cpu")), None)  # Calling it would raise.
    result = sparse_mla_prefill(**make(0), allocator=allocator)
    assert [(tuple(t.shape), t.dtype) for t in result] == [
        ((0, H_Q, 512), torch.bfloat16),
        ((0, H_Q), torch.float32),
        ((0, H_Q), torch.float32),
    ]
    mine = outputs_for(0)
    result = sparse_mla_prefill(**make(0), **mine, allocator=allocator)  # All addresses are 0: no alias.
    assert all(result[place] is t for place, t in enumerate(mine.values()))
    with pytest.raises(OutputMismatchError, match=r"^out: expected shape"):
        sparse_mla_prefill(**make(0), out=outputs_for(1)["out"], allocator=allocator)


# --- Outputs that the caller brings ---


@pytest.mark.parametrize(
    "names",
    [("out",), ("max_logits",), ("lse",), ("out", "lse"), ("max_logits", "lse"), ("out", "max_logits", "lse")],
)
def test_given_outputs_are_written_and_returned(names):
    arguments = make()
    recorder = Recorder()
    mine = {name: t for name, t in outputs_for().items() if name in names}
    result = sparse_mla_prefill(**arguments, **mine, allocator=recorder)
    assert same_bits(result, expected(arguments))
    assert all(getattr(result, name) is t for name, t in mine.items())
    missing = [name for name in ("out", "max_logits", "lse") if name not in names]
    assert [list(spec.names) for spec, _ in recorder.asked] == ([missing] if missing else [])
    assert all(rows == S_Q for _, rows in recorder.asked)


def test_slices_of_one_buffer_are_fine_when_apart():
    arguments = make()
    rows = torch.full((3 * S_Q, H_Q), math.nan)
    sparse_mla_prefill(**arguments, max_logits=rows[:S_Q], lse=rows[S_Q : 2 * S_Q])
    _, max_logits, lse = expected(arguments)
    assert same_bits([rows[:S_Q], rows[S_Q : 2 * S_Q]], [max_logits, lse])
    assert rows[2 * S_Q :].isnan().all()


def refuses(error, text, arguments, **more):
    """The call fails with exactly ``text``, before any work: nothing acquired, nothing written."""
    recorder = Recorder()
    given = {name: t for name, t in more.items() if isinstance(t, torch.Tensor) and not t.is_meta and not t.is_sparse}
    before = {name: t.detach().clone() for name, t in given.items()}
    with pytest.raises(error) as caught:
        sparse_mla_prefill(**(arguments | {"allocator": recorder} | more))
    assert str(caught.value) == text
    assert type(caught.value) is error
    assert recorder.asked == []
    assert same_bits([t.detach() for t in given.values()], before.values())


@pytest.mark.parametrize(
    ("name", "value", "text"),
    [
        ("out", torch.zeros(5, 3, 512), "out: expected dtype torch.bfloat16, got torch.float32"),
        ("lse", torch.zeros(5, 3, dtype=torch.bfloat16), "lse: expected dtype torch.float32, got torch.bfloat16"),
        ("max_logits", torch.zeros(3, 5), "max_logits: expected shape [5, 3], got [3, 5]"),
        ("out", torch.zeros(5, 1536).bfloat16(), "out: expected shape [5, 3, 512], got [5, 1536]"),
        ("out", torch.zeros(6, 3, 512).bfloat16(), "out: expected shape [5, 3, 512], got [6, 3, 512]"),
        (
            "out",
            torch.zeros(5, 4, 512).bfloat16()[:, :3],
            "out: expected a contiguous tensor of shape [5, 3, 512], got strides [2048, 512, 1]",
        ),
        (
            "lse",
            torch.zeros(3, 5).t(),
            "lse: expected a contiguous tensor of shape [5, 3], got strides [1, 5]",
        ),
    ],
)
def test_given_outputs_that_do_not_fit(name, value, text):
    refuses(OutputMismatchError, text, make(), **{name: value})


def test_given_outputs_on_another_device():
    refuses(DeviceMismatchError, "lse must be on device cpu, got meta", make(), lse=torch.zeros(S_Q, H_Q, device="meta"))


def test_given_outputs_of_another_kind():
    refuses(TypeError, "out: expected a tensor, got ndarray", make(), out=np.zeros((S_Q, H_Q, 512)))


def test_given_outputs_that_require_grad():
    with pytest.raises(OutputMismatchError, match=r"^lse: expected a tensor without grad.* got a leaf"):
        sparse_mla_prefill(**make(), lse=torch.zeros(S_Q, H_Q, requires_grad=True))


def test_given_outputs_that_overlap_by_one_row():
    rows = torch.zeros(2 * S_Q - 1, H_Q)
    with pytest.raises(OutputMismatchError, match=r"^lse: .* got 12 bytes shared with max_logits "):
        sparse_mla_prefill(**make(), max_logits=rows[:S_Q], lse=rows[S_Q - 1 :])


@pytest.mark.parametrize("name", ["q", "kv", "indices", "q_scale", "kv_scale", "attn_sink", "topk_length"])
def test_given_outputs_that_overlap_an_input(name):
    arguments = make()
    t = arguments[name]
    memory = torch.zeros(2**16, dtype=torch.uint8)
    nbytes = S_Q * H_Q * 512 * 2
    out = memory[:nbytes].view(torch.bfloat16).view(S_Q, H_Q, 512)
    at = nbytes - t.dtype.itemsize  # The last element of out, the first of the input.
    shared = memory[at : at + t.nbytes].clone().view(t.dtype)
    assert shared.nbytes == t.nbytes
    inside = memory.view(-1)[at - at % 4 :] if t.dtype.itemsize == 4 else memory[at:]
    shared = inside[: t.nbytes].view(t.dtype).view(t.shape)
    shared.copy_(t)
    with pytest.raises(OutputMismatchError, match=rf"^out: .* got {t.dtype.itemsize} bytes shared with {name} "):
        sparse_mla_prefill(**(arguments | {name: shared}), out=out)
    apart = memory[nbytes : nbytes + t.nbytes].view(t.dtype).view(t.shape)
    apart.copy_(t)
    result = sparse_mla_prefill(**(arguments | {name: apart}), out=out)
    assert same_bits(result, expected(arguments))


# --- Arguments ---


@pytest.mark.parametrize(
    ("name", "value", "error", "text"),
    [
        ("q", None, TypeError, "q: expected a tensor, got None"),
        ("q", torch.zeros(5, 3, 576), OutputMismatchError,
         "q: expected float8_e4m3fn [s_q, h_q, 576 or 512], got float32 [5, 3, 576]"),
        ("q", torch.zeros(5, 576).to(E4M3), OutputMismatchError,
         "q: expected float8_e4m3fn [s_q, h_q, 576 or 512], got float8_e4m3fn [5, 576]"),
        ("q", torch.zeros(5, 3, 575).to(E4M3), OutputMismatchError,
         "q: expected float8_e4m3fn [s_q, h_q >= 1, 576 or 512], got float8_e4m3fn [5, 3, 575]"),
        ("q", torch.zeros(5, 0, 576).to(E4M3), OutputMismatchError,
         "q: expected float8_e4m3fn [s_q, h_q >= 1, 576 or 512], got float8_e4m3fn [5, 0, 576]"),
        ("q", torch.zeros(5, 3, 1152).to(E4M3)[..., ::2], OutputMismatchError,
         "q: expected a contiguous last dimension, got strides [3456, 1152, 2] of shape [5, 3, 576]"),
        ("kv", [1], TypeError, "kv: expected a tensor, got [1]"),
        ("kv", torch.zeros(30, 512).to(E4M3), OutputMismatchError,
         "kv: expected float8_e4m3fn [s_kv, 576] or [s_kv, 1, 576], d_qk as in q, got float8_e4m3fn [30, 512]"),
        ("kv", torch.zeros(30, 2, 576).to(E4M3), OutputMismatchError,
         "kv: expected float8_e4m3fn [s_kv, 576] or [s_kv, 1, 576], d_qk as in q, got float8_e4m3fn [30, 2, 576]"),
        ("kv", torch.zeros(30, 576).bfloat16(), OutputMismatchError,
         "kv: expected float8_e4m3fn [s_kv, 576] or [s_kv, 1, 576], d_qk as in q, got bfloat16 [30, 576]"),
        ("kv", torch.zeros(()).to(E4M3), OutputMismatchError,
         "kv: expected float8_e4m3fn [s_kv, 576] or [s_kv, 1, 576], d_qk as in q, got float8_e4m3fn []"),
        ("kv", torch.zeros(576, 30).to(E4M3).t(), OutputMismatchError,
         "kv: expected a contiguous last dimension, got strides [1, 30] of shape [30, 576]"),
        ("kv", torch.zeros(30, 576, device="meta").to(E4M3), DeviceMismatchError,
         "kv must be on device cpu, got meta (q is on cpu)"),
        ("indices", 3, TypeError, "indices: expected a tensor, got 3"),
        ("indices", torch.zeros(5, 7, dtype=torch.int64), OutputMismatchError,
         "indices: expected int32 [5, topk >= 1] or [5, 1, topk >= 1], rows as in q, got int64 [5, 7]"),
        ("indices", torch.zeros(4, 7, dtype=torch.int32), OutputMismatchError,
         "indices: expected int32 [5, topk >= 1] or [5, 1, topk >= 1], rows as in q, got int32 [4, 7]"),
        ("indices", torch.zeros(5, 0, dtype=torch.int32), OutputMismatchError,
         "indices: expected int32 [5, topk >= 1] or [5, 1, topk >= 1], rows as in q, got int32 [5, 0]"),
        ("indices", torch.zeros(5, 2, 7, dtype=torch.int32), OutputMismatchError,
         "indices: expected int32 [5, topk >= 1] or [5, 1, topk >= 1], rows as in q, got int32 [5, 2, 7]"),
        ("indices", torch.zeros(5, 7, dtype=torch.int32, device="meta"), DeviceMismatchError,
         "indices must be on device cpu, got meta (q is on cpu)"),
        ("sm_scale", True, TypeError, "sm_scale: expected a finite number, got True"),
        ("sm_scale", "1", TypeError, "sm_scale: expected a finite number, got '1'"),
        ("sm_scale", None, TypeError, "sm_scale: expected a finite number, got None"),
        ("sm_scale", torch.tensor(1.0), TypeError, "sm_scale: expected a finite number, got tensor(1.)"),
        ("sm_scale", 1j, TypeError, "sm_scale: expected a finite number, got 1j"),
        ("sm_scale", math.nan, ValueError, "sm_scale: expected a finite number that float32 can hold, got nan"),
        ("sm_scale", INF, ValueError, "sm_scale: expected a finite number that float32 can hold, got inf"),
        ("sm_scale", -1e39, ValueError, "sm_scale: expected a finite number that float32 can hold, got -1e+39"),
        ("sm_scale", np.float32("nan"), ValueError,
         "sm_scale: expected a finite number that float32 can hold, got nan"),
        ("sm_scale", 10**400, ValueError, "sm_scale: expected a finite number, got an integer of 401 digits"),
        ("q_scale", math.nan, ValueError,
         "q_scale: expected a finite number or a float32 tensor of one element that float32 can hold, got nan"),
        ("q_scale", False, TypeError,
         "q_scale: expected a finite number or a float32 tensor of one element, got False"),
        ("q_scale", torch.ones(2), OutputMismatchError,
         "q_scale: expected a finite number or a float32 tensor of one element, got float32 [2]"),
        ("q_scale", torch.ones(0), OutputMismatchError,
         "q_scale: expected a finite number or a float32 tensor of one element, got float32 [0]"),
        ("kv_scale", torch.ones(1).double(), OutputMismatchError,
         "kv_scale: expected a finite number or a float32 tensor of one element, got float64 [1]"),
        ("kv_scale", torch.ones(1, device="meta"), DeviceMismatchError,
         "kv_scale must be on device cpu, got meta (q is on cpu)"),
        ("kv_scale", -INF, ValueError,
         "kv_scale: expected a finite number or a float32 tensor of one element that float32 can hold, got -inf"),
        ("d_v", 256, ValueError, "d_v: expected 512, got 256"),
        ("d_v", 512.0, TypeError, "d_v: expected 512, got 512.0"),
        ("d_v", True, TypeError, "d_v: expected 512, got True"),
        ("d_v", None, TypeError, "d_v: expected 512, got None"),
        ("attn_sink", 0.5, TypeError, "attn_sink: expected a tensor, got 0.5"),
        ("attn_sink", torch.zeros(4), OutputMismatchError,
         "attn_sink: expected float32 [3], heads as in q, got float32 [4]"),
        ("attn_sink", torch.zeros(3).half(), OutputMismatchError,
         "attn_sink: expected float32 [3], heads as in q, got float16 [3]"),
        ("attn_sink", torch.zeros(3, device="meta"), DeviceMismatchError,
         "attn_sink must be on device cpu, got meta (q is on cpu)"),
        ("topk_length", [7] * 5, TypeError, "topk_length: expected a tensor, got [7, 7, 7, 7, 7]"),
        ("topk_length", torch.zeros(5, 1, dtype=torch.int32), OutputMismatchError,
         "topk_length: expected int32 [5], rows as in q, got int32 [5, 1]"),
        ("topk_length", torch.zeros(5, dtype=torch.int64), OutputMismatchError,
         "topk_length: expected int32 [5], rows as in q, got int64 [5]"),
        ("topk_length", torch.zeros(5, dtype=torch.int32, device="meta"), DeviceMismatchError,
         "topk_length must be on device cpu, got meta (q is on cpu)"),
        ("backend", "cuda", ValueError, "backend: expected one of auto, reference, sm90, got 'cuda'"),
        ("backend", None, TypeError, "backend: expected one of auto, reference, sm90, got None"),
        ("backend", ["auto"], TypeError, "backend: expected one of auto, reference, sm90, got ['auto']"),
    ],
)  # fmt: skip
def test_wrong_arguments(name, value, error, text):
    refuses(error, text, make(), **{name: value})


def test_numpy_integers_and_default_of_d_v():
    arguments = make()
    assert same_bits(sparse_mla_prefill(**arguments, d_v=np.int64(512)), expected(arguments))


def test_allocators_must_acquire():
    with pytest.raises(TypeError, match=r"^allocator: expected an object with acquire\(spec, rows, like\), got 'pool'$"):
        sparse_mla_prefill(**make(), allocator="pool")


def test_limits_of_the_pool_come_through_and_change_nothing():
    with OutputPool(max_bytes=2**22) as pool:
        result = sparse_mla_prefill(**make(), allocator=pool)
        before = pool.stats().mapped_bytes
        with pytest.raises(PoolLimitError):
            sparse_mla_prefill(**make(5000), allocator=pool)
        assert pool.stats().mapped_bytes == before
        assert same_bits(result, expected(make()))
        del result
        assert same_bits(sparse_mla_prefill(**make(), allocator=pool), expected(make()))


# --- The spec ---


def test_spec():
    spec = sparse_mla_spec(16)
    assert list(spec) == [
        ("out", (16, 512), torch.bfloat16),
        ("max_logits", (16,), torch.float32),
        ("lse", (16,), torch.float32),
    ]
    assert sparse_mla_spec(16, 512) is spec
    assert sparse_mla_spec(np.int64(16)) is spec
    assert sparse_mla_spec(16, 128).row_shapes[0] == (16, 128)
    for wrong in (True, 1.0, "1"):
        with pytest.raises(TypeError):
            sparse_mla_spec(wrong)
    with pytest.raises(ValueError, match="expected sizes >= 1"):
        sparse_mla_spec(0)


def test_other_head_counts_have_lanes_of_their_own():
    """Twice the heads in half the rows is the same number of elements, and another lane."""
    with OutputPool() as pool:
        one = sparse_mla_prefill(**make(8, 2), allocator=pool)
        two = sparse_mla_prefill(**make(4, 4), allocator=pool)
        assert len(pool.stats().lanes) == 2
        assert same_bits(one, expected(make(8, 2)))
        assert same_bits(two, expected(make(4, 4)))


# --- Backends ---


@pytest.fixture
def no_backend_yet(monkeypatch):
    monkeypatch.setattr(sparse_mla, "_launches", {})
    monkeypatch.setattr(sparse_mla, "_logged", set())


def test_sm90_on_the_cpu_says_why_not():
    refuses(
        BufpoolError,
        "backend: expected sm90 to be available on cpu, got none: it needs a CUDA device, got cpu",
        make(),
        backend="sm90",
    )


def test_what_serves_is_logged_once(no_backend_yet, caplog):
    with caplog.at_level(logging.INFO, logger="bufpool"):
        for _ in range(3):
            sparse_mla_prefill(**make(), allocator=FreshAllocator())
            sparse_mla_prefill(**make(), allocator=FreshAllocator(), backend="reference")
    assert [(record.name, record.levelno, record.getMessage()) for record in caplog.records] == [
        (
            "bufpool",
            logging.INFO,
            "sparse_mla_prefill: the reference serves backend='auto' on cpu: sm90 is not available: it needs a CUDA "
            "device, got cpu",
        ),
        (
            "bufpool",
            logging.INFO,
            "sparse_mla_prefill: the reference serves backend='reference' on cpu: it was asked for",
        ),
    ]


def test_the_kernel_serves_where_it_says_it_can(no_backend_yet, monkeypatch, caplog):
    """The choice alone, with a stand-in for the kernel: no GPU is touched."""
    device = torch.device("cuda", 0)

    class Module:
        reason = None

        @staticmethod
        def launch(*arguments):
            raise AssertionError

        @classmethod
        def unavailable_reason(cls, device):
            return cls.reason

    monkeypatch.setattr(sparse_mla.importlib, "import_module", lambda name, package: Module)
    with caplog.at_level(logging.INFO, logger="bufpool"):
        assert isinstance(sparse_mla._find_launch("auto", device), sparse_mla._Sm90)
        assert isinstance(sparse_mla._find_launch("sm90", device), sparse_mla._Sm90)
        Module.reason = "compute capability is 8.0"
        assert sparse_mla._find_launch("auto", device) is sparse_mla_prefill_reference
        with pytest.raises(BufpoolError, match=r"^backend: expected sm90 .* on cuda:0, got none: compute .* is 8\.0$"):
            sparse_mla._find_launch("sm90", device)
    texts = [record.getMessage() for record in caplog.records]
    assert "sm90 serves backend='auto' on cuda:0: the kernel is available" in texts[0]
    assert "the reference serves backend='auto' on cuda:0: sm90 is not available: compute capability" in texts[2]


def test_a_kernel_that_cannot_be_imported_is_a_reason(no_backend_yet, monkeypatch):
    def fail(name, package):
        raise ImportError("no such thing")

    monkeypatch.setattr(sparse_mla.importlib, "import_module", fail)
    with pytest.raises(BufpoolError, match=r"the kernel cannot be imported \(no such thing\)$"):
        sparse_mla._find_launch("sm90", torch.device("cuda", 0))
    assert sparse_mla._find_launch("auto", torch.device("cuda", 0)) is sparse_mla_prefill_reference


def test_what_the_kernel_cannot_address_is_copied_and_logged_once(no_backend_yet, caplog):
    seen = []

    def kernel(q, kv, indices, sm_scale, q_scale, kv_scale, attn_sink, topk_length, out, max_logits, lse):
        seen.append((q, kv, indices, attn_sink, topk_length, out))
        sparse_mla_prefill_reference(
            q, kv, indices, sm_scale, q_scale, kv_scale, attn_sink, topk_length, out, max_logits, lse
        )

    launch = sparse_mla._Sm90(kernel)
    arguments = make()
    want = expected(arguments)
    launch(**arguments, **outputs_for())
    assert all(got is arguments[name] for name, got in zip(("q", "kv", "indices"), seen[0], strict=False))

    # Strides and places that are multiples of 16 bytes pass as they are, in two dimensions.
    wide = torch.zeros(S_Q, H_Q, 592, dtype=torch.uint8).view(E4M3)
    wide[..., 16:] = arguments["q"]
    mine = outputs_for()
    tall = arguments["kv"].repeat_interleave(2, 0)[::2, None]
    three = arguments["indices"].repeat(1, 2)[:, None, :TOPK]
    launch(**(arguments | {"q": wide[..., 16:], "kv": tall, "indices": three}), **mine)
    q, kv, indices, *_ = seen[1]
    assert q.data_ptr() == wide.data_ptr() + 16
    assert kv.data_ptr() == tall.data_ptr()
    assert kv.shape == (S_KV, D_QK)
    assert indices.data_ptr() == three.data_ptr()
    assert indices.shape == (S_Q, TOPK)
    assert same_bits(mine.values(), want)

    # Others are copied.
    with caplog.at_level(logging.INFO, logger="bufpool"):
        for _ in range(2):
            wide = torch.zeros(S_Q, H_Q, 580, dtype=torch.uint8).view(E4M3)
            wide[..., 2:578] = arguments["q"]
            long = torch.zeros(S_KV * D_QK + 1, dtype=torch.uint8).view(E4M3)
            long[1:] = arguments["kv"].view(-1)
            odd = torch.empty(S_Q * H_Q * 512 + 1, dtype=torch.bfloat16)[1:].view(S_Q, H_Q, 512)
            mine = outputs_for() | {"out": odd}
            strided = {
                "q": wide[..., 2:578],
                "kv": long[1:].view(S_KV, D_QK),
                "indices": arguments["indices"].repeat_interleave(2, 1)[:, ::2],
                "attn_sink": arguments["attn_sink"].repeat_interleave(2)[::2],
                "topk_length": arguments["topk_length"].repeat_interleave(2)[::2],
            }
            launch(**(arguments | strided), **mine)
            assert same_bits(mine.values(), want)
    for t in seen[-1]:
        assert t.is_contiguous()
        assert t.data_ptr() % 16 == 0
    assert len(caplog.records) == len(strided) + 1
    assert all(" is copied at every call like this one" in record.getMessage() for record in caplog.records)


# --- No device sync, and no memory at all ---


class NoSync(TorchDispatchMode):
    """Refuses what would wait for a device: reading a value on the host, and results whose size depends on values."""

    SYNCING = (
        "aten::_local_scalar_dense",
        "aten::item",
        "aten::is_nonzero",
        "aten::equal",
        "aten::nonzero",
        "aten::masked_select",
        "aten::_unique2",
        "aten::unique_dim",
        "aten::bincount",
        "aten::repeat_interleave",
    )

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func._schema.name
        if name in self.SYNCING:
            raise AssertionError(f"{name} waits for the device")
        has_mask = name.startswith("aten::index") and any(
            isinstance(t, torch.Tensor) and t.dtype is torch.bool
            for arg in args
            if isinstance(arg, (list, tuple))
            for t in arg
        )
        if has_mask:
            raise AssertionError(f"{name} with a mask waits for the device")
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    "plant", [lambda t: t.item(), lambda t: bool(t.any()), lambda t: t[t > 0], lambda t: t.nonzero(), float, int]
)
def test_the_mode_itself_finds_syncs(plant):
    with NoSync(), pytest.raises(AssertionError, match="waits for the device"):
        plant(torch.ones(3)[:1])


@pytest.fixture
def no_reads(monkeypatch):
    """To call: refuse, then allow again, the reads of memory that no operator shows on CPU tensors."""

    def start():
        for name in ("cpu", "item", "numpy", "tolist", "__array__", "__bool__", "__float__", "__index__", "__int__"):

            def refuse(*arguments, name=name, **more):
                raise AssertionError(f"Tensor.{name} waits for the device")

            monkeypatch.setattr(torch.Tensor, name, refuse)

    yield start, monkeypatch.undo
    monkeypatch.undo()


@pytest.mark.parametrize("arguments", [make(), make(0), make() | {"q_scale": 0.5, "kv_scale": 2.0}])
def test_no_value_is_read_on_the_host(arguments, no_reads):
    start, stop = no_reads
    want = expected(arguments)
    mine = outputs_for(arguments["q"].shape[0])
    with NoSync():
        start()
        result = sparse_mla_prefill(**arguments, allocator=FreshAllocator())
        given = sparse_mla_prefill(**arguments, **mine)
        with pytest.raises(AssertionError, match=r"^Tensor\.tolist waits"):
            arguments["indices"].tolist()
    stop()
    assert same_bits(result, want)
    assert same_bits(given, want)


def test_meta_tensors_give_meta_outputs():
    arguments = {name: t.to("meta") if isinstance(t, torch.Tensor) else t for name, t in make().items()}
    with OutputPool() as pool:
        result = sparse_mla_prefill(**arguments, allocator=pool)
        assert pool.stats().acquires == 0
        mine = outputs_for(device="meta")
        given = sparse_mla_prefill(**arguments, **mine, allocator=pool)
    for t, shape, dtype in zip(result, sparse_mla_spec(H_Q).shapes(S_Q), sparse_mla_spec(H_Q).dtypes, strict=True):
        assert t.is_meta
        assert t.shape == shape
        assert t.dtype is dtype
    assert all(t is mine[name] for name, t in zip(given._fields, given, strict=True))
    with pytest.raises(DeviceMismatchError, match=r"^kv must be on device meta, got cpu \(q is on meta\)$"):
        sparse_mla_prefill(**(arguments | {"kv": make()["kv"]}))


def test_fake_tensors_give_fake_outputs():
    with FakeTensorMode() as mode, OutputPool() as pool:
        arguments = {name: mode.from_tensor(t) if isinstance(t, torch.Tensor) else t for name, t in make().items()}
        result = sparse_mla_prefill(**arguments, allocator=pool)
        assert pool.stats().acquires == 0
        mine = outputs_for()
        sparse_mla_prefill(**arguments, **mine, allocator=pool)
        with pytest.raises(OutputMismatchError, match=r"^out: expected shape"):
            sparse_mla_prefill(**arguments, out=mine["out"][:2])
    for t, shape, dtype in zip(result, sparse_mla_spec(H_Q).shapes(S_Q), sparse_mla_spec(H_Q).dtypes, strict=True):
        assert isinstance(t, FakeTensor)
        assert t.device.type == "cpu"
        assert t.shape == shape
        assert t.dtype is dtype


# --- On a GPU ---


def on_gpu(arguments):
    return {name: t.cuda() if isinstance(t, torch.Tensor) else t for name, t in arguments.items()}


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
class TestGpu:
    def test_no_sync(self):
        arguments = on_gpu(make())
        with OutputPool() as pool:
            want = sparse_mla_prefill(**arguments, allocator=pool, backend="reference")
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # the mode itself warns that it is a prototype
                torch.cuda.set_sync_debug_mode("error")
            try:
                got = sparse_mla_prefill(**arguments, allocator=pool, backend="reference")
            finally:
                torch.cuda.set_sync_debug_mode("default")
            assert same_bits(got, want)
            del got, want

    def test_the_whole_call_can_be_captured(self):
        arguments = on_gpu(make())
        want = sparse_mla_prefill(**arguments, allocator=FreshAllocator(), backend="reference")
        mine = outputs_for(device="cuda")
        sparse_mla_prefill(**arguments, **mine, backend="reference")
        torch.cuda.synchronize()
        for t in mine.values():
            t.fill_(math.nan)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            sparse_mla_prefill(**arguments, **mine, backend="reference")
        assert all(t.isnan().all() for t in mine.values())
        graph.replay()
        assert same_bits(mine.values(), want)
        arguments["topk_length"].zero_()  # Never read on the host: the graph sees the new lengths.
        graph.replay()
        assert not mine["out"].any()
        assert bool((mine["lse"] == INF).all())

    def test_the_operator_only_writes(self):
        arguments = on_gpu(make())

        def call(outputs):
            sparse_mla_prefill(**arguments, **outputs._asdict())

        assert_write_only(call, sparse_mla_spec(H_Q), S_Q, arguments["q"])

    @pytest.mark.sm90
    @pytest.mark.parametrize("d_qk", [512, 576])
    @pytest.mark.parametrize(
        ("s_q", "h_q", "topk", "s_kv"),
        [(1, 1, 1, 1), (63, 64, 128, 1000), (65, 65, 129, 300), (140, 128, 2048, 8192), (5, 130, 64, 0)],
    )
    def test_the_kernel_only_writes(self, d_qk, s_q, h_q, topk, s_kv):
        reason = sparse_mla_sm90.unavailable_reason(torch.device("cuda"))
        if reason:
            pytest.skip(reason)
        arguments = on_gpu(make(s_q, h_q, topk, s_kv, d_qk))

        def call(outputs):
            sparse_mla_prefill(**arguments, **outputs._asdict(), backend="sm90")

        assert_write_only(call, sparse_mla_spec(h_q), s_q, arguments["q"])

    def test_other_devices_are_named(self):
        arguments = on_gpu(make())
        home = arguments["q"].device
        for name in ("kv", "indices", "q_scale", "kv_scale", "attn_sink", "topk_length"):
            text = rf"^{name} must be on device {home}, got cpu \(q is on {home}\)$"
            with pytest.raises(DeviceMismatchError, match=text):
                sparse_mla_prefill(**(arguments | {name: arguments[name].cpu()}))
        with pytest.raises(DeviceMismatchError, match=rf"^lse must be on device {home}, got cpu$"):
            sparse_mla_prefill(**arguments, lse=torch.empty(S_Q, H_Q))

"""The definition of the operator, against loops in float64 that share no line with it."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from bufpool.ops.reference import D_V, sparse_mla_prefill_reference

E4M3 = torch.float8_e4m3fn
NAN_BYTE = 0x7F

# Bound on |result - float64 loops|, relative to the largest score, or to kv_scale times the largest value.
TOLERANCE = {
    torch.float32: 4e-6,  # Sums of up to 576 products and of topk weights, each rounded to 2^-24.
    torch.float64: 1e-13,  # The same, rounded to 2^-53; exp and log to an ulp.
    torch.bfloat16: 2**-8,  # One rounding to 8 bits, with room for the float32 error before it.
}


def loops(q, kv, indices, sm_scale, q_scale, kv_scale, attn_sink=None, topk_length=None):
    """(out, max_logits, lse) in float64, one row, head and place after the other."""
    q = q.double().numpy()
    bits = kv.double().numpy().reshape(kv.shape[0], q.shape[-1])
    places = indices.reshape(q.shape[0], -1).tolist()
    s_q, h_q, _ = q.shape
    out = np.zeros((s_q, h_q, D_V))
    max_logits = np.full((s_q, h_q), -np.inf)
    lse = np.full((s_q, h_q), np.inf)
    for row in range(s_q):
        length = len(places[row]) if topk_length is None else max(0, int(topk_length[row]))
        rows = [place for place in places[row][:length] if 0 <= place < len(bits)]
        if not rows:
            continue
        for head in range(h_q):
            scores = [float(sm_scale) * float(q_scale) * float(kv_scale) * float(q[row, head] @ bits[j]) for j in rows]
            largest = max(scores)
            weights = [np.exp(score - largest) for score in scores]
            total = sum(weights)
            max_logits[row, head] = largest
            lse[row, head] = largest + np.log(total)
            with np.errstate(over="ignore"):
                sink = 0.0 if attn_sink is None else np.exp(float(attn_sink[head]) - largest)
            for weight, j in zip(weights, rows, strict=True):
                out[row, head] += weight * bits[j, :D_V]
            out[row, head] *= float(kv_scale) / (total + sink)
    return torch.from_numpy(out), torch.from_numpy(max_logits), torch.from_numpy(lse)


def reference(q, kv, indices, sm_scale, q_scale, kv_scale, attn_sink=None, topk_length=None, *, out_dtype=None, **more):
    """(out, max_logits, lse) of the function under test, on memory that was NaN; out unrounded unless asked for."""
    dtype = more.get("dtype", torch.float32)
    nan = float("nan")
    out = torch.full((*q.shape[:2], D_V), nan, dtype=out_dtype or dtype, device=q.device)
    max_logits = torch.full(q.shape[:2], nan, dtype=dtype, device=q.device)
    lse = torch.full_like(max_logits, nan)
    assert (
        sparse_mla_prefill_reference(
            q, kv, indices, sm_scale, q_scale, kv_scale, attn_sink, topk_length, out, max_logits, lse, **more
        )
        is None
    )
    return out, max_logits, lse


def make(s_q=5, h_q=2, topk=6, s_kv=20, d_qk=576, seed=0, empty=0.3):
    generator = torch.Generator().manual_seed(seed)
    q = torch.randn(s_q, h_q, d_qk, generator=generator).to(E4M3)
    kv = torch.randn(s_kv, d_qk, generator=generator).to(E4M3)
    indices = torch.randint(0, max(1, s_kv), (s_q, topk), generator=generator, dtype=torch.int32)
    indices[torch.rand(s_q, topk, generator=generator) < empty] = -1
    return q, kv, indices


def close(got, want, dtype=torch.float32, kv_scale=1.0):
    """Empty rows exactly; the others within TOLERANCE."""
    out, max_logits, lse = got
    want_out, want_max, want_lse = want
    finite = want_max.isfinite()
    assert torch.equal(max_logits[~finite].double(), want_max[~finite])
    assert torch.equal(lse[~finite].double(), want_lse[~finite])
    assert not out[~finite].any()
    size = max(1.0, float(want_max[finite].abs().max())) if finite.any() else 1.0
    score_dtype = torch.float64 if dtype is torch.float64 else torch.float32
    for one, other in ((max_logits, want_max), (lse, want_lse)):
        error = (one.double() - other)[finite].abs()
        assert not error.isnan().any()
        assert error.numel() == 0 or float(error.max()) <= TOLERANCE[score_dtype] * size
    error = (out.double() - want_out).abs()
    assert not error.isnan().any()
    # A weight is off by the error of its score.
    assert float(error.max()) <= TOLERANCE[dtype] * size * max(float(want_out.abs().max()), abs(kv_scale))


def bits(tensor):
    return tensor.contiguous().view(torch.uint8)


def same_bits(one, other):
    return all(torch.equal(bits(a), bits(b)) for a, b in zip(one, other, strict=True))


@pytest.mark.parametrize("d_qk", [512, 576])
@pytest.mark.parametrize("h_q", [1, 3, 16])
@pytest.mark.parametrize("topk", [1, 2, 33, 64])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_against_float64_loops(d_qk, h_q, topk, dtype):
    q, kv, indices = make(6, h_q, topk, 50, d_qk, seed=h_q * topk)
    scales = (0.0625, 0.75, 1.5)
    sink = torch.linspace(-3, 5, h_q)
    lengths = torch.tensor([0, 1, topk, topk // 2, -4, topk + 9], dtype=torch.int32)
    for more in ((), (sink,), (None, lengths), (sink, lengths)):
        got = reference(q, kv, indices, *scales, *more, dtype=dtype)
        close(got, loops(q, kv, indices, *scales, *more), dtype, kv_scale=1.5)


def test_bfloat16_is_the_rounded_result():
    arguments = (*make(9, 4, 40, 100), 0.0625, 1.0, 1.0)
    exact = reference(*arguments)
    rounded = reference(*arguments, out_dtype=torch.bfloat16)
    assert torch.equal(rounded[0], exact[0].to(torch.bfloat16))
    close(rounded, loops(*arguments), torch.bfloat16)


def test_every_e4m3_value_is_widened_exactly():
    values = torch.arange(256, dtype=torch.uint8).view(E4M3)
    values = values[~values.float().isnan()]
    assert len(values) == 254
    kv = torch.zeros(254, 512, dtype=torch.float32)
    kv[:, 3] = values.float()
    q = torch.zeros(1, 1, 512, dtype=torch.float32)
    q[..., 3] = 1
    indices = torch.arange(254, dtype=torch.int32)[:, None]
    out, max_logits, _ = reference(q.to(E4M3).expand(254, 1, 512), kv.to(E4M3), indices, 1.0, 1.0, 1.0)
    assert torch.equal(max_logits[:, 0], values.float())
    assert torch.equal(out[:, 0, 3], values.float())


# --- Places ---


def test_empty_places_anywhere_equal_the_row_without_them():
    q, kv, _ = make(1, 2, 1, 20)
    few = torch.tensor([[3, 7, 11]], dtype=torch.int32)
    want = loops(q, kv, few, 0.05, 1, 1)
    for row in (
        [-1, 3, -1, 7, 11, -1],
        [3, 7, 11, 20, 21, 2**31 - 1],
        [-(2**31), 3, 20, 7, -7, 11],
    ):
        close(reference(q, kv, torch.tensor([row], dtype=torch.int32), 0.05, 1, 1), want)


def test_places_listed_twice_count_twice():
    q, kv, _ = make(1, 1, 1, 20)
    once = reference(q, kv, torch.tensor([[5, 9]], dtype=torch.int32), 0.05, 1, 1)
    twice = reference(q, kv, torch.tensor([[5, 5, 9]], dtype=torch.int32), 0.05, 1, 1)
    close(twice, loops(q, kv, torch.tensor([[5, 5, 9]]), 0.05, 1, 1))
    assert not torch.equal(once[2], twice[2])
    doubled = reference(q, kv, torch.tensor([[5, 9, 5, 9]], dtype=torch.int32), 0.05, 1, 1)
    torch.testing.assert_close(doubled[2], once[2] + np.log(2), rtol=0, atol=1e-6)


@pytest.mark.parametrize("max_bytes", [2**28, 1])
def test_rows_that_no_place_names_never_reach_a_result(max_bytes):
    q, kv, indices = make(8, 2, 10, 40)
    clean = reference(q, kv, indices, 0.05, 1, 1, max_bytes=max_bytes)
    used = torch.unique(indices[indices >= 0]).long()
    dirty = torch.full((40, 576), NAN_BYTE, dtype=torch.uint8)
    dirty[used] = kv.view(torch.uint8)[used]
    assert len(used) < 40
    assert same_bits(reference(q, dirty.view(E4M3), indices, 0.05, 1, 1, max_bytes=max_bytes), clean)


@pytest.mark.parametrize("max_bytes", [2**28, 1])
def test_nan_behind_empty_places_and_lengths(max_bytes):
    q, kv, _ = make(3, 2, 4, 8)
    kv.view(torch.uint8)[0] = NAN_BYTE  # Where a careless clamp of -1 would point.
    kv.view(torch.uint8)[7] = NAN_BYTE  # And where one of s_kv would.
    indices = torch.tensor([[-1, 2, 8, 3], [2, 3, 0, 7], [-1, -1, 9, 8]], dtype=torch.int32)
    lengths = torch.tensor([4, 2, 4], dtype=torch.int32)
    got = reference(q, kv, indices, 0.05, 1, 1, None, lengths, max_bytes=max_bytes)
    want = loops(q, kv, torch.tensor([[2, 3], [2, 3], [-1, -1]]), 0.05, 1, 1)
    close(got, want)


def test_a_selected_nan_shows_in_its_row_only():
    q, kv, indices = make(3, 1, 4, 20, empty=0)
    indices[:] = torch.tensor([[1, 2, 3, 4], [5, 6, 7, 8], [9, 10, 11, 12]])
    kv.view(torch.uint8)[6] = NAN_BYTE
    out, max_logits, lse = reference(q, kv, indices, 0.05, 1, 1)
    for t in (out, max_logits, lse):
        assert t[1].isnan().all()
        assert not t[[0, 2]].isnan().any()


def test_rows_without_valid_places():
    q, kv, _ = make(4, 3, 2, 10)
    indices = torch.tensor([[-1, -1], [10, 11], [4, 5], [0, 1]], dtype=torch.int32)
    lengths = torch.tensor([2, 2, 0, -3], dtype=torch.int32)
    for sink in (None, torch.tensor([0.0, float("inf"), -float("inf")])):
        out, max_logits, lse = reference(q, kv, indices, 0.05, 1, 1, sink, lengths)
        assert torch.equal(out, torch.zeros(4, 3, 512))
        assert torch.equal(max_logits, torch.full((4, 3), -float("inf")))
        assert torch.equal(lse, torch.full((4, 3), float("inf")))


def test_no_kv_rows():
    q, kv, indices = make(3, 2, 5, 0)
    for shape in ((0, 576), (0, 1, 576)):
        out, max_logits, lse = reference(q, kv.view(shape), indices, 0.05, 1, 1, max_bytes=1)
        assert not out.any()
        assert bool((max_logits == -float("inf")).all())
        assert bool((lse == float("inf")).all())


def test_no_rows():
    q, kv, indices = make(0, 2, 5, 10)
    out, max_logits, lse = reference(q, kv, indices, 0.05, 1, 1)
    assert out.shape == (0, 2, 512)
    assert max_logits.shape == lse.shape == (0, 2)


@pytest.mark.parametrize("extreme", [-(2**31), -1, 0, 1, 5, 6, 7, 2**31 - 1])
def test_lengths_are_clamped(extreme):
    q, kv, indices = make(2, 2, 6, 20, empty=0)
    got = reference(q, kv, indices, 0.05, 1, 1, None, torch.tensor([extreme, 3], dtype=torch.int32))
    cut = indices.clone()
    cut[0, max(0, extreme) :] = -1
    cut[1, 3:] = -1
    close(got, loops(q, kv, cut, 0.05, 1, 1))


# --- Sinks and scales ---


@pytest.mark.parametrize("with_lengths", [False, True])
def test_sinks(with_lengths):
    inf = float("inf")
    sink = torch.tensor([-inf, inf, 0.0, 200.0, -200.0, 3.5])
    q, kv, indices = make(4, 6, 8, 20)
    lengths = torch.tensor([8, 3, 0, 5], dtype=torch.int32) if with_lengths else None
    got = reference(q, kv, indices, 0.05, 1, 1, sink, lengths)
    close(got, loops(q, kv, indices, 0.05, 1, 1, sink, lengths))
    plain = reference(q, kv, indices, 0.05, 1, 1, None, lengths)
    assert torch.equal(got[0][:, 0], plain[0][:, 0])  # exp(-inf) adds nothing,
    assert not got[0][:, 1].any()  # exp(inf) takes everything,
    assert same_bits(got[1:], plain[1:])  # and neither max_logits nor lse knows of sinks.


@pytest.mark.parametrize("q_scale", [0.0, -0.75, 1.0, 2.0**-20, 1000.0])
@pytest.mark.parametrize("kv_scale", [0.0, -1.25, 2.0])
@pytest.mark.parametrize("sm_scale", [0.0, -0.05, 0.05])
def test_scales(q_scale, kv_scale, sm_scale):
    q, kv, indices = make()
    got = reference(q, kv, indices, sm_scale, q_scale, kv_scale, dtype=torch.float64)
    close(got, loops(q, kv, indices, sm_scale, q_scale, kv_scale), torch.float64, kv_scale)


def test_scales_as_tensors_or_numbers_give_the_same_bits():
    q, kv, indices = make()
    want = reference(q, kv, indices, 0.07, 0.3, 1.7)
    for shape in ((), (1,), (1, 1)):
        tensors = [torch.full(shape, scale) for scale in (0.3, 1.7)]
        assert same_bits(reference(q, kv, indices, 0.07, *tensors), want)
    assert same_bits(reference(q, kv, indices, 0.07, 0.3, torch.tensor(1.7)), want)


def test_large_scores_do_not_overflow():
    q = torch.full((1, 1, 576), 448.0).to(E4M3)
    kv = torch.full((3, 576), 448.0).to(E4M3)
    kv[1] = -448.0
    arguments = (q, kv, torch.tensor([[0, 1, 2]], dtype=torch.int32), 1.0, 1.0, 1.0)
    got = reference(*arguments)
    close(got, loops(*arguments))
    assert float(got[1]) == 576 * 448**2


# --- Layouts ---


def test_layouts_do_not_show_in_the_result():
    q, kv, indices = make(6, 3, 7, 30)
    lengths = torch.tensor([0, 3, 7, 5, 1, 2], dtype=torch.int32)
    sink = torch.tensor([0.5, -1.0, 2.0])
    want = reference(q, kv, indices, 0.05, 1, 1, sink, lengths)
    wide_q = torch.zeros(6, 5, 640, dtype=torch.uint8).view(E4M3)
    wide_q[:, 1:4, 32:608] = q
    wide_kv = torch.full((60, 640), NAN_BYTE, dtype=torch.uint8).view(E4M3)
    wide_kv[::2, 64:] = kv
    wide_indices = torch.zeros(6, 20, dtype=torch.int32)
    wide_indices[:, 2:16:2] = indices
    got = reference(
        wide_q[:, 1:4, 32:608],
        wide_kv[::2, None, 64:],
        wide_indices[:, None, 2:16:2],
        0.05,
        1,
        1,
        sink.repeat_interleave(2)[::2],
        lengths.repeat_interleave(3)[::3],
    )
    assert same_bits(got, want)


def test_offsets_past_two_to_the_31_elements_and_32_bytes():
    """Memory that is only ever touched at its far end, so that gigabytes cost nothing."""
    q, kv, indices = make(2, 2, 3, 4, d_qk=512, empty=0)
    want = reference(q, kv, indices, 0.05, 1, 1)
    stride = 2**32 + 1024
    far_q = torch.empty(stride + 1024, dtype=torch.uint8).view(E4M3).as_strided((2, 2, 512), (stride, 512, 1))
    far_q.copy_(q)
    s_kv = 2**32 // 512 + 4
    far_kv = torch.empty((s_kv, 512), dtype=torch.uint8).view(E4M3)
    far_kv[-4:] = kv
    stride = 2**31 + 16
    far_indices = torch.empty(stride + 3, dtype=torch.int32).as_strided((2, 3), (stride, 1))
    far_indices.copy_(indices + (s_kv - 4))
    stride = 2**31 + 1024
    out = torch.empty(stride + 1024, dtype=torch.bfloat16).as_strided((2, 2, 512), (stride, 512, 1))
    max_logits, lse = torch.empty(2, 2), torch.empty(2, 2)
    sparse_mla_prefill_reference(far_q, far_kv, far_indices, 0.05, 1, 1, None, None, out, max_logits, lse)
    assert same_bits((out, max_logits, lse), (want[0].to(torch.bfloat16), *want[1:]))


# --- A row's result is its own ---


@pytest.mark.parametrize(("h_q", "topk", "d_qk"), [(1, 1, 512), (4, 32, 576), (3, 33, 576), (5, 7, 512), (16, 100, 576)])
def test_a_row_alone_has_the_bits_it_has_in_a_batch(h_q, topk, d_qk):
    s_q = 131
    q, kv, indices = make(s_q, h_q, topk, 300, d_qk)
    sink = torch.linspace(-1, 1, h_q)
    lengths = torch.arange(s_q, dtype=torch.int32) % (topk + 2)
    batch = reference(q, kv, indices, 0.05, 0.9, 1.1, sink, lengths)
    for row in range(s_q):
        alone = reference(q[row : row + 1], kv, indices[row : row + 1], 0.05, 0.9, 1.1, sink, lengths[row : row + 1])
        assert same_bits(alone, [t[row : row + 1] for t in batch]), f"row {row}"


@settings(max_examples=25, deadline=None)
@given(data=st.data())
def test_order_batch_and_chunking_do_not_show(data):
    s_q = data.draw(st.integers(1, 90), "s_q")
    h_q, topk = data.draw(st.integers(1, 9), "h_q"), data.draw(st.integers(1, 40), "topk")
    s_kv = data.draw(st.integers(1, 200), "s_kv")
    q, kv, indices = make(s_q, h_q, topk, s_kv, seed=data.draw(st.integers(0, 99), "seed"))
    want = reference(q, kv, indices, 0.05, 1, 1)
    max_bytes = data.draw(st.sampled_from([1, 10**5, 10**6, 10**7]), "max_bytes")
    order = torch.tensor(data.draw(st.lists(st.integers(0, s_q - 1), min_size=1, max_size=70), "order"))
    got = reference(q.view(torch.uint8)[order].view(E4M3), kv, indices[order], 0.05, 1, 1, max_bytes=max_bytes)
    assert same_bits(got, [t[order] for t in want])


def test_the_same_call_gives_the_same_bits_on_dirty_memory():
    q, kv, indices = make(70, 4, 20, 100)
    want = reference(q, kv, indices, 0.05, 1, 1)
    for dirt in (0.0, float("nan"), 1e30):
        out, max_logits, lse = (torch.full_like(t, dirt) for t in want)
        sparse_mla_prefill_reference(q, kv, indices, 0.05, 1, 1, None, None, out, max_logits, lse)
        assert same_bits((out, max_logits, lse), want)


MEMORY_PROBE = """
import torch
from bufpool.ops.reference import sparse_mla_prefill_reference
torch.set_num_threads(1)

def peak():
    return 1024 * int(next(line for line in open("/proc/self/status") if line.startswith("VmHWM")).split()[1])

def call(s_q, topk, s_kv, max_bytes):
    q = torch.ones(1, 16, 576).to(torch.float8_e4m3fn).expand(s_q, 16, 576)
    kv = torch.full((s_kv, 576), 0x38, dtype=torch.uint8).view(torch.float8_e4m3fn)
    indices = torch.randint(0, s_kv, (s_q, topk), dtype=torch.int32)
    out = torch.zeros(s_q, 16, 512, dtype=torch.bfloat16)
    max_logits, lse = torch.zeros(s_q, 16), torch.zeros(s_q, 16)
    before = peak()
    sparse_mla_prefill_reference(
        q, kv, indices, 0.05, 1, 1, None, None, out, max_logits, lse, max_bytes=max_bytes
    )
    return peak() - before

call(3, 16, 10, 2**20)
print(call(200, 1024, {s_kv}, 2**25))
"""


@pytest.mark.parametrize("s_kv", [7000, 40000])
def test_temporary_memory_stays_under_the_bound(s_kv):
    """32 MiB: kv widened whole at 7000 rows, place by place at 40000. 64 rows at once would take 240 MiB."""
    if not sys.platform.startswith("linux"):
        pytest.skip("needs /proc/self/status")
    run = subprocess.run(
        [sys.executable, "-c", MEMORY_PROBE.replace("{s_kv}", str(s_kv))], capture_output=True, text=True, check=True
    )
    grown = int(run.stdout)
    slack = 8 * 2**20  # Of the matrix product and the allocator.
    assert 2**23 < grown < 2**25 + slack


def test_the_grad_mode_of_the_caller_does_not_matter():
    q, kv, indices = make()
    want = reference(q, kv, indices, 0.05, 1, 1)
    with torch.inference_mode():
        inside = reference(q, kv, indices, 0.05, 1, 1)
        out, max_logits, lse = (torch.empty_like(t) for t in want)
    assert same_bits(inside, want)
    scale = torch.tensor(1.0, requires_grad=True)
    sparse_mla_prefill_reference(q, kv, indices, 0.05, scale, scale, None, None, out, max_logits, lse)
    assert same_bits((out, max_logits, lse), want)
    assert not out.requires_grad


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize(("h_q", "topk", "d_qk"), [(1, 1, 512), (4, 32, 576), (3, 33, 576), (16, 100, 576)])
def test_on_a_gpu(h_q, topk, d_qk):
    s_q = 70
    q, kv, indices = make(s_q, h_q, topk, 300, d_qk)
    sink = torch.linspace(-1, 1, h_q)
    lengths = torch.arange(s_q, dtype=torch.int32) % (topk + 2)
    want = loops(q, kv, indices, 0.05, 0.9, 1.1, sink, lengths)
    q, kv, indices, sink, lengths = (t.cuda() for t in (q, kv, indices, sink, lengths))
    scales = (torch.tensor(0.9, device="cuda"), torch.tensor([1.1], device="cuda"))
    batch = reference(q, kv, indices, 0.05, *scales, sink, lengths)
    close([t.cpu() for t in batch], want, kv_scale=1.1)
    small = reference(q, kv, indices, 0.05, *scales, sink, lengths, max_bytes=1)
    assert same_bits(small, batch)
    for row in range(0, s_q, 7):
        one = slice(row, row + 1)
        alone = reference(q[one], kv, indices[one], 0.05, *scales, sink, lengths[one])
        assert same_bits(alone, [t[one] for t in batch]), f"row {row}"

"""check_output and check_distinct: what a caller brings is exactly what the kernel writes, on memory of its own."""

from __future__ import annotations

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from bufpool.errors import BufpoolError, DeviceMismatchError, OutputMismatchError
from bufpool.outputs import check_distinct, check_output
from bufpool.torch_state import has_no_memory

CPU = torch.device("cpu")


def check(t, *, shape=(3, 4), dtype=torch.float32, device=CPU):
    return check_output(t, "out", shape=shape, dtype=dtype, device=device)


def test_the_right_tensor_comes_back():
    t = torch.empty(3, 4)
    assert check(t) is t
    assert check(t, shape=[3, 4]) is t
    assert check(t, shape=torch.Size((3, 4)), device="cpu") is t
    assert check(t, device="cpu:0") is t


@pytest.mark.parametrize("shape", [(0,), (0, 4), (0, 4, 512)])
def test_no_rows(shape):
    t = torch.empty(shape)
    assert check(t, shape=shape) is t
    with pytest.raises(OutputMismatchError, match="expected shape"):
        check(t, shape=(1, *shape[1:]))


@pytest.mark.parametrize("value", [None, 3, [[1.0]], memoryview(b"abc")])
def test_not_a_tensor(value):
    with pytest.raises(TypeError, match=f"^out: expected a tensor, got {type(value).__name__}$"):
        check(value)


def test_another_device():
    with pytest.raises(DeviceMismatchError, match=r"^out must be on device cpu, got meta$"):
        check(torch.empty(3, 4, device="meta"))
    with pytest.raises(DeviceMismatchError, match=r"^out must be on device meta, got cpu$"):
        check(torch.empty(3, 4), device=torch.device("meta"))


@pytest.mark.parametrize(
    ("t", "text"),
    [
        (torch.empty(3, 4, dtype=torch.bfloat16), "out: expected dtype torch.float32, got torch.bfloat16"),
        (torch.empty(3, 4, dtype=torch.int32), "out: expected dtype torch.float32, got torch.int32"),
        (torch.empty(4, 3), "out: expected shape [3, 4], got [4, 3]"),  # The same number of elements.
        (torch.empty(12), "out: expected shape [3, 4], got [12]"),
        (torch.empty(3, 4, 1), "out: expected shape [3, 4], got [3, 4, 1]"),
        (torch.empty(5, 4), "out: expected shape [3, 4], got [5, 4]"),
        (torch.empty(4, 3).t(), "out: expected a contiguous tensor of shape [3, 4], got strides [1, 3]"),
        (torch.empty(3, 8)[:, :4], "out: expected a contiguous tensor of shape [3, 4], got strides [8, 1]"),
        (torch.empty(6, 4)[::2], "out: expected a contiguous tensor of shape [3, 4], got strides [8, 1]"),
        (torch.empty(1, 4).expand(3, 4), "out: expected a contiguous tensor of shape [3, 4], got strides [0, 1]"),
        (torch.empty(3, 4).to_sparse(), "out: expected a dense tensor, got layout torch.sparse_coo"),
        (
            torch.empty(3, 4, requires_grad=True),
            "out: expected a tensor without grad, since a kernel overwrites it in place, got a leaf that requires "
            "grad; pass out.detach()",
        ),
    ],
)
def test_mismatch_names_want_and_got(t, text):
    with pytest.raises(OutputMismatchError) as caught:
        check(t)
    assert str(caught.value) == text
    assert isinstance(caught.value, ValueError)
    assert isinstance(caught.value, BufpoolError)


def test_results_that_require_grad_are_refused():
    t = torch.ones(3, 4, requires_grad=True) * 2
    with pytest.raises(OutputMismatchError, match=r"got the result of MulBackward0 that requires grad"):
        check(t)
    assert check(t.detach()) is not None


def test_a_contiguous_view_is_fine():
    base = torch.empty(10, 4)
    assert check(base[2:5]).data_ptr() == base[2].data_ptr()


def overlap(**tensors):
    check_distinct(tensors)


def test_apart():
    base = torch.zeros(10)
    overlap(a=base[:4], b=base[4:8], c=base[8:])
    check_distinct({"a": base[:4]}, {"b": base[4:], "c": base[4:]})  # Inputs may share.
    check_distinct({}, {"b": base})
    check_distinct({"a": base})


@pytest.mark.parametrize(
    ("a", "b", "shared_bytes"),
    [
        ((0, 4), (0, 4), 16),
        ((0, 4), (3, 7), 4),
        ((3, 7), (0, 4), 4),
        ((0, 10), (4, 5), 4),
        ((4, 5), (0, 10), 4),
    ],
)
def test_overlap_by_byte_range(a, b, shared_bytes):
    base = torch.zeros(10)
    one, other = base[slice(*a)], base[slice(*b)]
    with pytest.raises(OutputMismatchError, match=rf"^b: expected .*got {shared_bytes} bytes shared with a \("):
        check_distinct({"a": one, "b": other})
    with pytest.raises(OutputMismatchError, match=rf"^a: expected .*got {shared_bytes} bytes shared with b \("):
        check_distinct({"a": one}, {"b": other})


def test_overlap_among_many_names_the_two():
    base = torch.zeros(100)
    with pytest.raises(OutputMismatchError, match=r"^o2: .* shared with i3 "):
        check_distinct(
            {"o1": base[:10], "o2": base[20:30]},
            {"i1": base[10:20], "i2": base[40:], "i3": base[29:40]},
        )


def test_overlap_across_dtypes():
    base = torch.zeros(64, dtype=torch.uint8)
    with pytest.raises(OutputMismatchError, match="got 1 bytes shared"):
        overlap(a=base[:17], b=base[16:32].view(torch.float32))
    overlap(a=base[:16], b=base[16:32].view(torch.bfloat16))


def test_strided_inputs_count_to_their_last_byte():
    base = torch.zeros(100)
    rows = base.as_strided((3, 4), (20, 1), 10)  # Elements 10 to 53.
    check_distinct({"out": base[54:60]}, {"q": rows})
    check_distinct({"out": base[:10]}, {"q": rows})
    with pytest.raises(OutputMismatchError, match=r"got 4 bytes shared with q"):
        check_distinct({"out": base[53:60]}, {"q": rows})
    expanded = base[5:6].expand(1000)  # One element, whatever its shape says.
    check_distinct({"out": base[6:]}, {"scale": expanded})
    with pytest.raises(OutputMismatchError, match=r"got 4 bytes shared with scale"):
        check_distinct({"out": base[:6]}, {"scale": expanded})


def test_empty_tensors_share_nothing():
    base = torch.zeros(10)
    overlap(a=torch.empty(0, 4), b=torch.empty(0), c=torch.empty(0, 4))
    overlap(a=base, b=base[:0], c=base[3:3])
    check_distinct({"a": base}, {"b": base[5:5], "c": base[::2][:0], "d": base.as_strided((0, 3), (7, 2))})


def test_fake_and_meta_tensors_have_no_memory():
    overlap(a=torch.empty(3, device="meta"), b=torch.empty(3, device="meta"))
    with FakeTensorMode() as mode:
        fake = torch.empty(3, 4)
        assert check(fake) is fake
        overlap(a=fake, b=fake[1:])
        assert has_no_memory(fake)
    assert has_no_memory(mode.from_tensor(torch.empty(3)))
    assert has_no_memory(torch.empty(3, device="meta"))
    assert not has_no_memory(torch.empty(3))
    assert not has_no_memory(torch.nn.Parameter(torch.empty(3)))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_cuda_without_an_index_is_the_current_device():
    t = torch.empty(3, 4, device="cuda")
    assert check(t, device=torch.device("cuda")) is t
    assert check(t, device=f"cuda:{torch.cuda.current_device()}") is t
    with pytest.raises(DeviceMismatchError, match=rf"^out must be on device cpu, got {t.device}$"):
        check(t)
    with pytest.raises(DeviceMismatchError, match=rf"^out must be on device {t.device}, got cpu$"):
        check(torch.empty(3, 4), device="cuda")
    with pytest.raises(OutputMismatchError, match="got 4 bytes shared"):
        overlap(a=t.view(-1)[:4], b=t.view(-1)[3:])


@pytest.mark.parametrize(
    ("wrong", "error", "text"),
    [
        ({"device": "nonsense"}, ValueError, "device: expected a device, got 'nonsense'"),
        ({"device": 1.5}, TypeError, "device: expected a device, got 1.5"),
        ({"shape": 1}, TypeError, "shape: expected integers, got 1"),
    ],
)
def test_a_wrong_question_says_what_was_wanted(wrong, error, text):
    with pytest.raises(error, match=text):
        check_output(torch.empty(2, 3), "out", **{"shape": (2, 3), "dtype": torch.float32, "device": "cpu", **wrong})


@pytest.mark.skipif(torch.cuda.is_available(), reason="for a machine without CUDA")
def test_cuda_that_is_not_here_is_a_value_error():
    with pytest.raises(ValueError, match="device: expected a device that is here, got cuda"):
        check_output(torch.empty(2), "out", shape=(2,), dtype=torch.float32, device="cuda")

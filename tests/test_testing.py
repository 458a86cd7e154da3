"""assert_write_only finds each kind of fault, and names its first place."""

from __future__ import annotations

import ctypes

import pytest
import torch

from bufpool.errors import BufpoolError, DeviceMismatchError, WriteContractError
from bufpool.spec import OutputSpec
from bufpool.testing import GUARD_ROWS, assert_write_only, write_contract

SPEC = OutputSpec(out=((3, 5), torch.bfloat16), lse=((3,), torch.float32), places=((), torch.int32))
DEVICES = [
    "cpu",
    pytest.param(
        "cuda",
        marks=[
            pytest.mark.gpu,
            pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
        ],
    ),
]

ROWS = 7


@pytest.fixture(params=DEVICES)
def like(request):
    return torch.empty(1, device=request.param)


def write(outputs):
    outputs.out.copy_(torch.arange(outputs.out.numel(), device=outputs.out.device).view_as(outputs.out))
    outputs.lse.fill_(float("nan"))
    outputs.places.fill_(-1)


def raw(t, rows_before, rows_behind):
    """``t`` with rows around it, as a kernel with a wrong bound sees it."""
    storage_rows = t.shape[0] + rows_before + rows_behind
    row_bytes = t.nbytes // t.shape[0]
    if t.device.type == "cpu":
        memory = (ctypes.c_uint8 * (storage_rows * row_bytes)).from_address(t.data_ptr() - rows_before * row_bytes)
        flat = torch.frombuffer(memory, dtype=torch.uint8)
    else:
        holder = type("Holder", (), {})()
        holder.__cuda_array_interface__ = {
            "shape": (storage_rows * row_bytes,),
            "typestr": "|u1",
            "data": (t.data_ptr() - rows_before * row_bytes, False),
            "version": 2,
        }
        flat = torch.as_tensor(holder, device=t.device)
    return flat.view(t.dtype).view(storage_rows, *t.shape[1:])


@pytest.mark.parametrize("rows", [1, 2, 7, 300])
def test_a_correct_function_passes_and_runs_twice(like, rows):
    calls = []
    assert assert_write_only(lambda outputs: (calls.append(1), write(outputs)), SPEC, rows, like) is None
    assert len(calls) == 2


def test_what_the_function_gets_looks_like_a_pool_result(like):
    def look(outputs):
        assert type(outputs) is SPEC.outputs_type
        for t, shape, dtype in zip(outputs, SPEC.shapes(ROWS), SPEC.dtypes, strict=True):
            assert t.shape == shape
            assert t.dtype is dtype
            assert t.device == like.device
            assert t.is_contiguous()
            assert t.is_leaf
            assert t._base is None
            assert not t.requires_grad
            assert not t.is_inference()
            assert t.storage_offset() == 0
            assert t.untyped_storage().nbytes() == t.nbytes
            assert t.data_ptr() % 256 == 0
        write(outputs)

    assert_write_only(look, SPEC, ROWS, like)
    with torch.inference_mode():
        assert_write_only(look, SPEC, ROWS, like)


def test_no_rows(like):
    seen = []
    assert_write_only(lambda outputs: seen.append([tuple(t.shape) for t in outputs]), SPEC, 0, like)
    assert seen == [[(0, 3, 5), (0, 3), (0,)]] * 2


def fails(fn, like, *, spec=SPEC, rows=ROWS):
    with pytest.raises(WriteContractError) as caught:
        assert_write_only(fn, spec, rows, like)
    assert isinstance(caught.value, BufpoolError)
    assert isinstance(caught.value, AssertionError)
    return str(caught.value)


def test_nothing_written(like):
    text = fails(lambda outputs: None, like)
    assert text.startswith("out: expected every element to be written, got row 0, column (0, 0) as it was (not written, or")


@pytest.mark.parametrize(
    ("name", "place", "named"),
    [
        ("out", (0, 0, 0), "row 0, column (0, 0)"),
        ("out", (4, 2, 3), "row 4, column (2, 3)"),
        ("out", (ROWS - 1, 2, 4), "row 6, column (2, 4)"),
        ("lse", (5, 1), "row 5, column 1"),
        ("places", (6,), "row 6, column 0"),
    ],
)
def test_one_element_unwritten(like, name, place, named):
    def leaves_one_out(outputs):
        old = getattr(outputs, name)[place].clone()
        write(outputs)
        getattr(outputs, name)[place] = old

    text = fails(leaves_one_out, like)
    assert text.startswith(f"{name}: expected every element to be written, got {named} as it was (not written, or")


def test_the_bits_are_those_before_and_after(like):
    runs = []

    def depends(outputs):
        runs.append(1)
        write(outputs)
        outputs.lse[2, 0] = float(len(runs))

    text = fails(depends, like)
    # Row 2 of 128 + 2 rows, column 0: the third poison, then the fourth. 1.0 and 2.0 as float32.
    assert text == (
        "lse: expected a result that does not depend on former content, got two results at row 2, column 0: "
        "old bits 0xfafafafa, new bits 0x3f800000; in the second run old bits 0x00000000, new bits 0x40000000"
    )


@pytest.mark.parametrize(
    "read",
    [
        lambda old, new: old + new,
        lambda old, new: old * 0 + new,  # NaN stays NaN.
        lambda old, new: torch.fmax(old, new),  # Ignores NaN.
        lambda old, new: torch.fmin(old, new),
        lambda old, new: torch.where(old == 0, new, new + 1),
        lambda old, new: torch.where(old.isnan(), new + 1, new),
        lambda old, new: torch.copysign(new, old),
    ],
)
def test_former_content_read(like, read):
    def depends(outputs):
        old = outputs.out.clone()
        write(outputs)
        outputs.out[3:5] = read(old, outputs.out)[3:5]

    text = fails(depends, like)
    assert text.startswith("out: expected a result that does not depend on former content, got two results at row 3,")


@pytest.mark.parametrize("name", SPEC.names)
@pytest.mark.parametrize("offset", [-GUARD_ROWS, -1, 0, GUARD_ROWS - 1])
def test_a_write_outside_the_active_rows(like, name, offset):
    def oversteps(outputs):
        write(outputs)
        wide = raw(getattr(outputs, name), GUARD_ROWS, GUARD_ROWS)
        wide[GUARD_ROWS + offset if offset < 0 else GUARD_ROWS + ROWS + offset] = 0

    row = offset if offset < 0 else ROWS + offset
    text = fails(oversteps, like)
    # Zero is the poison of some elements in one run: there the other run shows the write.
    column = {"out": "(0, 0)", "lse": "0", "places": "0"}[name]
    assert text.startswith(f"{name}: expected no write outside rows 0 to 7, got one at row {row}, column {column}: ")


def test_behind_memory_of_a_cuda_arena_nothing_is_mapped(fake_cuda, make_pool):
    pool, device = make_pool(), fake_cuda.drivers[0]
    for name, nbytes in {"out": 100_000, "lse": 10}.items():
        memory = write_contract._memory(name, nbytes, fake_cuda.like(), pool)
        assert memory.numel() == -(-nbytes // device.granule) * device.granule
        assert device.is_usable(memory.data_ptr(), memory.numel())
        assert not device.is_usable(memory.data_ptr() + memory.numel(), 1)
    assert pool.stats().slots == 2


@pytest.mark.parametrize("row_shape", [(3, 5), (), (1000,)])
def test_the_guard_rows_end_where_the_memory_ends(row_shape):
    field = write_contract._Field("out", row_shape, torch.bfloat16, ROWS, torch.device("cpu"), None)
    end = field.bits.data_ptr() + field.bits.numel()
    behind = field.bits.untyped_storage().data_ptr() + field.bits.untyped_storage().nbytes() - end
    assert 0 <= behind < 256
    assert field.active.data_ptr() % 256 == 0
    assert field.active.data_ptr() - field.bits.data_ptr() == GUARD_ROWS * field.columns * 2


@pytest.mark.gpu
def test_a_write_behind_the_guard_rows_is_refused_by_cuda(run_script):
    """In a process of its own, which loses its context."""
    script = """
        import os, torch, bufpool
        from bufpool.testing import GUARD_ROWS, assert_write_only

        class Bytes:
            def __init__(self, address, nbytes):
                self.__cuda_array_interface__ = {
                    "shape": (nbytes,), "typestr": "|u1", "data": (address, False), "version": 2
                }

        def far(outputs):
            for t in outputs:
                t.fill_(1)
            row_bytes, rows = outputs.lse.nbytes // 7, 7 + GUARD_ROWS + 1
            wide = torch.as_tensor(Bytes(outputs.lse.data_ptr(), rows * row_bytes), device="cuda")
            wide[-row_bytes:] = 0  # the row behind the last guard row

        spec = bufpool.OutputSpec(out=((8,), torch.bfloat16), lse=((256,), torch.float32))
        like = torch.empty(1, device="cuda")
        try:
            assert_write_only(far, spec, 7, like)
        except bufpool.WriteContractError as error:
            print(error, flush=True)
        os._exit(0)
    """
    done = run_script(script)
    assert done.stdout.startswith("out, lse: expected no access outside the active rows and 128 guard rows"), done.stderr


def test_an_illegal_access_is_told_from_other_errors(monkeypatch):
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    outputs = SPEC.outputs_type(*map(torch.empty, (1, 1, 1)))

    def raises(text):
        def fn(outputs):
            raise RuntimeError(text)

        return fn

    with pytest.raises(WriteContractError, match=r"^out, lse, places: expected no access outside .* 128 guard rows"):
        write_contract._call(raises("CUDA error: an illegal memory access was encountered"), outputs, torch.device("cuda"))
    with pytest.raises(RuntimeError, match=r"^CUDA error: misaligned address$"):
        write_contract._call(raises("CUDA error: misaligned address"), outputs, torch.device("cuda"))


def test_a_tile_that_rounds_rows_up(like):
    def tiles_of_four(outputs):
        write(outputs)
        wide = raw(outputs.out, 0, 1)
        wide[4:8] = 1

    assert "got one at row 7, column (0, 0): " in fails(tiles_of_four, like)
    assert_write_only(tiles_of_four, SPEC, 8, like)


@pytest.mark.parametrize(
    "dtype",
    [torch.float8_e4m3fn, torch.float8_e5m2, torch.bool, torch.uint8, torch.int64, torch.float16, torch.complex64],
)
def test_every_dtype(like, dtype):
    spec = OutputSpec(a=((4,), dtype), b=((), dtype))

    def fill(outputs, byte=1):
        for t in outputs:
            t.view(-1).view(torch.uint8).fill_(byte)

    assert_write_only(fill, spec, 5, like)
    assert_write_only(lambda outputs: fill(outputs, 0), spec, 5, like)  # Zero is a poison as well.

    def leaves_one_out(outputs):
        old = outputs.a.view(torch.uint8).clone()
        fill(outputs)
        size = dtype.itemsize
        outputs.a.view(torch.uint8)[3, 2 * size : 3 * size] = old[3, 2 * size : 3 * size]

    assert "got row 3, column 2 as it was" in fails(leaves_one_out, like, spec=spec, rows=5)

    def writes_the_low_byte_only(outputs):
        old = outputs.a.view(torch.uint8).clone()
        fill(outputs)
        outputs.a.view(torch.uint8)[4, 1 : dtype.itemsize] = old[4, 1 : dtype.itemsize]

    if dtype.itemsize > 1:
        assert "got two results at row 4, column 0" in fails(writes_the_low_byte_only, like, spec=spec, rows=5)


@pytest.mark.parametrize("byte", [0xFF, 0x7A, 0xFA, 0x00])
def test_a_correct_value_may_equal_a_poison(like, byte):
    def fill(outputs):
        for t in outputs:
            t.view(torch.uint8).fill_(byte)

    assert_write_only(fill, OutputSpec(a=((4,), torch.float32), b=((2, 2), torch.bfloat16)), 9, like)


def test_the_first_tensor_and_row_are_named(like):
    def leaves_two_out(outputs):
        old = outputs.lse[3, 1].clone(), outputs.lse[2, 2].clone(), outputs.places[0].clone()
        write(outputs)
        outputs.lse[3, 1], outputs.lse[2, 2], outputs.places[0] = old

    assert fails(leaves_two_out, like).startswith("lse: expected every element to be written, got row 2, column 2 ")


def test_swapped_memory_counts_as_unwritten(like):
    def elsewhere(outputs):
        write(outputs._replace(lse=torch.empty_like(outputs.lse)))

    assert fails(elsewhere, like).startswith("lse: expected every element to be written, got row 0, column 0 ")


def test_errors_of_the_function_pass_through(like):
    with pytest.raises(ZeroDivisionError):
        assert_write_only(lambda outputs: 1 // 0, SPEC, ROWS, like)


def test_wrong_arguments(like):
    with pytest.raises(TypeError, match=r"^fn: expected a function"):
        assert_write_only(None, SPEC, ROWS, like)
    with pytest.raises(TypeError, match=r"^spec: expected an OutputSpec"):
        assert_write_only(write, {"out": 1}, ROWS, like)
    for rows in (True, 1.5, "3"):
        with pytest.raises(TypeError, match=r"^rows: expected an integer >= 0"):
            assert_write_only(write, SPEC, rows, like)
    with pytest.raises(ValueError, match=r"^rows: expected an integer >= 0, got -1$"):
        assert_write_only(write, SPEC, -1, like)
    with pytest.raises(DeviceMismatchError):
        assert_write_only(write, SPEC, ROWS, [like, torch.empty(1, device="meta")])

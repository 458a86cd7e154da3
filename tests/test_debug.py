"""BUFPOOL_DEBUG: what is poisoned, what is guarded, and that an unset variable costs nothing."""

from __future__ import annotations

import ctypes
import itertools
import math
import re

import pytest
import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from bufpool import OutputSpec, PoolLimitError, WriteContractError, handout
from bufpool.poison import GUARD_ROWS, POISON_BYTES, poison_bytes

DTYPES = (
    torch.bfloat16,
    torch.float32,
    torch.float64,
    torch.float8_e4m3fn,
    torch.int64,
    torch.uint8,
    torch.bool,
    torch.complex64,
    torch.complex128,
)


@pytest.fixture
def debug_pool(make_pool, monkeypatch):
    """Makes a pool under a value of BUFPOOL_DEBUG."""

    def make(mode, **options):
        monkeypatch.setenv("BUFPOOL_DEBUG", mode)
        return make_pool(**options)

    return make


def beyond(tensor, rows):
    """``rows`` rows behind the last one of a contiguous result, where a kernel that runs too far writes."""
    elements = tensor.numel()
    address = tensor.data_ptr() + tensor.nbytes
    size = rows * (elements // tensor.shape[0]) * tensor.dtype.itemsize
    memory = torch.frombuffer((ctypes.c_uint8 * size).from_address(address), dtype=torch.uint8)
    return memory.view(tensor.dtype).view(rows, *tensor.shape[1:])


def element_bytes(tensor):
    return tensor.contiguous().view(-1).view(torch.uint8).view(-1, tensor.dtype.itemsize)


# --- the variable ---


@pytest.mark.parametrize("value", [None, ""])
def test_unset_leaves_the_hit_path_alone(make_pool, monkeypatch, spec, q, value):
    if value is None:
        monkeypatch.delenv("BUFPOOL_DEBUG", raising=False)
    else:
        monkeypatch.setenv("BUFPOOL_DEBUG", value)
    pool = make_pool()
    pool.acquire(spec, 4, q)
    assert pool._debug is None
    assert pool._quick is pool._lanes
    pool.sleep()
    pool.wake()
    assert pool._quick is pool._lanes


@pytest.mark.parametrize("mode", ["poison", "guard"])
def test_set_keeps_the_hit_path_empty(debug_pool, spec, q, mode):
    pool = debug_pool(mode)
    pool.acquire(spec, 4, q)
    assert not pool._quick
    pool.sleep()
    pool.wake()
    assert not pool._quick


@pytest.mark.parametrize("value", ["1", "Poison", "poison,guard"])
def test_other_values_are_refused(debug_pool, value):
    with pytest.raises(ValueError, match=re.escape(f"BUFPOOL_DEBUG: expected poison or guard, got {value!r}")):
        debug_pool(value)


def test_the_variable_is_read_when_a_pool_is_made(debug_pool, monkeypatch, make_pool, spec, q):
    poisoned = debug_pool("poison")
    monkeypatch.delenv("BUFPOOL_DEBUG")
    plain = make_pool()
    assert poisoned._debug is not None
    assert plain._debug is None


def test_a_whole_program_is_debugged_without_a_change(run_script):
    script = """
        import torch, bufpool
        spec = bufpool.OutputSpec(out=((4,), torch.float32))
        out = bufpool.default_pool().acquire(spec, 3, torch.zeros(1)).out
        print(int(out.isnan().sum()))
    """
    run = run_script(script, BUFPOOL_DEBUG="poison")
    assert (run.returncode, run.stdout.strip()) == (0, "3"), run.stderr


# --- poison ---


@pytest.mark.parametrize("mode", ["poison", "guard"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_element_is_poisoned(debug_pool, q, dtype, mode):
    pool = debug_pool(mode)
    spec = OutputSpec(out=((5,), dtype), scalar=((), dtype))
    values = set(poison_bytes(dtype))
    seen: list[list[int]] = [[] for _ in range(15)]
    for _ in range(4):
        out, scalar = pool.acquire(spec, 3, q)
        for tensor in (out, scalar):
            assert set(element_bytes(tensor).flatten().tolist()) <= values
        elements = element_bytes(out)[:, 0].tolist()
        assert all(one != other for one, other in itertools.pairwise(elements))
        for place, element in enumerate(elements):
            seen[place].append(element)
        out.fill_(1)
        del out, scalar, tensor
    assert all(set(elements) == values for elements in seen), "an element did not meet every byte"


@pytest.mark.parametrize("rows", [1023, 1024, 1025, 70_001])
def test_the_pattern_goes_on_to_the_end(debug_pool, q, rows):
    out = debug_pool("guard").acquire(OutputSpec(out=((), torch.int16)), rows, q).out
    whole = torch.cat([out, beyond(out, GUARD_ROWS)]).view(torch.uint8)[::2].tolist()
    cycle = whole[:4]
    assert sorted(cycle) == sorted(POISON_BYTES)
    assert whole[:rows] == (cycle * rows)[:rows]
    assert sorted(whole[rows : rows + 4]) == sorted(POISON_BYTES)


def test_a_kernel_that_reads_first_computes_nonsense(debug_pool, q):
    pool = debug_pool("poison")
    spec = OutputSpec(out=((8,), torch.float32))
    pool.acquire(spec, 4, q).out.fill_(0)
    out = pool.acquire(spec, 4, q).out
    out += 1  # forgets to write first
    assert not math.isfinite(float(out.sum()))


def test_hits_growths_rotations_and_spills_are_poisoned(debug_pool, spec, q):
    pool = debug_pool("poison", max_slots=2)
    held = []
    for rows in (2, 2, 2, 300):
        result = pool.acquire(spec, rows, q)
        assert set(element_bytes(result.out).flatten().tolist()) == set(POISON_BYTES)
        held.append(result)
    assert pool.stats().spills == 2
    held.clear()
    assert set(element_bytes(pool.acquire(spec, 9000, q).lse).flatten().tolist()) == set(POISON_BYTES)


@pytest.mark.parametrize("mode", ["poison", "guard"])
def test_results_are_as_new(debug_pool, spec, q, mode):
    pool = debug_pool(mode, max_slots=1)
    with torch.inference_mode():
        served = pool.acquire(spec, 7, q)
        spilled = pool.acquire(spec, 7, q)
    for tensor in (*served, *spilled):
        assert tensor._version == 0
        assert tensor._base is None
        assert tensor.is_leaf
        assert not tensor.is_inference()
        assert tensor.untyped_storage().nbytes() == tensor.nbytes
    assert pool.acquire(spec, 0, q).out.shape == (0, 8, 64)


def test_no_user_code_runs_while_filling(debug_pool, spec, q):
    pool = debug_pool("guard")
    seen = []

    class Dispatch(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            seen.append(str(func))
            return func(*args, **(kwargs or {}))

    class Function(TorchFunctionMode):
        def __torch_function__(self, func, types, args=(), kwargs=None):
            seen.append(str(func))
            return func(*args, **(kwargs or {}))

    pool.acquire(spec, 7, q)
    with Function(), Dispatch():
        pool.acquire(spec, 7, q)
    assert not [name for name in seen if "fill" in name or "view" in name or "ne" in name.split(".")]


def test_dropped_results_leave_the_slot_idle(debug_pool, spec, q):
    pool = debug_pool("guard")
    addresses = {pool.acquire(spec, rows, q).out.data_ptr() for rows in (3, 30, 300, 5)}
    assert len(addresses) == 1
    assert pool.stats().live_slots == 0
    assert pool.stats().slots == 1


# --- guard ---


def test_an_overrun_is_named_at_the_next_acquire(debug_pool, spec, q):
    pool = debug_pool("guard")
    result = pool.acquire(spec, 10, q)
    beyond(result.out, 5)[4, 3, 60] = 1.0
    where = f"{__file__}:"
    del result
    with pytest.raises(WriteContractError) as caught:
        pool.acquire(spec, 20, q)
    text = str(caught.value)
    assert text.startswith("out: expected no write outside rows 0 to 10, got one at row 14, column (3, 60): old bits 0x")
    assert "new bits 0x3f80;" in text
    assert f"a result of 10 rows on cpu, acquired at {where}" in text
    assert "test_an_overrun_is_named_at_the_next_acquire" in text


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_place_behind_is_guarded(debug_pool, q, dtype):
    pool = debug_pool("guard")
    spec = OutputSpec(other=((2,), torch.int32), out=((3,), dtype))
    for rows in (1, 4, 127, 1000):
        for row in (0, 1, GUARD_ROWS - 1):
            for column in range(3):
                result = pool.acquire(spec, rows, q)
                element = element_bytes(beyond(result.out, GUARD_ROWS)).view(GUARD_ROWS, 3, -1)[row, column]
                element[-1] = 0x01 if element[-1] != 0x01 else 0x00
                del result
                with pytest.raises(WriteContractError, match=rf"out: .* got one at row {rows + row}, column {column}:"):
                    pool.acquire(spec, rows, q)


def test_the_first_place_is_named(debug_pool, q):
    pool = debug_pool("guard")
    spec = OutputSpec(a=((4,), torch.float32), b=((), torch.float32))
    result = pool.acquire(spec, 3, q)
    beyond(result.b, 9)[:] = 0.5
    del result
    with pytest.raises(WriteContractError, match=r"b: .* got one at row 3, column 0: .* new bits 0x3f000000;"):
        pool.acquire(spec, 3, q)


def test_a_finding_is_reported_once_and_changes_nothing(debug_pool, spec, q):
    pool = debug_pool("guard")
    result = pool.acquire(spec, 10, q)
    address = result.out.data_ptr()
    beyond(result.lse, 1)[0, 0] = 1
    del result
    before = pool.stats()
    with pytest.raises(WriteContractError):
        pool.acquire(spec, 4000, q)
    after = pool.stats()
    assert (before.acquires, before.mapped_bytes) == (after.acquires, after.mapped_bytes)
    assert pool.acquire(spec, 4000, q).out.data_ptr() == address


def test_what_stays_inside_is_not_reported(debug_pool, spec, q):
    pool = debug_pool("guard")
    held = []
    for rows in (1, 10, 4, 128, 129, 4096, 1, 4097, 33):
        result = pool.acquire(spec, rows, q)
        for tensor in result:
            tensor.fill_(7)
        held.append(result)
        del held[:-2], result, tensor
    held.clear()
    result = pool.acquire(spec, 1, q)
    ctypes.memset(result[0].data_ptr() + result[0].nbytes, 1, 8)
    del result
    with pytest.raises(WriteContractError):  # it did look
        pool.acquire(spec, 1, q)


@pytest.mark.parametrize("arena", ["auto", "torch"])
def test_memory_given_back_or_moved_is_not_mistaken_for_an_overrun(debug_pool, spec, q, arena):
    pool = debug_pool("guard", arena=arena)
    for change in (
        pool.trim,
        lambda: (pool.sleep(), pool.wake()),
        lambda: pool.reserve(spec, 100_000, q),
    ):
        for rows in (10, 700):
            pool.acquire(spec, rows, q)
            change()
            pool.acquire(spec, rows + 50, q)


def test_guard_rows_need_room(debug_pool, q):
    spec = OutputSpec(out=((1024,), torch.float32))
    pool = debug_pool("guard", max_bytes=(100 + GUARD_ROWS) * 4096)
    pool.acquire(spec, 100, q)
    with pytest.raises(PoolLimitError):
        pool.acquire(spec, 101, q)
    assert pool.stats().mapped_bytes == (100 + GUARD_ROWS) * 4096
    reserved = debug_pool("guard")
    reserved.reserve(spec, 300, q)
    reserved.acquire(spec, 300, q)
    assert reserved.stats().grows == 1


def test_poison_maps_no_more(debug_pool, q):
    spec = OutputSpec(out=((1024,), torch.float32))
    pool = debug_pool("poison")
    pool.acquire(spec, 100, q)
    assert pool.stats().mapped_bytes == 100 * 4096


def test_forked_child_goes_on(run_script):
    script = """
        import os, torch, bufpool
        spec = bufpool.OutputSpec(out=((4,), torch.float32))
        pool = bufpool.OutputPool()
        q = torch.zeros(1)
        pool.acquire(spec, 3, q)
        child = os.fork()
        if child == 0:
            pool.acquire(spec, 4, q)
            os._exit(0)
        print(os.waitpid(child, 0)[1])
    """
    run = run_script(script, options=("-W", "ignore"), BUFPOOL_DEBUG="guard")
    assert (run.returncode, run.stdout.strip()) == (0, "0"), run.stderr


# --- on CUDA ---


@pytest.mark.gpu
def test_overrun_is_found_on_cuda(debug_pool, spec):
    pool = debug_pool("guard")
    q = torch.zeros(1, device="cuda")
    result = pool.acquire(spec, 10, q)
    assert set(element_bytes(result.out).flatten().tolist()) == set(POISON_BYTES)
    whole = torch.empty(0, device="cuda", dtype=torch.float32)
    slot = next(iter(pool._lanes.values())).current
    memory = handout._CudaOwner.storage(slot.addresses[1], 32 * 20, slot.device)[1]
    whole.set_(memory, 0, (20, 8))[12, 5] = 1
    del result, whole, memory
    with pytest.raises(WriteContractError, match=r"lse: .* got one at row 12, column 5: .* new bits 0x3f800000;"):
        pool.acquire(spec, 10, q)
    pool.acquire(spec, 3000, q)


@pytest.mark.gpu
@pytest.mark.parametrize("mode", ["poison", "guard"])
def test_replays_start_poisoned(debug_pool, spec, mode):
    pool = debug_pool(mode)
    q = torch.zeros(1, device="cuda")
    pool.acquire(spec, 10, q)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    before = torch.cuda.memory_reserved()
    with torch.cuda.graph(graph):
        result = pool.acquire(spec, 10, q)
        result.lse.fill_(2)
        seen = result.out[:5].clone()
    for _ in range(2):
        result.out.zero_()
        graph.replay()
        torch.cuda.synchronize()
        assert set(element_bytes(seen).flatten().tolist()) == set(POISON_BYTES)
        assert set(element_bytes(result.out).flatten().tolist()) == set(POISON_BYTES)
        assert bool((result.lse == 2).all())
    assert torch.cuda.memory_reserved() - before <= 2 * 2**21  # the clone's, not ours
    del result, seen, graph
    pool.acquire(spec, 10, q)

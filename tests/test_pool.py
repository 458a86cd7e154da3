"""The pool on the host: fresh, fixed, fitting, home and honest. CUDA's rules by a driver out of host memory."""

from __future__ import annotations

import gc
import logging
import os
import pickle
import weakref

import numpy as np
import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import bufpool
from bufpool import (
    BufpoolError,
    CaptureError,
    FreshAllocator,
    OutputPool,
    OutputSpec,
    PoolLimitError,
    host_memory,
    process,
)
from bufpool import pool as pool_module
from bufpool.arena import ADDRESS_BUDGET
from bufpool.errors import DriverError

PAGE = host_memory.PAGE_BYTES
GRANULE = 64 * 1024  # of the fake driver


@pytest.fixture
def page_spec():
    """One page a row."""
    return OutputSpec(page=((PAGE,), torch.uint8))


@pytest.fixture
def granule_spec():
    """One granule of the fake driver a row."""
    return OutputSpec(block=((GRANULE,), torch.uint8))


@pytest.fixture
def other_granule_spec():
    return OutputSpec(other=((GRANULE,), torch.uint8))


def addresses(outputs):
    return tuple(tensor.data_ptr() for tensor in outputs)


def fill(outputs, value):
    for tensor in outputs:
        tensor.fill_(value)


def holds(outputs, value):
    return all(bool((tensor == value).all()) for tensor in outputs)


# Fresh


@pytest.mark.parametrize("keep", [lambda outputs: outputs, lambda outputs: (outputs.out[3:4], outputs.lse[3])])
def test_a_held_result_or_view_is_not_overwritten_by_the_next_call(pool, spec, q, keep):
    first = pool.acquire(spec, 10, q)
    fill(first, 5)
    base = addresses(first)
    first = keep(first)
    second = pool.acquire(spec, 10, q)
    fill(second, 9)
    assert not set(addresses(second)) & set(base)
    assert holds(first, 5)


def test_many_held_results_share_no_byte(make_pool, spec, q):
    pool = make_pool(max_slots=16)
    held = [pool.acquire(spec, rows, q) for rows in range(1, 17)]
    for number, outputs in enumerate(held):
        fill(outputs, number)
    assert all(holds(outputs, number) for number, outputs in enumerate(held))
    assert pool.stats().slots == 16
    assert pool.stats().spills == 0


def attention_like(allocator, spec, rows, q, seed):
    """A wrapper that writes all of its outputs, from what the seed gives."""
    generator = torch.Generator().manual_seed(seed)
    outputs = allocator.acquire(spec, rows, q)
    scores = torch.randn(rows, 8, 64, generator=generator)
    outputs.out.copy_(scores)
    torch.logsumexp(scores, -1, out=outputs.lse)
    return outputs


def test_a_thousand_random_calls_are_bit_equal_to_fresh_tensors(pool, spec, q):
    generator = torch.Generator().manual_seed(1)
    held = []
    for seed in range(1000):
        rows = int(torch.randint(1, 65, (1,), generator=generator))
        mine = attention_like(pool, spec, rows, q, seed)
        held.append((mine, attention_like(FreshAllocator(), spec, rows, q, seed)))
        held = held[-(seed % 4) :]
        for one, other in held:
            assert torch.equal(one.out.view(torch.int16), other.out.view(torch.int16))
            assert torch.equal(one.lse.view(torch.int32), other.lse.view(torch.int32))
    assert pool.stats().slots <= 5


def test_rows_of_an_earlier_larger_call_are_not_visible(pool, spec, q):
    fill(pool.acquire(spec, 100, q), float("nan"))
    small = pool.acquire(spec, 3, q)
    fill(small, 1)
    for tensor in small:
        assert tensor.shape[0] == 3
        assert tensor.untyped_storage().nbytes() == tensor.numel() * tensor.itemsize
        assert not bool(tensor.isnan().any())


@pytest.mark.parametrize("dirt", [0.0, float("nan"), 1e30])
def test_what_was_in_the_memory_before_does_not_show(pool, spec, q, dirt):
    fill(pool.acquire(spec, 64, q), dirt)
    mine = attention_like(pool, spec, 40, q, 3)
    expected = attention_like(FreshAllocator(), spec, 40, q, 3)
    assert torch.equal(mine.out, expected.out)
    assert torch.equal(mine.lse, expected.lse)


def test_61_layers_that_drop_their_results_use_one_slot(pool, spec, q):
    base = set()
    for _ in range(3):
        for _ in range(61):
            base.add(addresses(pool.acquire(spec, 100, q)))
    assert len(base) == 1
    assert pool.stats().slots == 1
    assert pool.stats().rotations == 0


def test_a_result_rebound_in_a_loop_uses_two_slots(pool, spec, q):
    base = set()
    outputs = None
    for number in range(50):
        outputs = pool.acquire(spec, 100, q)
        fill(outputs, number)
        base.add(addresses(outputs))
    assert len(base) == pool.stats().slots == 2
    assert holds(outputs, 49)


@pytest.mark.parametrize(
    "other",
    [
        OutputSpec(out=((64, 8), torch.bfloat16), lse=((8,), torch.float32)),
        OutputSpec(out=((8, 64), torch.float16), lse=((8,), torch.float32)),
        OutputSpec(lse=((8,), torch.float32), out=((8, 64), torch.bfloat16)),
        OutputSpec(out=((8, 64), torch.bfloat16), LSE=((8,), torch.float32)),
    ],
    ids=["shape", "dtype", "order", "name"],
)
def test_specs_of_the_same_size_have_lanes_of_their_own(pool, spec, q, other):
    base = set(addresses(pool.acquire(spec, 10, q)))
    for _ in range(2):
        outputs = pool.acquire(other, 10, q)
        assert outputs._fields == other.names
        assert [(tensor.shape[1:], tensor.dtype) for tensor in outputs] == [(shape, dtype) for _, shape, dtype in other]
        assert not set(addresses(outputs)) & base
        del outputs
    assert len(pool.stats().lanes) == 2


def test_an_equal_spec_made_elsewhere_finds_the_same_lane(pool, spec, q):
    base = addresses(pool.acquire(spec, 10, q))
    assert addresses(pool.acquire(pickle.loads(pickle.dumps(spec)), 10, q)) == base


def test_nested_callers_each_keep_their_result(pool, spec, q):
    def layer(depth):
        outputs = pool.acquire(spec, 4, q)
        fill(outputs, depth)
        if depth:
            layer(depth - 1)
        assert holds(outputs, depth)

    layer(12)  # deeper than max_slots: the last ones spill


# Fixed


def test_the_address_of_a_slot_never_changes_over_ten_thousand_calls(pool, spec, q):
    generator = torch.Generator().manual_seed(2)
    base = {
        addresses(pool.acquire(spec, rows, q)) for rows in torch.randint(1, 5000, (10_000,), generator=generator).tolist()
    }
    assert len(base) == 1


def test_a_slot_keeps_its_address_over_growth_trim_sleep_and_wake(pool, spec, q):
    base = addresses(pool.acquire(spec, 1, q))
    for rows in (100, 10_000, 3):
        assert addresses(pool.acquire(spec, rows, q)) == base
        pool.trim()
        assert addresses(pool.acquire(spec, rows, q)) == base
        pool.sleep()
        pool.wake()
        assert addresses(pool.acquire(spec, rows, q)) == base


def test_a_result_grows_beside_one_that_is_held(pool, spec, q):
    held = pool.acquire(spec, 10, q)
    fill(held, 5)
    base = addresses(held)
    fill(pool.acquire(spec, 100_000, q), 9)
    assert addresses(held) == base
    assert holds(held, 5)


# Fitting


def test_growth_in_single_rows_maps_one_buffer_of_the_final_rows(pool, spec, q):
    for rows in range(1, 1001):
        pool.acquire(spec, rows, q)
    stats = pool.stats()
    assert stats.slots == 1
    assert stats.needed_bytes == 1000 * spec.row_nbytes
    assert stats.mapped_bytes == stats.peak_mapped_bytes == sum(-(-1000 * row // PAGE) * PAGE for row in spec.row_bytes)


def test_a_growth_step_is_bounded_by_what_is_asked(pool, page_spec, q):
    for rows in (1, 2, 3, 1000, 1001):
        pool.acquire(page_spec, rows, q)
        assert pool.stats().mapped_bytes == rows * PAGE


def test_a_smaller_call_maps_nothing(pool, page_spec, q):
    pool.acquire(page_spec, 100, q)
    for rows in (1, 50, 99, 100):
        pool.acquire(page_spec, rows, q)
    assert pool.stats().mapped_bytes == 100 * PAGE
    assert pool.stats().grows == 1


def test_the_last_row_beyond_2_to_the_31_elements_is_written_and_read_right(pool, q):
    spec = OutputSpec(x=((2**20,), torch.int8), y=((2**19,), torch.float32))
    rows = 2**12 + 1  # x: past 2**32 elements and bytes; y: past 2**31 elements and 2**33 bytes
    x, y = pool.acquire(spec, rows, q)
    assert x.numel() > 2**32
    assert y.numel() > 2**31
    assert spec.nbytes(rows) == rows * 3 * 2**20
    x[-1].fill_(5)
    y[-1].copy_(torch.arange(2**19))
    assert x[-1].data_ptr() == x.data_ptr() + 2**32
    assert y[-1].data_ptr() == y.data_ptr() + 2**33
    base = addresses((x, y))
    assert int(x[-1].sum(dtype=torch.int64)) == 5 * 2**20
    assert y[-1, -1].item() == 2**19 - 1
    del x, y
    x, y = pool.acquire(spec, rows, q)
    assert addresses((x, y)) == base
    assert y[-1, -1].item() == 2**19 - 1


# Rows


def test_no_rows_are_empty_tensors_and_touch_no_memory(pool, spec, q):
    for _ in range(2):
        outputs = pool.acquire(spec, 0, q)
        assert [tensor.shape for tensor in outputs] == [(0, 8, 64), (0, 8)]
        assert [tensor.dtype for tensor in outputs] == [torch.bfloat16, torch.float32]
        assert all(tensor.is_contiguous() for tensor in outputs)
    assert pool.stats().slots == pool.stats().mapped_bytes == 0
    assert pool.stats().acquires == 2


def test_no_rows_between_other_calls_disturb_nothing(pool, spec, q):
    held = pool.acquire(spec, 4, q)
    fill(held, 5)
    pool.acquire(spec, 0, q)
    assert holds(held, 5)
    assert pool.stats().live_slots == 1


@pytest.mark.parametrize("rows", [np.int64(3), np.int32(3), np.uint16(3)])
def test_numpy_integers_are_row_counts(pool, spec, q, rows):
    assert pool.acquire(spec, rows, q).lse.shape == (3, 8)
    assert pool.acquire(spec, rows, q).lse.shape == (3, 8)


@pytest.mark.parametrize("rows", [True, 3.0, np.float64(3), np.bool_(True), "3", None, torch.tensor(3)])
def test_rows_of_a_wrong_kind_are_a_type_error(pool, spec, q, rows):
    pool.acquire(spec, 4, q)
    for call in (pool.acquire, pool.reserve):
        with pytest.raises(TypeError, match="rows: expected an integer >= 0, got "):
            call(spec, rows, q)
    assert pool.stats().acquires == 1


@pytest.mark.parametrize("rows", [-1, np.int64(-5)])
def test_negative_rows_are_a_value_error(pool, spec, q, rows):
    pool.acquire(spec, 4, q)
    for call in (pool.acquire, pool.reserve):
        with pytest.raises(ValueError, match=f"rows: expected an integer >= 0, got {rows}"):
            call(spec, rows, q)


@pytest.mark.parametrize("rows", [2**45, 2**63, 2**70])
@pytest.mark.parametrize("used", [False, True], ids=["first use", "used"])
def test_rows_beyond_any_address_space_are_a_limit_error_and_change_nothing(pool, spec, q, rows, used):
    if used:
        pool.acquire(spec, 4, q)
    before = pool.stats()
    with pytest.raises(PoolLimitError, match="bytes") as failure:
        pool.acquire(spec, rows, q)
    assert isinstance(failure.value, MemoryError)
    assert failure.value.need >= rows * spec.row_nbytes
    assert pool.stats() == before
    fill(pool.acquire(spec, 4, q), 1)


@pytest.mark.parametrize("spec", ["out", None, {"out": ((8,), torch.float32)}, OutputSpec])
def test_what_is_no_spec_is_a_type_error(pool, q, spec):
    for call in (pool.acquire, pool.reserve):
        with pytest.raises(TypeError, match="spec: expected an OutputSpec, got "):
            call(spec, 3, q)


# Home


def test_outputs_live_where_several_inputs_live(pool, spec, q):
    base = addresses(pool.acquire(spec, 3, q))
    for like in ([q, q], (q, torch.zeros(2, 2)), {"q": q, "kv": q}, torch.nn.Parameter(q), torch.zeros(0)):
        assert addresses(pool.acquire(spec, 3, like)) == base
    assert len(pool.stats().lanes) == 1


def test_a_thread_that_alternates_devices_has_two_lanes_that_never_mix(make_pool, fake_cuda, spec):
    pool = make_pool()
    base = {}
    for number in range(6):
        index = number % 2
        outputs = pool.acquire(spec, 10 + number, fake_cuda.like(index))
        assert base.setdefault(index, addresses(outputs)) == addresses(outputs)
        for tensor in outputs:
            assert fake_cuda.is_usable(tensor, index)
            assert not fake_cuda.is_usable(tensor, 1 - index)
        del outputs, tensor
    assert {lane.device for lane in pool.stats().lanes} == {"cuda:0", "cuda:1"}
    assert pool.stats().slots == 2


def test_cuda_without_an_index_means_the_current_device(make_pool, fake_cuda, spec):
    pool = make_pool()
    fake_cuda.current = 3
    pool.acquire(spec, 10, fake_cuda.like())
    pool.reserve(spec, 10, "cuda")
    pool.reserve(spec, 10, fake_cuda.like(3))
    assert [lane.device for lane in pool.stats().lanes] == ["cuda:3"]
    assert pool.stats().slots == 1


def test_each_stream_of_a_device_has_a_lane_of_its_own(make_pool, fake_cuda, spec):
    pool = make_pool()
    base = []
    for fake_cuda.stream in (0, 64, 128, 64, 0):
        base.append(addresses(pool.acquire(spec, 10, fake_cuda.like(0))))
    assert base[0] == base[4] != base[1] == base[3] != base[2]
    assert [lane.stream for lane in pool.stats().lanes] == [0, 64, 128]


def test_inputs_in_pinned_memory_are_of_the_host(pool, spec):
    assert pool.acquire(spec, 3, torch.zeros(1)).out.device == torch.device("cpu")


def test_meta_inputs_give_meta_outputs_and_leave_the_pool_alone(pool, spec):
    outputs = pool.acquire(spec, 7, torch.empty(1, device="meta"))
    assert [tensor.shape for tensor in outputs] == [(7, 8, 64), (7, 8)]
    assert {tensor.device.type for tensor in outputs} == {"meta"}
    pool.reserve(spec, 7, torch.empty(1, device="meta"))
    assert pool.stats() == OutputPool().stats()


@pytest.mark.parametrize("used", [False, True], ids=["first use", "used"])
@pytest.mark.parametrize("real", [False, True], ids=["fake input", "real input"])
def test_under_fake_tensor_mode_fakes_come_back_and_the_pool_is_untouched(pool, spec, q, real, used):
    if used:
        pool.acquire(spec, 7, q)
    before = pool.stats()
    with FakeTensorMode(allow_non_fake_inputs=True):
        fake = torch.empty(1)
        outputs = pool.acquire(spec, 7, q if real else fake)
        assert all(type(tensor) is type(fake) for tensor in outputs)
    outside = pool.acquire(spec, 7, fake)
    for made in (outputs, outside):
        assert [(tensor.shape, tensor.dtype) for tensor in made] == [((7, 8, 64), torch.bfloat16), ((7, 8), torch.float32)]
        assert all(type(tensor) is type(fake) for tensor in made)
    assert pool.stats() == before


def test_a_compiled_function_leaves_the_pool_untouched(pool, spec, q):
    @torch.compile(backend="aot_eager", fullgraph=True)
    def step(q):
        outputs = pool.acquire(spec, 3, q)
        outputs.lse.copy_(q.expand(3, 8))
        return outputs.lse * 2

    assert torch.equal(step(torch.full((1,), 4.0)), torch.full((3, 8), 8.0))
    assert pool.stats().slots == 0
    torch._dynamo.reset()


# Holding more than there are slots


def test_results_beyond_max_slots_spill_and_are_as_good(make_pool, spec, q, caplog):
    pool = make_pool(max_slots=2)
    with caplog.at_level(logging.INFO, logger="bufpool"):
        held = [pool.acquire(spec, 10, q) for _ in range(6)]
    for number, outputs in enumerate(held):
        fill(outputs, number)
    assert all(holds(outputs, number) for number, outputs in enumerate(held))
    assert len({addresses(outputs) for outputs in held}) == 6
    assert (pool.stats().slots, pool.stats().spills) == (2, 4)
    warnings = [record for record in caplog.records if record.levelno == logging.WARNING]
    assert len(warnings) == 1
    assert warnings[0].name == "bufpool"
    assert "all 2 slots of (out, lse) are held" in warnings[0].getMessage()


def test_slots_serve_again_after_a_spill(make_pool, spec, q):
    pool = make_pool(max_slots=1)
    held = pool.acquire(spec, 10, q)
    base = addresses(held)
    spilled = pool.acquire(spec, 10, q)
    del held
    assert addresses(pool.acquire(spec, 10, q)) == base
    assert pool.stats().spills == 1
    del spilled


def test_each_lane_has_its_own_slots_and_warns_for_itself(make_pool, spec, page_spec, q, caplog):
    pool = make_pool(max_slots=1)
    held = [pool.acquire(one, 3, q) for one in (spec, page_spec, spec, page_spec, spec)]
    assert pool.stats().spills == 3
    assert [record.levelno for record in caplog.records] == [logging.WARNING] * 2
    del held


@pytest.mark.parametrize("name", ["max_bytes", "max_slots"])
@pytest.mark.parametrize(
    ("value", "error"), [(0, ValueError), (-1, ValueError), (1.5, TypeError), (True, TypeError), ("8", TypeError)]
)
def test_limits_of_a_wrong_kind_are_refused(name, value, error):
    with pytest.raises(error, match=f"{name}: expected an integer >= 1, got "):
        OutputPool(**{name: value})


def test_max_slots_none_is_refused():
    with pytest.raises(TypeError, match="max_slots: expected an integer >= 1, got None"):
        OutputPool(max_slots=None)


# max_bytes


def test_idle_slots_count_as_available_under_max_bytes(make_pool, page_spec, q):
    other = OutputSpec(other=((PAGE,), torch.uint8))
    pool = make_pool(max_bytes=10 * PAGE)
    base = addresses(pool.acquire(page_spec, 7, q))
    for _ in range(3):
        fill(pool.acquire(other, 10, q), 3)
        assert pool.stats().mapped_bytes == 10 * PAGE
        assert addresses(pool.acquire(page_spec, 9, q)) == base
        assert pool.stats().mapped_bytes == 9 * PAGE


def test_only_as_much_is_evicted_as_is_needed(make_pool, q):
    specs = [OutputSpec(**{name: ((PAGE,), torch.uint8)}) for name in "abc"]
    pool = make_pool(max_bytes=10 * PAGE)
    pool.acquire(specs[0], 2, q)
    pool.acquire(specs[1], 5, q)
    pool.acquire(specs[2], 6, q)
    assert [lane.mapped_bytes // PAGE for lane in pool.stats().lanes] == [2, 0, 6]


def test_a_held_result_is_never_evicted(make_pool, page_spec, q):
    other = OutputSpec(other=((PAGE,), torch.uint8))
    pool = make_pool(max_bytes=10 * PAGE)
    held = pool.acquire(page_spec, 6, q)
    fill(held, 5)
    with pytest.raises(PoolLimitError) as failure:
        pool.acquire(other, 5, q)
    error = failure.value
    assert (error.need, error.have, error.limit) == (5 * PAGE, 6 * PAGE, 10 * PAGE)
    assert str(error) == (
        f"cpu: max_bytes of the pool: expected at most {10 * PAGE} bytes,"
        f" got {6 * PAGE} bytes and a need of {5 * PAGE} more"
    )
    assert holds(held, 5)


def test_a_call_beyond_max_bytes_changes_nothing_and_the_pool_stays_usable(make_pool, page_spec, q):
    pool = make_pool(max_bytes=10 * PAGE)
    pool.acquire(page_spec, 4, q)
    before = pool.stats()
    for _ in range(2):
        with pytest.raises(PoolLimitError):
            pool.acquire(page_spec, 11, q)
        with pytest.raises(PoolLimitError):
            pool.reserve(page_spec, 11, q)
        with pytest.raises(PoolLimitError):
            pool.acquire(OutputSpec(other=((PAGE,), torch.uint8)), 11, q)
    assert pool.stats() == before
    fill(pool.acquire(page_spec, 10, q), 4)
    assert pool.stats().mapped_bytes == 10 * PAGE


def test_growth_needs_only_the_difference_under_max_bytes(make_pool, page_spec, q):
    pool = make_pool(max_bytes=12 * PAGE)
    pool.acquire(page_spec, 10, q)
    pool.acquire(page_spec, 12, q)
    assert pool.stats().peak_mapped_bytes == 12 * PAGE


def test_a_second_result_of_a_lane_counts_too(make_pool, page_spec, q):
    pool = make_pool(max_bytes=10 * PAGE)
    held = pool.acquire(page_spec, 6, q)
    fill(held, 5)
    with pytest.raises(PoolLimitError):
        pool.acquire(page_spec, 6, q)
    assert pool.stats().slots == 1
    other = pool.acquire(page_spec, 4, q)
    fill(other, 6)
    assert holds(held, 5)


def test_max_bytes_counts_each_device_by_itself(make_pool, fake_cuda, granule_spec):
    pool = make_pool(max_bytes=4 * GRANULE)
    held = [pool.acquire(granule_spec, 4, fake_cuda.like(index)) for index in range(8)]
    assert pool.stats().mapped_bytes == 8 * 4 * GRANULE
    with pytest.raises(PoolLimitError, match="cuda:5"):
        pool.reserve(granule_spec, 1, fake_cuda.like(5))
    del held


def test_a_limit_error_travels_between_processes():
    error = pickle.loads(pickle.dumps(PoolLimitError("here", need=1, have=2, limit=3)))
    assert (str(error), error.need, error.have, error.limit) == (
        "here: expected at most 3 bytes, got 2 bytes and a need of 1 more",
        1,
        2,
        3,
    )


# reserve


def test_reserve_maps_the_whole_footprint_before_the_first_use(pool, spec, q):
    pool.reserve(spec, 8192, q)
    stats = pool.stats()
    assert stats.mapped_bytes == stats.needed_bytes == 8192 * spec.row_nbytes
    assert stats.in_use_bytes == stats.acquires == 0
    base = pool._slots[0].addresses
    for rows in (1, 8192, 500):
        assert addresses(pool.acquire(spec, rows, q)) == base
    stats = pool.stats()
    assert (stats.hits, stats.grows, stats.slots) == (3, 1, 1)
    assert stats.mapped_bytes == 8192 * spec.row_nbytes


def test_reserving_again_maps_nothing_more(pool, spec, q):
    for rows in (8192, 8192, 100, 0):
        pool.reserve(spec, rows, q)
    assert pool.stats().mapped_bytes == 8192 * spec.row_nbytes
    assert pool.stats().slots == 1


@pytest.mark.parametrize("like", ["cpu", torch.device("cpu"), [torch.zeros(1)]], ids=["name", "device", "tensors"])
def test_reserve_takes_a_device_too(pool, spec, q, like):
    pool.reserve(spec, 100, like)
    pool.acquire(spec, 100, q)
    assert (pool.stats().slots, pool.stats().grows) == (1, 1)


def test_reserve_grows_the_slot_of_a_lane_in_place(pool, spec, q):
    base = addresses(pool.acquire(spec, 1, q))
    pool.reserve(spec, 5000, q)
    assert pool.stats().slots == 1
    outputs = pool.acquire(spec, 5000, q)
    assert addresses(outputs) == base
    assert pool.stats().hits == 1


def test_reserve_counts_for_the_peak_of_the_lane_whose_slot_it_grows(pool, spec, q):
    pool.acquire(spec, 10, q)
    pool.reserve(spec, 10_000, q)
    (lane,) = pool.stats().lanes
    assert lane.peak_mapped_bytes == lane.mapped_bytes == pool.stats().mapped_bytes
    assert lane.grows == 2


def test_reserve_beside_a_held_result_prepares_another_slot(pool, spec, q):
    held = pool.acquire(spec, 10, q)
    fill(held, 5)
    pool.reserve(spec, 100, q)
    assert (pool.stats().slots, pool.stats().free_slots) == (2, 1)
    outputs = pool.acquire(spec, 100, q)
    fill(outputs, 9)
    assert (pool.stats().slots, pool.stats().free_slots) == (2, 0)
    assert holds(held, 5)


def test_reserve_for_a_device_that_is_not_there_is_a_value_error(pool, spec, fake_cuda):
    with pytest.raises(ValueError, match="expected one of 8 CUDA devices, got cuda:8"):
        pool.reserve(spec, 1, "cuda:8")


# trim


def test_trim_gives_back_what_nobody_holds(pool, page_spec, q, caplog):
    pool.acquire(page_spec, 100, q)
    with caplog.at_level(logging.INFO, logger="bufpool"):
        assert pool.trim() == 100 * PAGE
    assert [record.getMessage() for record in caplog.records] == [f"trim: gave back {100 * PAGE} bytes"]
    assert pool.stats().mapped_bytes == 0
    assert pool.trim() == 0


def test_trim_keeps_the_rows_of_a_held_result(pool, page_spec, q):
    pool.reserve(page_spec, 100, q)
    held = pool.acquire(page_spec, 3, q)
    fill(held, 5)
    assert pool.trim() == 97 * PAGE
    assert holds(held, 5)
    assert pool.stats().mapped_bytes == 3 * PAGE


def test_trim_keeps_a_view_whose_result_is_gone(pool, page_spec, q):
    view = pool.acquire(page_spec, 3, q).page[2]
    view.fill_(5)
    pool.trim()
    assert bool((view == 5).all())


def test_a_dropped_lane_leaves_its_counts(pool, spec, q):
    held = pool.acquire(spec, 10, q)
    pool.acquire(spec, 10, q)
    del held
    pool.trim()
    pool.trim()
    stats = pool.stats()
    assert (stats.lanes, stats.acquires, stats.grows, stats.rotations) == ((), 2, 2, 1)


def test_trim_drops_a_lane_that_nobody_used_since_the_last_one(pool, spec, page_spec, q):
    pool.acquire(spec, 3, q)
    pool.trim()
    assert len(pool.stats().lanes) == 1
    pool.acquire(page_spec, 3, q)
    pool.trim()
    assert [lane.spec for lane in pool.stats().lanes] == [page_spec]
    assert pool.stats().slots == 1
    fill(pool.acquire(spec, 3, q), 4)


def test_a_lane_in_use_by_hits_alone_survives_trims(pool, spec, q):
    base = addresses(pool.acquire(spec, 3, q))
    for _ in range(4):
        pool.trim()
        for _ in range(2):
            assert addresses(pool.acquire(spec, 3, q)) == base


@pytest.mark.parametrize("is_second", [False, True])
def test_trim_keeps_what_is_dropped_after_it_waited_for_the_device(make_pool, fake_cuda, spec, monkeypatch, is_second):
    pool = make_pool()
    other_spec = OutputSpec(other=((64,), torch.float32))
    held = {spec: pool.acquire(spec, 3, fake_cuda.like(0)), other_spec: pool.acquire(other_spec, 3, fake_cuda.like(0))}
    if is_second:
        pool.trim()
    pool.acquire(OutputSpec(idle=((64,), torch.float32)), 3, fake_cuda.like(0))
    mapped = [slot.mapped_bytes for slot in pool._slots]

    def wait_and_meanwhile(slots):
        if process.lock._is_owned():  # it waits before without
            held.clear()  # by another thread, with work on the memory

    monkeypatch.setattr(process, "synchronize", wait_and_meanwhile)
    assert pool.trim() == mapped[2]
    assert not any(slot.is_live() for slot in pool._slots)
    assert [slot.mapped_bytes for slot in pool._slots] == [*mapped[:2], 0]


def test_trim_never_drops_a_lane_that_somebody_holds(pool, spec, q):
    held = pool.acquire(spec, 3, q)
    fill(held, 5)
    for _ in range(3):
        pool.trim()
    assert holds(held, 5)
    assert pool.stats().live_slots == 1


# sleep and wake


def test_a_sleeping_pool_holds_no_memory_and_refuses_to_serve(pool, page_spec, q):
    pool.acquire(page_spec, 100, q)
    pool.sleep()
    assert pool.stats().mapped_bytes == 0
    assert pool.stats().asleep
    assert pool.stats().peak_mapped_bytes == 100 * PAGE
    for call in (pool.acquire, pool.reserve):
        for rows in (1, 100, 1000):
            with pytest.raises(BufpoolError, match=r"sleeps; call wake\(\)"):
                call(page_spec, rows, q)
    with pytest.raises(BufpoolError, match=r"wake\(\)"):
        pool.acquire(page_spec, 0, q)


def test_wake_maps_the_same_sizes_at_the_same_addresses(pool, page_spec, q):
    base = addresses(pool.acquire(page_spec, 100, q))
    pool.sleep()
    pool.wake()
    assert not pool.stats().asleep
    assert pool.stats().mapped_bytes == 100 * PAGE
    outputs = pool.acquire(page_spec, 100, q)
    assert addresses(outputs) == base
    assert pool.stats().grows == 1
    fill(outputs, 3)
    assert holds(outputs, 3)


def test_sleep_refuses_while_results_are_live_and_says_how_many(pool, spec, page_spec, q):
    held = [pool.acquire(spec, 3, q), pool.acquire(spec, 3, q), pool.acquire(page_spec, 1, q)]
    with pytest.raises(BufpoolError, match="got 3"):
        pool.sleep()
    assert not pool.stats().asleep
    fill(held[0], 5)
    view = held[0].lse[1:]
    held.clear()
    with pytest.raises(BufpoolError, match="got 1"):
        pool.sleep()
    assert bool((view == 5).all())
    del view
    pool.sleep()


def test_sleeping_twice_and_waking_an_awake_pool_are_errors(pool):
    with pytest.raises(BufpoolError, match="wake: expected a pool that sleeps"):
        pool.wake()
    pool.sleep()
    with pytest.raises(BufpoolError, match="sleep: expected a pool that is awake"):
        pool.sleep()


def test_sleep_and_wake_are_logged_with_bytes(pool, page_spec, q, caplog):
    pool.acquire(page_spec, 10, q)
    with caplog.at_level(logging.INFO, logger="bufpool"):
        pool.sleep()
        pool.wake()
    assert [record.getMessage() for record in caplog.records] == [
        f"sleep: gave back {10 * PAGE} bytes",
        f"wake: mapped {10 * PAGE} bytes again",
    ]


def test_spilled_results_do_not_keep_a_pool_awake(make_pool, spec, q):
    pool = make_pool(max_slots=1)
    held = pool.acquire(spec, 3, q)
    spilled = pool.acquire(spec, 3, q)
    fill(spilled, 6)
    del held
    pool.sleep()
    assert holds(spilled, 6)
    pool.wake()


def test_the_peak_counts_again_after_wake(pool, spec, q):
    pool.acquire(spec, 100, q)
    mapped = pool.stats().mapped_bytes
    pool.sleep()
    pool.reset_peak_stats()
    assert pool.stats().peak_mapped_bytes == pool.stats().lanes[0].peak_mapped_bytes == 0
    pool.wake()
    assert pool.stats().peak_mapped_bytes == pool.stats().lanes[0].peak_mapped_bytes == mapped


# close


def test_a_closed_pool_refuses_and_its_held_results_stay_readable(pool, spec, q):
    held = pool.acquire(spec, 3, q)
    fill(held, 5)
    pool.close()
    pool.close()
    for call in (pool.acquire, pool.reserve):
        with pytest.raises(BufpoolError, match="closed"):
            call(spec, 3, q)
    for call in (pool.trim, pool.sleep, pool.wake):
        with pytest.raises(BufpoolError, match="closed"):
            call()
    with pytest.raises(BufpoolError, match="closed"):
        pool.acquire(spec, 0, q)
    fill(OutputPool().acquire(spec, 3, q), 9)
    assert holds(held, 5)


def test_stats_of_a_closed_pool_keep_the_counts(pool, spec, q):
    pool.acquire(spec, 3, q)
    pool.acquire(spec, 3, q)
    pool.close()
    stats = pool.stats()
    assert (stats.acquires, stats.hits, stats.slots, stats.mapped_bytes, stats.lanes) == (2, 1, 0, 0, ())
    assert pool.report()


def test_memory_of_a_closed_pool_comes_back_when_its_last_result_dies(make_pool, fake_cuda, spec):
    pool, other = make_pool(), make_pool()
    held = pool.acquire(spec, 3, fake_cuda.like(0))
    pool.acquire(spec, 500, fake_cuda.like(0))
    fill(held, 5)
    pool.close()
    driver = fake_cuda.drivers[0]
    assert driver.mapped_bytes == 2 * GRANULE
    assert all(fake_cuda.is_usable(tensor) for tensor in held)
    assert holds(held, 5)
    del held
    other.acquire(spec, 3, fake_cuda.like(0))
    assert driver.mapped_bytes == other.stats().mapped_bytes
    assert not process.retired


def test_a_collected_pool_behaves_as_closed(make_pool, fake_cuda, spec):
    other = make_pool()
    pool = OutputPool()
    watcher = weakref.ref(pool)
    held = pool.acquire(spec, 3, fake_cuda.like(0))
    fill(held, 5)
    del pool
    gc.collect()
    assert watcher() is None
    other.acquire(spec, 3, fake_cuda.like(0))
    assert holds(held, 5)
    assert all(fake_cuda.is_usable(tensor) for tensor in held)
    del held
    other.acquire(spec, 300, fake_cuda.like(0))
    assert fake_cuda.drivers[0].mapped_bytes == other.stats().mapped_bytes


def test_a_result_does_not_keep_its_pool(spec, q):
    pool = OutputPool()
    watcher = weakref.ref(pool)
    held = pool.acquire(spec, 3, q)
    del pool
    assert watcher() is None
    fill(held, 5)


def test_a_pool_is_a_context_manager_that_closes(spec, q):
    with OutputPool() as pool:
        held = pool.acquire(spec, 3, q)
        fill(held, 5)
    with pytest.raises(BufpoolError, match="closed"):
        pool.acquire(spec, 3, q)
    assert holds(held, 5)


def test_a_sleeping_pool_can_be_closed(make_pool, fake_cuda, spec):
    pool = make_pool()
    pool.acquire(spec, 3, fake_cuda.like(0))
    pool.sleep()
    pool.close()
    assert fake_cuda.drivers[0].is_clean


def test_two_pools_share_nothing(make_pool, spec, q):
    first, second = make_pool(), make_pool()
    base = addresses(first.acquire(spec, 3, q))
    assert addresses(second.acquire(spec, 3, q)) != base
    first.close()
    fill(second.acquire(spec, 3, q), 1)
    assert second.stats().acquires == 2


# Arena kinds


def test_the_host_is_served_by_a_range_that_never_moves(pool, spec, q):
    pool.acquire(spec, 3, q)
    assert pool.stats().arena == "host"


def test_plain_torch_memory_is_named_in_stats(make_pool, spec, q):
    pool = make_pool(arena="torch")
    pool.acquire(spec, 3, q)
    assert pool.stats().arena == pool.stats().lanes[0].arena == "torch"
    assert "torch" in pool.report()
    assert pool.stats().reserved_bytes == pool.stats().mapped_bytes


def test_plain_torch_memory_is_fresh_too(make_pool, spec, q):
    pool = make_pool(arena="torch")
    held = pool.acquire(spec, 10, q)
    fill(held, 5)
    for rows in (10, 100, 1000):
        fill(pool.acquire(spec, rows, q), 9)
    assert holds(held, 5)
    view = held.lse[3]
    del held
    pool.trim()
    fill(pool.acquire(spec, 5000, q), 9)
    assert holds([view], 5)
    del view
    pool.sleep()
    pool.wake()
    fill(pool.acquire(spec, 5000, q), 9)


@pytest.mark.parametrize(("arena", "name"), [("cuda", "cpu"), ("host", "cuda:0")])
def test_an_arena_kind_that_cannot_serve_the_device_is_an_error(make_pool, fake_cuda, spec, q, arena, name):
    pool = make_pool(arena=arena)
    like = q if name == "cpu" else fake_cuda.like(0)
    with pytest.raises(BufpoolError, match=f"{name}: expected a device that an arena of kind '{arena}' can serve"):
        pool.acquire(spec, 3, like)
    assert pool.stats().slots == 0
    other = fake_cuda.like(0) if name == "cpu" else q
    assert pool.acquire(spec, 3, other).lse.shape == (3, 8)


@pytest.mark.parametrize("arena", ["gpu", "", None, 3])
def test_an_arena_kind_that_does_not_exist_is_a_value_error(arena):
    with pytest.raises(ValueError, match="arena: expected one of auto, cuda, host, torch, got "):
        OutputPool(arena=arena)


def test_a_reservation_that_had_to_be_smaller_is_shown(make_pool, spec, q, monkeypatch):
    real = host_memory.reserve
    monkeypatch.setattr(host_memory, "reserve", lambda nbytes: None if nbytes > 2**28 else real(nbytes))
    pool = make_pool()
    pool.acquire(spec, 3, q)
    assert pool.stats().short_reservations == 1
    assert pool.stats().reserved_bytes < 2**29
    with pytest.raises(PoolLimitError, match="in one reservation"):
        pool.acquire(spec, 2**20, q)
    fill(pool.acquire(spec, 3, q), 1)


# The default pool


def test_the_default_pool_is_made_once_and_can_be_replaced(monkeypatch, make_pool, spec, q):
    monkeypatch.setattr(pool_module, "_default", None)
    first = bufpool.default_pool()
    assert bufpool.default_pool() is first
    held = first.acquire(spec, 3, q)
    other = make_pool()
    bufpool.set_default_pool(other)
    assert bufpool.default_pool() is other
    fill(held, 5)
    assert holds(held, 5)
    first.close()


@pytest.mark.parametrize("pool", [None, "pool", FreshAllocator()])
def test_only_a_pool_can_be_the_default(pool):
    with pytest.raises(TypeError, match="pool: expected an OutputPool, got "):
        bufpool.set_default_pool(pool)


def test_growth_is_logged_with_device_bytes_and_rows(pool, page_spec, q, caplog):
    with caplog.at_level(logging.INFO, logger="bufpool"):
        pool.acquire(page_spec, 3, q)
        pool.acquire(page_spec, 3, q)
        pool.acquire(page_spec, 5, q)
    texts = [record.getMessage() for record in caplog.records]
    assert [record.levelno for record in caplog.records] == [logging.INFO] * 3
    assert texts[0] == "cpu: arenas of kind 'host' serve"
    assert texts[1].startswith(f"cpu: mapped {3 * PAGE} bytes more for 3 rows of (page)")
    assert texts[2].startswith(f"cpu: mapped {2 * PAGE} bytes more for 5 rows of (page)")


def test_memory_that_moves_is_said_once_where_nobody_asked_for_it(make_pool, spec, q, caplog, monkeypatch):
    monkeypatch.setattr(host_memory, "is_available", lambda: False)
    pool = make_pool()
    for rows in (3, 300):
        pool.acquire(spec, rows, q)
    warnings = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    assert warnings == [
        "cpu: arenas of kind 'torch' serve, which move when they grow: no lazily committed memory on this system"
    ]
    caplog.clear()
    make_pool(arena="torch").acquire(spec, 3, q)
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]


def test_a_spill_that_torch_has_no_memory_for_is_not_counted_anywhere(make_pool, spec, q, monkeypatch):
    pool = make_pool(max_slots=1)
    held = pool.acquire(spec, 3, q)
    spilled = pool.acquire(spec, 3, q)
    before = pool.stats()

    def fails(*args, **options):
        raise MemoryError("injected")

    with monkeypatch.context() as patch:
        patch.setattr(FreshAllocator, "acquire", fails)
        with pytest.raises(MemoryError, match="injected"):
            pool.acquire(spec, 3, q)
    assert pool.stats() == before
    del held, spilled


def test_rows_beyond_what_torch_can_count_are_a_limit_error(make_pool, spec, q):
    pool = make_pool(arena="torch")
    for rows in (2**62, 2**70):
        with pytest.raises(PoolLimitError):
            pool.acquire(spec, rows, q)
    assert pool.stats().mapped_bytes == 0


def test_reserve_refuses_a_closed_pool_for_no_rows_too(make_pool, spec, q):
    pool = make_pool()
    pool.close()
    with pytest.raises(BufpoolError, match="closed"):
        pool.reserve(spec, 0, q)


def test_reserve_for_a_fake_tensor_maps_nothing(pool, spec, q):
    with FakeTensorMode() as mode:
        pool.reserve(spec, 100, q)
        fake = mode.from_tensor(torch.zeros(3))
    pool.reserve(spec, 100, fake)
    assert pool.stats().slots == 0


def test_a_site_in_a_package_whose_name_begins_like_ours_is_not_ours(make_pool, spec, q, tmp_path):
    pool = make_pool(trace=True)
    file = os.path.join(os.path.dirname(bufpool.__file__) + "_kernels", "wrapper.py")
    names = {"pool": pool, "spec": spec, "q": q}
    exec(compile("held = pool.acquire(spec, 3, q)", file, "exec"), names)
    (holder,) = pool.stats().lanes[0].holders
    assert holder.startswith(f"{file}:1 in ")


# The rules of CUDA, by a driver out of host memory


def test_record_stream_says_what_it_wants(pool, spec, q):
    with pytest.raises(TypeError, match=r"stream: expected a torch\.cuda\.Stream, got 7"):
        pool.record_stream(pool.acquire(spec, 3, q), 7)


def test_what_a_closed_pool_mapped_is_given_back_to_the_last_byte(make_pool, fake_cuda, spec, granule_spec):
    pool = make_pool()
    for rows in (1, 100, 300):
        pool.acquire(spec, rows, fake_cuda.like(0))
        pool.acquire(granule_spec, rows, fake_cuda.like(1))
    pool.close()
    assert all(driver.is_clean for driver in fake_cuda.drivers)


GROWTH_CALLS = 10  # of a first use: two reservations, then four calls for each of two arenas


@pytest.mark.parametrize("failing", range(1, GROWTH_CALLS + 1))
def test_a_first_use_that_fails_at_any_call_leaks_nothing_and_the_pool_stays_usable(make_pool, fake_cuda, spec, failing):
    pool, driver = make_pool(), fake_cuda.drivers[0]
    before = pool.stats()
    driver.fail_after(failing)
    with pytest.raises(DriverError, match="injected"):
        pool.acquire(spec, 300, fake_cuda.like(0))
    assert driver.is_clean
    assert pool.stats() == before
    outputs = pool.acquire(spec, 300, fake_cuda.like(0))
    assert all(fake_cuda.is_usable(tensor) for tensor in outputs)
    fill(outputs, 3)


def test_a_first_use_makes_exactly_the_calls_that_were_made_to_fail(make_pool, fake_cuda, spec):
    make_pool().acquire(spec, 300, fake_cuda.like(0))
    assert len(fake_cuda.drivers[0].calls) == GROWTH_CALLS


@pytest.mark.parametrize("failing", range(1, 9))
def test_a_growth_that_fails_at_any_call_leaves_held_results_and_the_pool_alone(make_pool, fake_cuda, spec, failing):
    pool, driver = make_pool(), fake_cuda.drivers[0]
    like = fake_cuda.like(0)
    held = pool.acquire(spec, 10, like)
    fill(held, 5)
    pool.acquire(spec, 10, like)
    before, mapped = pool.stats(), driver.mapped_bytes
    driver.fail_after(failing)
    with pytest.raises(DriverError, match="injected"):
        pool.acquire(spec, 5000, like)
    assert pool.stats() == before
    assert driver.mapped_bytes == mapped
    assert not driver.handles
    assert holds(held, 5)
    outputs = pool.acquire(spec, 5000, like)
    assert all(fake_cuda.is_usable(tensor) for tensor in outputs)


def base_of_all(pool, specs, like):
    """Addresses of a result of each spec, all of them held at once and dropped; in order of address."""
    held = [pool.acquire(one, 10, like) for one in specs]
    return sorted(map(addresses, held))


@pytest.mark.parametrize("failing", range(1, 17))
def test_a_wake_that_fails_at_any_call_leaves_the_pool_asleep(make_pool, fake_cuda, spec, granule_spec, failing):
    pool, driver = make_pool(), fake_cuda.drivers[0]
    specs, like = (spec, granule_spec, granule_spec), fake_cuda.like(0)
    base = base_of_all(pool, specs, like)
    mapped = driver.mapped_bytes
    pool.sleep()
    driver.fail_after(failing)
    with pytest.raises(DriverError, match="injected"):
        pool.wake()
    assert driver.mapped_bytes == 0
    assert not driver.handles
    assert pool.stats().asleep
    pool.wake()
    assert driver.mapped_bytes == mapped
    assert base_of_all(pool, specs, like) == base


def interrupt(driver, number, call):
    """Let a signal handler raise when the ``number``-th driver call of ``call`` has taken effect."""
    driver.interrupt_after(number)
    with pytest.raises(KeyboardInterrupt):
        call()
    interrupted = driver.calls[driver.interrupt_at - 1]
    driver.interrupt_at = None
    if interrupted == "create":
        driver.handles.clear()  # this one is lost, as limits.md says


@pytest.mark.parametrize("number", range(1, 9))
def test_a_growth_that_is_interrupted_after_any_call_can_be_made_again(make_pool, fake_cuda, spec, number):
    pool, driver = make_pool(), fake_cuda.drivers[0]
    like = fake_cuda.like(0)
    held = pool.acquire(spec, 10, like)
    fill(held, 5)
    pool.acquire(spec, 10, like)
    interrupt(driver, number, lambda: pool.acquire(spec, 5000, like))
    assert not driver.handles
    assert holds(held, 5)
    assert all(fake_cuda.is_usable(tensor) for tensor in pool.acquire(spec, 10, like))
    outputs = pool.acquire(spec, 5000, like)
    assert all(fake_cuda.is_usable(tensor) for tensor in outputs)
    fill(outputs, 3)
    assert holds(held, 5)
    assert pool.stats().mapped_bytes == driver.mapped_bytes


@pytest.mark.parametrize("number", range(1, 5))
@pytest.mark.parametrize("call", ["trim", "sleep"])
def test_what_is_interrupted_while_it_unmaps_hands_out_mapped_memory_afterwards(
    make_pool, fake_cuda, spec, granule_spec, call, number
):
    pool, driver = make_pool(), fake_cuda.drivers[0]
    like = fake_cuda.like(0)
    for one in (spec, granule_spec):
        pool.acquire(one, 3, like)
        pool.acquire(one, 300, like)
    interrupt(driver, number, getattr(pool, call))
    assert not pool.stats().asleep
    assert not driver.handles
    for rows in (3, 300, 600):
        for one in (spec, granule_spec):
            outputs = pool.acquire(one, rows, like)
            assert all(fake_cuda.is_usable(tensor) for tensor in outputs)
            fill(outputs, 3)
            del outputs
    assert pool.stats().mapped_bytes == driver.mapped_bytes


@pytest.mark.parametrize("number", range(1, 17))
def test_a_wake_that_is_interrupted_after_any_call_can_be_made_again(make_pool, fake_cuda, spec, granule_spec, number):
    pool, driver = make_pool(), fake_cuda.drivers[0]
    specs, like = (spec, granule_spec, granule_spec), fake_cuda.like(0)
    base = base_of_all(pool, specs, like)
    mapped = driver.mapped_bytes
    pool.sleep()
    interrupt(driver, number, pool.wake)
    assert pool.stats().asleep
    assert not driver.handles
    pool.wake()
    assert pool.stats().mapped_bytes == driver.mapped_bytes == mapped
    assert base_of_all(pool, specs, like) == base
    assert all(fake_cuda.is_usable(tensor) for one in specs for tensor in pool.acquire(one, 10, like))


def test_a_full_device_makes_room_in_the_cache_of_torch_and_then_in_idle_slots(
    make_pool, fake_cuda, granule_spec, other_granule_spec
):
    pool = make_pool()
    fake_cuda.drivers[0].memory_bytes = 10 * GRANULE
    base = addresses(pool.acquire(granule_spec, 6, fake_cuda.like(0)))
    outputs = pool.acquire(other_granule_spec, 8, fake_cuda.like(0))
    assert fake_cuda.emptied == 1
    assert fake_cuda.is_usable(outputs.other)
    assert fake_cuda.drivers[0].mapped_bytes == 8 * GRANULE
    del outputs
    assert addresses(pool.acquire(granule_spec, 6, fake_cuda.like(0))) == base


def test_a_full_device_is_a_limit_error_with_figures(make_pool, fake_cuda, granule_spec):
    pool = make_pool()
    fake_cuda.drivers[0].memory_bytes = 10 * GRANULE
    held = pool.acquire(granule_spec, 6, fake_cuda.like(0))
    fill(held, 5)
    before = pool.stats()
    with pytest.raises(PoolLimitError, match="cuda:0: memory") as failure:
        pool.acquire(granule_spec, 6, fake_cuda.like(0))
    assert (failure.value.need, failure.value.limit) == (6 * GRANULE, 10 * GRANULE)
    assert pool.stats() == before
    assert holds(held, 5)
    assert fake_cuda.is_usable(pool.acquire(granule_spec, 4, fake_cuda.like(0)).block)


def test_memory_is_not_taken_from_under_kernels(make_pool, fake_cuda, granule_spec, other_granule_spec):
    pool = make_pool(max_bytes=4 * GRANULE)
    for act in (
        lambda: pool.trim(),
        lambda: pool.sleep() or pool.wake(),
        lambda: pool.acquire(other_granule_spec, 4, fake_cuda.like(0)),
        lambda: pool.close(),
    ):
        pool.acquire(granule_spec, 4, fake_cuda.like(0))
        fake_cuda.synchronized.clear()
        unmaps = fake_cuda.drivers[0].calls.count("unmap")
        act()
        assert fake_cuda.drivers[0].calls.count("unmap") > unmaps
        assert 0 in fake_cuda.synchronized


@pytest.mark.parametrize("call", ["trim", "sleep"])
def test_memory_is_not_taken_away_while_something_captures(make_pool, fake_cuda, spec, call):
    pool = make_pool()
    pool.acquire(spec, 10, fake_cuda.like(0))
    before = pool.stats()
    fake_cuda.capturing = 64
    with pytest.raises(CaptureError, match=call):
        getattr(pool, call)()
    assert pool.stats() == before
    assert fake_cuda.synchronized == []
    fake_cuda.capturing = None
    getattr(pool, call)()


def test_nothing_is_evicted_while_something_captures(make_pool, fake_cuda, granule_spec, other_granule_spec):
    pool = make_pool(max_bytes=4 * GRANULE)
    pool.acquire(granule_spec, 3, fake_cuda.like(0))
    fake_cuda.capturing = 64
    with pytest.raises(PoolLimitError, match="during a capture"):
        pool.acquire(other_granule_spec, 3, fake_cuda.like(0))
    assert fake_cuda.synchronized == []
    fake_cuda.capturing = None
    assert fake_cuda.is_usable(pool.acquire(other_granule_spec, 3, fake_cuda.like(0)).other)


def test_no_cache_is_emptied_while_something_captures(make_pool, fake_cuda, granule_spec):
    pool = make_pool()
    fake_cuda.drivers[0].memory_bytes = 2 * GRANULE
    fake_cuda.capturing = 64
    with pytest.raises(PoolLimitError):
        pool.acquire(granule_spec, 3, fake_cuda.like(0))
    assert fake_cuda.emptied == 0
    assert fake_cuda.synchronized == []


def test_a_closed_pool_gives_its_memory_back_after_the_capture(make_pool, fake_cuda, spec):
    pool, other = make_pool(), make_pool()
    pool.acquire(spec, 10, fake_cuda.like(0))
    fake_cuda.capturing = 64
    pool.close()
    other.acquire(spec, 10, fake_cuda.like(0))
    assert fake_cuda.drivers[0].mapped_bytes > other.stats().mapped_bytes
    assert fake_cuda.synchronized == []
    fake_cuda.capturing = None
    other.acquire(spec, 1000, fake_cuda.like(0))
    assert fake_cuda.drivers[0].mapped_bytes == other.stats().mapped_bytes


@pytest.fixture
def graph_pool(make_pool, fake_cuda):
    """A pool, and a function that acquires inside capture ``number`` on stream 64."""
    pool = make_pool(max_slots=1)

    def acquire_in(number, *args):
        fake_cuda.capture, fake_cuda.stream = number, 64
        try:
            return pool.acquire(*args, fake_cuda.like(0))
        finally:
            fake_cuda.capture, fake_cuda.stream = None, 0

    return pool, acquire_in


def test_captures_have_lanes_of_their_own(graph_pool, fake_cuda, spec):
    pool, acquire_in = graph_pool
    base = {addresses(acquire_in(1, spec, 10)), addresses(acquire_in(2, spec, 10))}
    base.add(addresses(pool.acquire(spec, 10, fake_cuda.like(0))))
    fake_cuda.stream = 64
    base.add(addresses(pool.acquire(spec, 10, fake_cuda.like(0))))
    assert len(base) == 4
    assert pool.stats().pinned_slots == 2


def test_of_what_graphs_leave_the_slot_that_fits_best_serves(graph_pool, granule_spec, fake_cuda):
    pool, acquire_in = graph_pool
    small, middle, large = (addresses(acquire_in(number, granule_spec, 10 * number)) for number in (1, 2, 3))
    for number in (3, 1, 2):
        fake_cuda.end_graph(number)
    fits = pool.acquire(granule_spec, 15, fake_cuda.like(0))
    fake_cuda.stream = 64
    grows = pool.acquire(granule_spec, 40, fake_cuda.like(0))
    assert (addresses(fits), addresses(grows)) == (middle, large)
    fake_cuda.stream = 65
    assert addresses(pool.acquire(granule_spec, 1, fake_cuda.like(0))) == small


def test_max_slots_does_not_count_in_a_capture(graph_pool, fake_cuda, spec):
    pool, acquire_in = graph_pool
    held = [acquire_in(1, spec, 10) for _ in range(12)]
    assert len({addresses(outputs) for outputs in held}) == 12
    assert pool.stats().spills == 0


def test_layers_of_one_capture_share_a_slot(graph_pool, spec):
    pool, acquire_in = graph_pool
    assert len({addresses(acquire_in(1, spec, 10)) for _ in range(61)}) == 1
    assert pool.stats().slots == 1


def test_a_pinned_slot_keeps_its_memory_until_its_graph_is_gone(graph_pool, fake_cuda, spec, granule_spec):
    pool, acquire_in = graph_pool
    base = addresses(acquire_in(1, spec, 10))
    pool.trim()
    pool.trim()
    assert pool.stats().mapped_bytes == fake_cuda.drivers[0].mapped_bytes == 2 * GRANULE
    assert addresses(pool.acquire(spec, 10, fake_cuda.like(0))) != base
    pool.trim()
    fake_cuda.end_graph(1)
    assert pool.stats().pinned_slots == 0
    pool.acquire(granule_spec, 1, fake_cuda.like(0))
    assert pool.stats().free_slots == 1
    pool.trim()
    assert pool.stats().mapped_bytes == 0


def test_the_slot_of_a_graph_that_is_gone_serves_again_after_the_device_is_synchronised(graph_pool, fake_cuda, spec):
    pool, acquire_in = graph_pool
    base = addresses(acquire_in(1, spec, 10))
    fake_cuda.end_graph(1)
    fake_cuda.synchronized.clear()
    assert addresses(pool.acquire(spec, 10, fake_cuda.like(0))) == base
    assert fake_cuda.synchronized == [0]
    assert pool.stats().slots == 1


def test_the_slot_of_a_graph_that_is_gone_does_not_serve_while_it_may_still_be_written(graph_pool, fake_cuda, spec):
    pool, acquire_in = graph_pool
    base = addresses(acquire_in(1, spec, 10))
    fake_cuda.end_graph(1)
    fake_cuda.synchronized.clear()
    fake_cuda.capturing = 64
    assert addresses(acquire_in(2, spec, 10)) != base
    assert addresses(pool.acquire(spec, 10, fake_cuda.like(0))) != base
    assert fake_cuda.synchronized == []


def test_a_result_held_after_its_graph_is_gone_is_not_given_away(graph_pool, fake_cuda, spec, granule_spec):
    pool, acquire_in = graph_pool
    held = acquire_in(1, spec, 10)
    fill(held, 5)
    fake_cuda.end_graph(1)
    pool.acquire(granule_spec, 1, fake_cuda.like(0))
    for number in (2, 3):
        fill(acquire_in(number, spec, 10), 9)
    fill(pool.acquire(spec, 10, fake_cuda.like(0)), 9)
    assert holds(held, 5)


def test_sleep_takes_the_memory_of_graphs_whose_results_are_held(graph_pool, fake_cuda, spec):
    pool, acquire_in = graph_pool
    held = acquire_in(1, spec, 10)
    base = addresses(held)
    pool.sleep()
    assert fake_cuda.drivers[0].mapped_bytes == 0
    pool.wake()
    assert all(fake_cuda.is_usable(tensor) for tensor in held)
    assert addresses(held) == base


def test_a_graph_outlives_its_pool(graph_pool, make_pool, fake_cuda, spec):
    pool, acquire_in = graph_pool
    acquire_in(1, spec, 10)
    pool.close()
    other = make_pool()
    other.acquire(spec, 1, fake_cuda.like(0))
    assert fake_cuda.drivers[0].mapped_bytes == 2 * GRANULE + other.stats().mapped_bytes
    fake_cuda.end_graph(1)
    other.acquire(spec, 1000, fake_cuda.like(0))
    assert fake_cuda.drivers[0].mapped_bytes == other.stats().mapped_bytes


def test_a_failed_growth_inside_a_capture_leaves_the_slot_usable_there(graph_pool, fake_cuda, spec):
    pool, acquire_in = graph_pool
    base = addresses(acquire_in(1, spec, 10))
    fake_cuda.drivers[0].fail_after(2)
    with pytest.raises(DriverError):
        acquire_in(1, spec, 1000)
    assert fake_cuda.emptied == 0
    assert addresses(acquire_in(1, spec, 1000)) == base
    assert pool.stats().pinned_slots == 1


def test_64_lanes_on_8_devices_are_held_by_the_address_budget(make_pool, fake_cuda, spec, monkeypatch):
    pool = make_pool()
    budget = ADDRESS_BUDGET
    monkeypatch.setattr(budget, "total", budget.taken + 2**34)  # half of what 512 slots of 64 MiB would take
    held = []
    for lane in range(64):
        fake_cuda.stream = 64 * lane
        for index in range(8):
            held.append(pool.acquire(spec, 10, fake_cuda.like(index)))
            assert fake_cuda.is_usable(held[-1].out, index)
    stats = pool.stats()
    assert len(stats.lanes) == stats.slots == 512
    assert stats.reserved_bytes <= 2**34
    assert 0 < stats.short_reservations < 512
    assert stats.mapped_bytes == 512 * 2 * GRANULE


def test_too_little_address_space_is_a_limit_error_or_comes_from_idle_lanes(make_pool, fake_cuda, spec, monkeypatch):
    pool = make_pool()
    budget = ADDRESS_BUDGET
    monkeypatch.setattr(budget, "total", budget.taken + 4 * GRANULE)
    held = []

    def hold_more():
        for fake_cuda.stream in range(64, 640, 64):
            held.append(pool.acquire(spec, 10, fake_cuda.like(0)))

    with pytest.raises(PoolLimitError, match="bytes"):
        hold_more()
    assert len(held) == 2
    held.clear()
    fake_cuda.stream = 0
    assert fake_cuda.is_usable(pool.acquire(spec, 10, fake_cuda.like(0)).out)


def test_memory_reserved_beside_held_results_does_not_lift_max_slots(make_pool, spec, q):
    pool = make_pool(max_slots=1)
    held = pool.acquire(spec, 10, q)
    pool.reserve(spec, 10, q)
    spilled = pool.acquire(spec, 10, q)
    assert pool.stats().spills == 1
    assert [lane.slots for lane in pool.stats().lanes] == [1]
    del held, spilled


def test_trim_leaves_a_sleeping_pool_as_it_is(make_pool, spec, q):
    pool = make_pool()
    base = pool.acquire(spec, 1000, q).out.data_ptr()
    mapped = pool.stats().mapped_bytes
    pool.sleep()
    for _ in range(3):
        assert pool.trim() == 0
    pool.wake()
    assert pool.stats().mapped_bytes == mapped
    assert pool.acquire(spec, 1000, q).out.data_ptr() == base


@pytest.mark.parametrize(
    ("like", "text"),
    [("foo", "like: expected a device, got 'foo'"), ("cuda", "like: expected a device that is here, got cuda")],
)
def test_reserve_names_a_device_that_is_not_there(make_pool, spec, like, text):
    if like == "cuda" and torch.cuda.is_available():
        pytest.skip("CUDA is here")
    with pytest.raises(ValueError, match=text):
        make_pool().reserve(spec, 1, like)

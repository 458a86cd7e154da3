"""Slots: all arenas of a spec grow, shrink, sleep and wake together, or nothing changes."""

from __future__ import annotations

import pytest
import torch

from bufpool import BufpoolError, OutputSpec, PoolLimitError, host_memory
from bufpool.arena import ADDRESS_BUDGET, round_up
from bufpool.driver import DeviceOutOfMemoryError
from bufpool.errors import DriverError
from bufpool.slot import LEAST_RESERVATION_BYTES, Slot

CPU = torch.device("cpu")
CUDA = torch.device("cuda", 0)
PAGE = host_memory.PAGE_BYTES
GRANULE = 64 * 1024


@pytest.fixture
def triple():
    """Three tensors of 16384, 256 and 256 bytes a row."""
    return OutputSpec(out=((64, 128), torch.bfloat16), max_logits=((64,), torch.float32), lse=((64,), torch.float32))


@pytest.fixture
def make_slot():
    slots = []

    def make(spec, device=CPU, kind="host", rows=1):
        slots.append(Slot(spec, device, kind, rows))
        return slots[-1]

    yield make
    for slot in slots:
        # A failed test still holds its results, and a test may have released its slot itself.
        if slot.reserved_bytes and not slot.is_live():
            slot.release()


@pytest.fixture
def device_slot(fake_cuda, make_slot, triple):
    yield make_slot(triple, CUDA, "cuda")
    fake_cuda.drivers[0].fail_at = None


@pytest.mark.parametrize("kind", ["host", "torch"])
def test_a_slot_grows_all_its_arenas_to_the_rows(make_slot, triple, kind):
    slot = make_slot(triple, kind=kind)
    assert (slot.capacity, slot.mapped_bytes) == (0, 0)
    slot.grow(10)
    assert slot.capacity >= 10
    assert slot.mapped_bytes == slot.bytes_for(10) >= triple.nbytes(10)
    outputs = slot.handout.take(10)
    assert tuple(tensor.data_ptr() for tensor in outputs) == slot.addresses
    assert slot.rows == slot.high_water_rows == 10


def test_mapped_bytes_are_the_rows_rounded_up_for_each_arena(make_slot, triple):
    slot = make_slot(triple)
    for rows in (1, 7, 16, 17, 100):
        slot.grow(rows)
        assert slot.mapped_bytes == sum(round_up(rows * row_bytes, PAGE) for row_bytes in triple.row_bytes)


def test_addresses_stay_while_a_slot_grows_shrinks_sleeps_and_wakes(make_slot, triple):
    slot = make_slot(triple)
    addresses = slot.addresses
    slot.grow(1)
    slot.grow(1000)
    slot.shrink(3)
    slot.grow(5000)
    slot.sleep()
    slot.wake()
    assert slot.addresses == addresses
    assert slot.capacity >= 5000


def test_arenas_of_a_slot_together_reserve_at_most_the_memory_of_the_device(make_slot, triple):
    slot = make_slot(triple)
    assert slot.reserved_bytes <= host_memory.physical_bytes()
    shares = [arena.reserved_bytes for arena in slot.arenas]
    assert shares[1] == shares[2]
    assert shares[0] // shares[1] == 64


def test_a_slot_gives_its_address_space_back(make_slot, triple):
    taken = ADDRESS_BUDGET.taken
    slot = make_slot(triple)
    assert ADDRESS_BUDGET.taken == taken + slot.granted_bytes > taken
    slot.release()
    assert ADDRESS_BUDGET.taken == taken


def test_rows_beyond_the_reservation_are_a_limit_error_with_figures(make_slot, triple):
    slot = make_slot(triple)
    rows = slot.reserved_bytes // triple.row_nbytes + 1000
    with pytest.raises(PoolLimitError) as failure:
        slot.check_reservation(rows)
    assert (failure.value.need, failure.value.have, failure.value.limit) == (triple.nbytes(rows), 0, slot.reserved_bytes)
    slot.check_reservation(1000)


def test_rows_beyond_the_address_space_are_a_limit_error_and_take_nothing(triple):
    taken = ADDRESS_BUDGET.taken
    for rows in (2**40, 2**80):
        with pytest.raises(PoolLimitError, match="bytes"):
            Slot(triple, CPU, "host", rows)
    assert ADDRESS_BUDGET.taken == taken


def test_where_the_system_gives_no_range_the_reservation_is_halved_and_shown(make_slot, triple, monkeypatch):
    real, asked = host_memory.reserve, []

    def reserve(nbytes):
        asked.append(nbytes)
        return None if nbytes > 2**30 else real(nbytes)

    monkeypatch.setattr(host_memory, "reserve", reserve)
    taken = ADDRESS_BUDGET.taken
    slot = make_slot(triple)
    assert slot.is_short
    assert 2**29 <= slot.reserved_bytes < 2**31
    assert ADDRESS_BUDGET.taken == taken + slot.granted_bytes
    slot.grow(1000)
    assert slot.handout.take(1000).lse.shape == (1000, 64)


def test_where_the_system_gives_nothing_at_all_it_is_a_limit_error(triple, monkeypatch):
    asked = []
    monkeypatch.setattr(host_memory, "reserve", lambda nbytes: asked.append(nbytes))
    taken = ADDRESS_BUDGET.taken
    with pytest.raises(PoolLimitError, match="address range for 10 rows"):
        Slot(triple, CPU, "host", 10)
    assert ADDRESS_BUDGET.taken == taken
    assert LEAST_RESERVATION_BYTES // 2 < min(asked) <= LEAST_RESERVATION_BYTES


def test_shrinking_keeps_the_rows_that_are_asked_for(make_slot, triple):
    slot = make_slot(triple)
    slot.grow(1000)
    outputs = slot.handout.take(1000)
    outputs.out[:10].fill_(3)
    former = slot.mapped_bytes
    freed = slot.shrink(10)
    assert slot.mapped_bytes == former - freed == slot.bytes_for(10)
    assert bool((outputs.out[:10] == 3).all())
    assert slot.high_water_rows == 10


def test_sleep_gives_all_memory_back_and_wake_maps_as_much_again(make_slot, triple):
    slot = make_slot(triple)
    slot.grow(1000)
    mapped = slot.mapped_bytes
    slot.sleep()
    assert (slot.mapped_bytes, slot.capacity) == (0, 0)
    assert slot.handout.take(1) is None
    slot.wake()
    slot.wake()
    assert slot.mapped_bytes == mapped
    assert slot.handout.take(1000) is not None


def test_an_address_belongs_to_a_slot_in_all_of_its_range(make_slot, triple):
    slot = make_slot(triple)
    slot.grow(16)
    assert slot.has_address(slot.addresses[0])
    assert slot.has_address(slot.addresses[2] + PAGE - 1)
    assert slot.has_address(slot.addresses[0] + slot.arenas[0].mapped_bytes)
    assert not slot.has_address(slot.addresses[0] + slot.arenas[0].reserved_bytes)
    assert not slot.has_address(0)


def test_a_device_that_takes_no_given_memory_is_an_error_that_leaves_nothing(triple):
    taken = ADDRESS_BUDGET.taken
    with pytest.raises(BufpoolError, match="meta: expected a device"):
        Slot(triple, torch.device("meta"), "host", 1)
    assert ADDRESS_BUDGET.taken == taken


def test_a_torch_slot_moves_and_hands_out_where_it_is_now(make_slot, triple):
    slot = make_slot(triple, kind="torch")
    assert not slot.is_stable
    slot.grow(1)
    slot.handout.take(1)
    slot.grow(100_000)
    outputs = slot.handout.take(100_000)
    assert tuple(tensor.data_ptr() for tensor in outputs) == slot.addresses
    outputs.lse.fill_(4)
    assert bool((outputs.lse == 4).all())


# With a driver that fails


def growth_calls(fake_cuda, slot, rows):
    driver = fake_cuda.drivers[0]
    before = len(driver.calls)
    slot.grow(rows)
    return len(driver.calls) - before


def test_a_growth_of_three_arenas_is_twelve_calls(fake_cuda, device_slot):
    assert growth_calls(fake_cuda, device_slot, 1000) == 12


@pytest.mark.parametrize("failure", [DriverError("no"), DeviceOutOfMemoryError("full", 1)], ids=["error", "memory"])
@pytest.mark.parametrize("failing", range(1, 13))
def test_a_growth_that_fails_at_any_call_leaves_the_slot_as_it_was(fake_cuda, device_slot, failing, failure):
    driver = fake_cuda.drivers[0]
    device_slot.grow(10)
    outputs = device_slot.handout.take(10)
    for tensor in outputs:
        tensor.fill_(7)
    former = [arena.mapped_bytes for arena in device_slot.arenas]
    driver.fail_after(failing, failure)
    with pytest.raises(DriverError):
        device_slot.grow(1000)
    driver.fail_at = None
    assert [arena.mapped_bytes for arena in device_slot.arenas] == former
    assert driver.mapped_bytes == sum(former)
    assert not driver.handles
    assert device_slot.capacity < 1000
    assert all(fake_cuda.is_usable(tensor) and bool((tensor == 7).all()) for tensor in outputs)
    del outputs, tensor
    device_slot.grow(1000)
    assert all(fake_cuda.is_usable(tensor) for tensor in device_slot.handout.take(1000))


@pytest.mark.parametrize("failing", range(1, 13))
def test_a_wake_that_fails_at_any_call_leaves_the_slot_asleep(fake_cuda, device_slot, failing):
    driver = fake_cuda.drivers[0]
    device_slot.grow(1000)
    mapped, addresses = device_slot.mapped_bytes, device_slot.addresses
    device_slot.sleep()
    assert driver.mapped_bytes == 0
    driver.fail_after(failing)
    with pytest.raises(DriverError):
        device_slot.wake()
    assert (driver.mapped_bytes, device_slot.mapped_bytes, device_slot.capacity) == (0, 0, 0)
    assert not driver.handles
    device_slot.wake()
    assert (device_slot.mapped_bytes, device_slot.addresses) == (mapped, addresses)


@pytest.mark.parametrize("failing", [1, 2, 3])
def test_a_reservation_that_fails_at_any_arena_leaks_nothing(fake_cuda, triple, failing):
    driver, taken = fake_cuda.drivers[0], ADDRESS_BUDGET.taken
    driver.fail_after(failing)
    with pytest.raises(DriverError, match="injected"):
        Slot(triple, CUDA, "cuda", 1)
    assert driver.is_clean
    assert ADDRESS_BUDGET.taken == taken


def test_a_released_slot_leaves_the_driver_clean(fake_cuda, triple):
    slot = Slot(triple, CUDA, "cuda", 1)
    for rows in (1, 1000, 2000):
        slot.grow(rows)
    slot.shrink(10)
    slot.release()
    assert fake_cuda.drivers[0].is_clean

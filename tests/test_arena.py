"""Arenas: the address stays, whole granules are mapped, and a failed driver call changes nothing."""

from __future__ import annotations

import ctypes
import threading

import pytest
import torch

from bufpool import PoolLimitError, host_memory
from bufpool.arena import AddressBudget, CudaArena, HostArena, TorchArena, round_down, round_up
from bufpool.driver import DeviceOutOfMemoryError
from bufpool.errors import DriverError

GRANULE = 64 * 1024
PAGE = host_memory.PAGE_BYTES


@pytest.fixture
def driver(make_driver):
    return make_driver(GRANULE)


@pytest.fixture
def arena(driver):
    arena = CudaArena(driver, 64 * GRANULE)
    yield arena
    driver.fail_at = None
    arena.release()
    assert driver.is_clean


@pytest.fixture
def host_arena():
    arena = HostArena.reserve(2**30)
    yield arena
    arena.release()


def poke(address, value):
    ctypes.c_uint8.from_address(address).value = value


def peek(address):
    return ctypes.c_uint8.from_address(address).value


@pytest.mark.parametrize(
    ("nbytes", "up", "down"), [(0, 0, 0), (1, 8, 0), (7, 8, 0), (8, 8, 8), (9, 16, 8), (2**50 + 1, 2**50 + 8, 2**50)]
)
def test_rounding_is_to_whole_granules(nbytes, up, down):
    assert round_up(nbytes, 8) == up
    assert round_down(nbytes, 8) == down


# CUDA


def test_a_reservation_has_no_memory_behind_it(driver, arena):
    assert arena.reserved_bytes == 64 * GRANULE
    assert arena.mapped_bytes == driver.used_bytes == 0
    assert driver.calls == ["address_reserve"]


def test_growth_maps_only_the_difference_in_whole_granules(driver, arena):
    address = arena.address
    arena.grow(1)
    assert arena.mapped_bytes == driver.mapped_bytes == GRANULE
    arena.grow(GRANULE)
    assert driver.calls.count("create") == 1
    arena.grow(5 * GRANULE + 1)
    assert arena.mapped_bytes == driver.mapped_bytes == 6 * GRANULE
    assert driver.calls.count("create") == 2
    assert sorted(nbytes for nbytes, _ in driver.mappings.values()) == [GRANULE, 5 * GRANULE]
    assert arena.address == address
    assert driver.is_usable(address, 6 * GRANULE)
    assert not driver.handles  # the mapping alone keeps the memory


def test_growth_never_gives_memory_back(driver, arena):
    arena.grow(3 * GRANULE)
    arena.grow(1)
    assert driver.mapped_bytes == 3 * GRANULE
    assert arena.bytes_for(1) == 3 * GRANULE
    assert arena.bytes_for(3 * GRANULE + 1) == 4 * GRANULE


def test_a_thousand_growths_hold_no_more_than_the_last_size(driver):
    arena = CudaArena(driver, 1000 * GRANULE)
    for step in range(1, 1001):
        arena.grow(step * GRANULE)
        assert driver.used_bytes == step * GRANULE
    arena.release()
    assert driver.is_clean


def test_shrinking_unmaps_whole_extents_from_the_end(driver, arena):
    for granules in (2, 3, 6):
        arena.grow(granules * GRANULE)
    poke(arena.address, 5)
    arena.shrink(2 * GRANULE + 1)  # inside the second extent, which therefore stays
    assert arena.mapped_bytes == driver.mapped_bytes == 3 * GRANULE
    assert driver.is_usable(arena.address, 3 * GRANULE)
    arena.shrink(1)
    assert arena.mapped_bytes == driver.mapped_bytes == 2 * GRANULE
    assert peek(arena.address) == 5
    arena.shrink(0)
    assert arena.mapped_bytes == driver.mapped_bytes == 0


def test_memory_given_back_is_mapped_again_at_the_same_address(driver, arena):
    address = arena.address
    for _ in range(3):
        arena.grow(4 * GRANULE)
        assert arena.address == address
        assert driver.is_usable(address, 4 * GRANULE)
        arena.shrink(0)


def test_release_gives_everything_back_once(driver):
    arena = CudaArena(driver, 8 * GRANULE)
    arena.grow(GRANULE)
    arena.grow(3 * GRANULE)
    arena.release()
    arena.release()
    assert driver.is_clean
    assert driver.calls.count("address_free") == 1
    assert (arena.reserved_bytes, arena.mapped_bytes) == (0, 0)


@pytest.mark.parametrize("wanted", [1, GRANULE - 1, GRANULE, 3 * GRANULE - 1])
def test_a_reservation_is_whole_granules_and_at_least_one(driver, wanted):
    arena = CudaArena(driver, wanted)
    assert arena.reserved_bytes == max(GRANULE, wanted // GRANULE * GRANULE)
    arena.release()


GROWTH_CALLS = ["create", "map", "set_access", "release"]


@pytest.mark.parametrize("failure", [DriverError("no"), DeviceOutOfMemoryError("full", 5)], ids=["error", "memory"])
@pytest.mark.parametrize("failing", range(1, len(GROWTH_CALLS) + 1))
def test_a_growth_that_fails_at_any_call_leaves_all_as_it_was(driver, arena, failing, failure):
    arena.grow(2 * GRANULE)
    poke(arena.address + 2 * GRANULE - 1, 9)
    driver.fail_after(failing, failure)
    with pytest.raises(DriverError) as caught:
        arena.grow(7 * GRANULE)
    assert caught.value is failure
    assert arena.mapped_bytes == driver.mapped_bytes == 2 * GRANULE
    assert driver.is_usable(arena.address, 2 * GRANULE)
    assert peek(arena.address + 2 * GRANULE - 1) == 9
    assert not driver.handles
    arena.grow(7 * GRANULE)
    assert driver.is_usable(arena.address, 7 * GRANULE)
    assert peek(arena.address + 2 * GRANULE - 1) == 9


def test_a_growth_makes_exactly_the_calls_that_were_made_to_fail(driver, arena):
    arena.grow(GRANULE)
    assert driver.calls[1:] == GROWTH_CALLS


def test_a_shrink_that_fails_keeps_what_is_still_mapped(driver, arena):
    for granules in (1, 2, 3):
        arena.grow(granules * GRANULE)
    driver.fail_after(2)
    with pytest.raises(DriverError):
        arena.shrink(0)
    assert arena.mapped_bytes == driver.mapped_bytes == 2 * GRANULE
    arena.shrink(0)
    assert driver.mapped_bytes == 0


# Host


def test_a_host_arena_commits_what_is_touched_and_counts_what_was_asked_for(host_arena):
    address = host_arena.address
    host_arena.grow(1)
    assert host_arena.mapped_bytes == PAGE
    host_arena.grow(2**29 + 1)
    assert host_arena.mapped_bytes == 2**29 + PAGE
    assert host_arena.address == address
    poke(address + 2**29, 3)
    assert peek(address + 2**29) == 3


def test_a_host_arena_shrinks_to_whole_pages_and_forgets_what_was_behind(host_arena):
    host_arena.grow(8 * PAGE)
    for page in range(8):
        poke(host_arena.address + page * PAGE, page + 1)
    host_arena.shrink(2 * PAGE + 1)
    assert host_arena.mapped_bytes == 3 * PAGE
    assert [peek(host_arena.address + page * PAGE) for page in range(8)] == [1, 2, 3, 0, 0, 0, 0, 0]


def test_a_host_arena_releases_once(host_arena):
    host_arena.grow(PAGE)
    host_arena.release()
    host_arena.release()
    assert (host_arena.reserved_bytes, host_arena.mapped_bytes) == (0, 0)


def test_a_host_range_beyond_the_address_space_is_none():
    assert HostArena.reserve(2**62) is None


# Plain torch


def test_a_torch_arena_counts_as_much_reserved_as_mapped_and_is_not_stable():
    arena = TorchArena(torch.device("cpu"))
    assert not arena.is_stable
    arena.grow(1000)
    assert arena.mapped_bytes == arena.reserved_bytes == 1024
    assert arena.address % 256 == 0
    poke(arena.address + 1023, 7)
    address = arena.address
    arena.grow(900)
    assert arena.address == address
    assert peek(arena.address + 1023) == 7


def test_a_torch_arena_gives_back_all_or_nothing():
    arena = TorchArena(torch.device("cpu"))
    arena.grow(4096)
    arena.shrink(256)
    assert arena.mapped_bytes == 4096
    arena.shrink(0)
    assert (arena.mapped_bytes, arena.reserved_bytes) == (0, 0)


def test_a_torch_arena_that_cannot_grow_is_as_before():
    arena = TorchArena(torch.device("cpu"))
    arena.grow(4096)
    address = arena.address
    with pytest.raises(DeviceOutOfMemoryError) as failure:
        arena.grow(2**62)
    assert failure.value.nbytes == 2**62
    assert (arena.address, arena.mapped_bytes) == (address, 4096)


# Address space


def test_while_there_is_plenty_each_gets_what_it_asks_for():
    budget = AddressBudget(2**46)
    assert budget.take(2**37, 1) == 2**37
    assert budget.taken == 2**37


def test_64_lanes_on_8_devices_of_139_gib_find_room_and_the_total_is_held():
    budget = AddressBudget(2**46)
    granted = [budget.take(139 * 2**30, 64 * 2**20) for _ in range(64 * 8)]
    assert sum(granted) == budget.taken <= budget.total
    assert granted[0] == 139 * 2**30
    assert min(granted) >= 16 * 2**30


def test_nine_hundred_slots_still_find_what_they_need():
    budget = AddressBudget(2**46)
    granted = [budget.take(139 * 2**30, 64 * 2**20) for _ in range(900)]
    assert budget.taken == sum(granted) <= budget.total
    assert min(granted) >= 64 * 2**20


def test_too_little_address_space_is_an_error_with_figures_and_takes_nothing():
    budget = AddressBudget(1000)
    assert budget.take(600, 600) == 600
    with pytest.raises(PoolLimitError) as failure:
        budget.take(2000, 401)
    assert (failure.value.need, failure.value.have, failure.value.limit) == (401, 600, 1000)
    assert budget.taken == 600
    assert budget.take(2000, 400) == 400
    budget.give_back(600)
    assert budget.take(600, 600) == 600


def test_the_budget_is_held_among_threads():
    budget = AddressBudget(2**30)
    barrier = threading.Barrier(8)

    def work():
        barrier.wait()
        for _ in range(2000):
            budget.give_back(budget.take(4096, 4096))

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert budget.taken == 0

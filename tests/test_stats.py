"""stats() and report(): the numbers add up, and say what serves."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from bufpool import OutputSpec, host_memory, stats

PAGE = host_memory.PAGE_BYTES


@pytest.fixture
def page_spec():
    """One page a row."""
    return OutputSpec(page=((PAGE,), torch.uint8))


def test_a_pool_that_did_nothing_has_nothing(pool):
    stats = pool.stats()
    assert stats.arena == ""
    assert stats.lanes == ()
    assert not any(value for value in dataclasses.asdict(stats).values())


def test_each_call_is_counted_once(make_pool, page_spec, q):
    pool = make_pool(max_slots=2)
    pool.acquire(page_spec, 4, q)  # adds a slot and maps
    pool.acquire(page_spec, 4, q)  # hit
    first = pool.acquire(page_spec, 3, q)  # hit
    second = pool.acquire(page_spec, 4, q)  # rotates: adds a slot and maps
    spilled = pool.acquire(page_spec, 4, q)
    del second
    second = pool.acquire(page_spec, 4, q)  # hit
    pool.acquire(page_spec, 0, q)  # no rows: a hit
    del first, second, spilled
    stats = pool.stats()
    assert (stats.acquires, stats.hits, stats.grows, stats.rotations, stats.spills) == (7, 4, 2, 1, 1)
    assert stats.acquires == stats.hits + stats.grows + stats.spills


def test_a_growth_of_a_slot_is_no_hit(pool, page_spec, q):
    for rows in (1, 2, 2, 1, 3):
        pool.acquire(page_spec, rows, q)
    stats = pool.stats()
    assert (stats.acquires, stats.hits, stats.grows, stats.slots) == (5, 2, 3, 1)


def test_bytes_in_use_needed_and_mapped_are_told_apart(pool, spec, q):
    pool.acquire(spec, 100, q)
    held = pool.acquire(spec, 10, q)
    stats = pool.stats()
    assert stats.in_use_bytes == 10 * spec.row_nbytes
    assert stats.needed_bytes == 100 * spec.row_nbytes
    assert stats.mapped_bytes == -(-100 * 1024 // PAGE) * PAGE + PAGE
    assert stats.live_slots == 1
    del held
    assert pool.stats().in_use_bytes == 0


def test_reserved_address_space_is_never_counted_as_memory(pool, spec, q):
    pool.acquire(spec, 1, q)
    stats = pool.stats()
    assert stats.reserved_bytes > 2**30
    assert stats.mapped_bytes == stats.peak_mapped_bytes == 2 * PAGE
    assert stats.needed_bytes < 2 * PAGE


def test_the_peak_stays_until_it_is_reset(pool, page_spec, q):
    pool.acquire(page_spec, 10, q)
    pool.trim()
    pool.acquire(page_spec, 4, q)
    assert pool.stats().peak_mapped_bytes == pool.stats().lanes[0].peak_mapped_bytes == 10 * PAGE
    pool.reset_peak_stats()
    assert pool.stats().peak_mapped_bytes == pool.stats().lanes[0].peak_mapped_bytes == 4 * PAGE
    pool.acquire(page_spec, 5, q)
    assert pool.stats().peak_mapped_bytes == 5 * PAGE


def test_lanes_add_up_to_the_pool(pool, spec, page_spec, q):
    held = [pool.acquire(spec, rows, q) for rows in (1, 20, 300)] + [pool.acquire(page_spec, 7, q)]
    pool.reserve(spec, 128, q)
    stats = pool.stats()
    assert len(stats.lanes) == 2
    for name in ("acquires", "hits", "rotations", "spills", "live_slots", "in_use_bytes", "pinned_slots"):
        assert getattr(stats, name) == sum(getattr(lane, name) for lane in stats.lanes), name
    assert stats.free_slots == 1
    assert stats.slots == sum(lane.slots for lane in stats.lanes) + 1
    assert stats.mapped_bytes - sum(lane.mapped_bytes for lane in stats.lanes) == 128 * spec.row_nbytes
    del held


def test_counts_of_lanes_that_are_gone_stay_in_the_sum(pool, spec, page_spec, q):
    for _ in range(5):
        pool.acquire(page_spec, 3, q)
    pool.trim()
    pool.acquire(spec, 3, q)
    pool.trim()
    stats = pool.stats()
    assert [lane.spec for lane in stats.lanes] == [spec]
    assert (stats.acquires, stats.hits, stats.grows) == (6, 4, 2)


def test_a_lane_names_its_home_its_spec_and_its_arena(pool, spec, q):
    pool.acquire(spec, 3, q)
    (lane,) = pool.stats().lanes
    assert (lane.device, lane.stream, lane.capture, lane.spec, lane.arena) == ("cpu", 0, None, spec, "host")


def test_numbers_are_a_snapshot_that_cannot_be_changed(pool, spec, q):
    stats = pool.stats()
    pool.acquire(spec, 3, q)
    assert stats.acquires == 0
    with pytest.raises(dataclasses.FrozenInstanceError):
        stats.acquires = 3


def hold_here(pool, spec, q):
    return pool.acquire(spec, 3, q)


def test_a_traced_pool_says_who_holds(make_pool, spec, q):
    pool = make_pool(trace=True)
    held = hold_here(pool, spec, q)
    hold_here(pool, spec, q)
    line = hold_here.__code__.co_firstlineno + 1
    assert pool.stats().lanes[0].holders == (f"{__file__}:{line} in hold_here",)
    assert f"held: {__file__}:{line} in hold_here" in pool.report()
    del held
    assert pool.stats().lanes[0].holders == ()


def test_a_traced_pool_counts_as_another_one_does(make_pool, spec, q):
    counts = []
    for trace in (False, True):
        pool = make_pool(trace=trace)
        held = [pool.acquire(spec, rows, q) for rows in (1, 10, 100)]
        del held
        for rows in (5, 50, 500):
            pool.acquire(spec, rows, q)
        stats = pool.stats()
        counts.append((stats.acquires, stats.hits, stats.grows, stats.slots, stats.mapped_bytes))
    assert counts[0] == counts[1]


def test_an_untraced_pool_remembers_nobody(pool, spec, q):
    held = hold_here(pool, spec, q)
    assert pool.stats().lanes[0].holders == ()
    del held


def test_the_report_is_a_table_of_the_numbers(make_pool, spec, q):
    pool = make_pool(max_slots=1)
    held = pool.acquire(spec, 1024, q)
    pool.acquire(spec, 1, q)
    heads, lane, total, rest = pool.report().splitlines()
    assert heads.split()[:7] == ["lane", "arena", "acquires", "hits", "grows", "rotations", "spills"]
    assert lane.startswith("cpu (out, lse)")
    assert lane.split()[3:] == total.split()[1:]
    assert "1.03 MiB" in lane
    assert total.startswith("sum")
    assert "reserved address space" in rest
    assert "asleep" not in rest
    del held


def test_sizes_read_well():
    assert [stats._size(nbytes) for nbytes in (0, 4096, 2**20, 2**33 - 1, 2**33)] == [
        "0.0 KiB", "4.0 KiB", "1.00 MiB", "8192.00 MiB", "8.00 GiB"
    ]  # fmt: skip


def test_the_report_says_that_a_pool_sleeps(pool, spec, q):
    pool.acquire(spec, 1, q)
    pool.sleep()
    assert "asleep" in pool.report()

"""Threads, locks and finalizers: nothing is lost, nothing is handed out twice, nothing waits for ever."""

from __future__ import annotations

import contextlib
import gc
import itertools
import logging
import sys
import threading
import weakref

import pytest
import torch

from bufpool import BufpoolError, OutputPool, OutputSpec, process

pytestmark = pytest.mark.timeout(60, method="thread")


@pytest.fixture(autouse=True)
def _switch_often():
    former = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    yield
    sys.setswitchinterval(former)


@pytest.fixture
def collect_often():
    """The collector runs at nearly every new container."""
    gc.collect()
    former = gc.get_threshold()
    gc.set_threshold(1, 2, 2)
    yield
    gc.set_threshold(*former)
    gc.collect()


def run_threads(count, work):
    """Run ``work(number)`` in threads that start together; raise what one of them raised."""
    barrier = threading.Barrier(count)
    errors = []

    def body(number):
        try:
            barrier.wait()
            work(number)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=body, args=(number,), daemon=True) for number in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(50)
        assert not thread.is_alive(), "a thread waits for ever"
    if errors:
        raise errors[0]


def ranges(results):
    return [
        (tensor.data_ptr(), tensor.data_ptr() + tensor.numel() * tensor.itemsize)
        for outputs in results
        for tensor in outputs
    ]


def assert_disjoint(results):
    found = sorted(ranges(results))
    for (_, end), (start, _) in itertools.pairwise(found):
        assert end <= start


def test_16_threads_at_first_use_make_one_lane_and_a_slot_for_each_held_result(make_pool, spec, q):
    for _ in range(10):
        pool = make_pool(max_slots=16)
        held = [None] * 16

        def work(number, pool=pool, held=held):
            held[number] = pool.acquire(spec, 10, q)
            for tensor in held[number]:
                tensor.fill_(number)

        run_threads(16, work)
        stats = pool.stats()
        assert (len(stats.lanes), stats.slots, stats.live_slots, stats.spills, stats.acquires) == (1, 16, 16, 0, 16)
        assert_disjoint(held)
        assert all(bool((held[number].lse == number).all() & (held[number].out == number).all()) for number in range(16))
        del held[:]
        assert pool.stats().live_slots == 0


def test_threads_that_drop_their_results_lose_no_memory(make_pool, spec, q):
    pool = make_pool(max_slots=8)

    def work(number):
        for step in range(300):
            outputs = pool.acquire(spec, 1 + (7 * step + number) % 50, q)
            outputs.lse.fill_(number)
            outputs.out[-1].fill_(number)
            assert bool((outputs.lse == number).all())
            assert bool((outputs.out[-1] == number).all())

    run_threads(8, work)
    stats = pool.stats()
    assert stats.acquires == 8 * 300
    assert stats.slots <= 8
    assert stats.live_slots == 0


def test_threads_that_acquire_trim_and_ask_do_not_disturb_each_other(make_pool, spec, q):
    pool = make_pool(max_slots=8)

    def work(number):
        for step in range(100):
            if number == 0:
                pool.trim()
            elif number == 1:
                assert pool.stats().slots <= 8
            elif number == 2:
                pool.reserve(spec, 1 + step, q)
            else:
                outputs = pool.acquire(spec, 1 + (11 * step) % 200, q)
                outputs.lse.fill_(number)
                assert bool((outputs.lse == number).all())

    run_threads(6, work)


def test_results_cross_threads(make_pool, spec, q):
    pool = make_pool(max_slots=4)
    box = []

    def work(number):
        for step in range(200):
            if number % 2:
                outputs = pool.acquire(spec, 20, q)
                outputs.lse.fill_(step)
                box.append((step, outputs))
            elif box:
                try:
                    value, outputs = box.pop()
                except IndexError:
                    continue
                assert bool((outputs.lse == value).all())

    run_threads(4, work)


def test_closing_while_others_acquire_is_an_error_for_them_and_harms_no_result(spec, q):
    refusals = []
    for _ in range(5):
        pool = OutputPool()

        def work(number, pool=pool):
            held = []
            try:
                for step in range(200):
                    if number == 0 and step == 20:
                        pool.close()
                    held = [*held[-2:], pool.acquire(spec, 10, q)]
                    held[-1].lse.fill_(number)
                    assert all(bool((outputs.lse == number).all()) for outputs in held)
            except BufpoolError as error:
                refusals.append(str(error))
            assert all(bool((outputs.lse == number).all()) for outputs in held)

        run_threads(4, work)
    assert refusals
    assert all("closed" in text for text in refusals)


def test_sleep_and_wake_race_with_acquires(make_pool, spec, q):
    pool = make_pool(max_slots=8)

    def sleep_and_wake(number):
        pool.sleep()
        pool.wake()

    def acquire(number):
        outputs = pool.acquire(spec, 30, q)
        outputs.lse.fill_(number)
        assert bool((outputs.lse == number).all())

    def work(number):
        for _ in range(100):
            with contextlib.suppress(BufpoolError):
                (acquire if number else sleep_and_wake)(number)

    run_threads(4, work)
    assert not pool.stats().asleep


def test_the_default_pool_is_one_for_all_threads(monkeypatch):
    from bufpool import pool as pool_module

    monkeypatch.setattr(pool_module, "_default", None)
    found = []
    run_threads(16, lambda number: found.append(pool_module.default_pool()))
    assert len(set(map(id, found))) == 1
    found[0].close()


# Finalizers that call the pool while it works


class Finalizer:
    """A reference cycle whose end calls ``act``; a call that is refused is counted."""

    ran = 0
    refused = 0

    def __init__(self, act, rounds=1):
        self.me = self
        self.act = act
        self.rounds = rounds

    def __del__(self):
        Finalizer.ran += 1
        if self.rounds > 1:
            Finalizer(self.act, self.rounds - 1)  # so that the next collection finds one too
        try:
            self.act()
        except BufpoolError:
            Finalizer.refused += 1


@pytest.fixture
def finalizer():
    Finalizer.ran = Finalizer.refused = 0
    return Finalizer


ACTS = ["acquire and drop", "acquire and hold", "grow", "stats", "trim", "reserve", "reset_peak_stats", "sleep", "report"]


def make_act(name, pool, spec, q, held):
    def hold():
        outputs = pool.acquire(spec, 5, q)
        outputs.lse.fill_(77)
        held.append(outputs)
        del held[:-3]

    def sleep():
        pool.sleep()
        pool.wake()

    return {
        "acquire and drop": lambda: pool.acquire(spec, 5, q).lse.fill_(88),
        "acquire and hold": hold,
        "grow": lambda: pool.acquire(spec, 5000, q).lse.fill_(88),
        "stats": pool.stats,
        "trim": pool.trim,
        "reserve": lambda: pool.reserve(spec, 300, q),
        "reset_peak_stats": pool.reset_peak_stats,
        "sleep": sleep,
        "report": pool.report,
    }[name]


@pytest.mark.parametrize("other", [False, True], ids=["same pool", "other pool"])
@pytest.mark.parametrize("name", ACTS)
def test_a_finalizer_that_calls_a_pool_inside_acquire_neither_deadlocks_nor_spoils(
    make_pool, spec, q, finalizer, collect_often, name, other
):
    pool = make_pool(max_slots=4)
    held_by_finalizers, held = [], []
    act = make_act(name, make_pool() if other else pool, spec, q, held_by_finalizers)
    for step in range(150):
        finalizer(act, 5)
        rows = (1, 40, 7, 300, 2)[step % 5]
        try:
            outputs = pool.acquire(spec, rows, q)
        except BufpoolError:  # the finalizer put the pool to sleep and could not wake it
            assert name == "sleep"
            continue
        outputs.lse.fill_(step)
        outputs.out[-1].fill_(step % 100)
        held = [*held[-2:], (step, outputs)]
        del outputs
        for value, outputs in held:
            assert bool((outputs.lse == value).all())
            assert bool((outputs.out[-1] == value % 100).all())
        del outputs
        assert all(bool((outputs.lse == 77).all()) for outputs in list(held_by_finalizers))
    assert finalizer.ran > 150
    held.clear()
    held_by_finalizers.clear()
    gc.collect()
    assert pool.stats().live_slots == 0


@pytest.mark.parametrize("name", ACTS)
def test_a_collection_at_any_point_of_a_hit_leaves_the_result_inside_mapped_memory(make_pool, spec, q, collect_often, name):
    pool = make_pool(max_slots=4)
    kept = []
    act = make_act(name, pool, spec, q, kept)
    is_acting = False

    def at_collection(phase, info):
        nonlocal is_acting
        if phase == "start" and not is_acting:
            is_acting = True
            try:
                act()
            except BufpoolError:
                pass
            finally:
                is_acting = False

    for step in range(60):
        pool.acquire(spec, 400, q)  # room for the hit below
        pool.acquire(spec, 1, q)
        gc.callbacks.append(at_collection)
        try:
            outputs = pool.acquire(spec, 350, q)
        except BufpoolError:
            assert name == "sleep"
            continue
        finally:
            gc.callbacks.remove(at_collection)
        outputs.lse.fill_(step)
        stats = pool.stats()
        assert stats.in_use_bytes <= stats.mapped_bytes
        slots = [slot for slot in pool._slots if slot.is_live()]
        assert all(slot.rows <= slot.capacity for slot in slots)
        assert_disjoint([outputs, *kept])
        assert bool((outputs.lse == step).all())
        del outputs, slots


def test_finalizers_of_two_pools_in_many_threads_do_not_wait_for_one_another(make_pool, spec, q, finalizer, collect_often):
    pools = [make_pool(max_slots=4), make_pool(max_slots=4)]
    other_spec = OutputSpec(x=((16,), torch.float32))

    def work(number):
        mine, other = pools[number % 2], pools[1 - number % 2]
        for step in range(60):
            finalizer(lambda: other.acquire(other_spec, 3, q), 2)
            finalizer(other.stats)
            finalizer(other.trim)
            outputs = mine.acquire(spec, 1 + step, q)
            outputs.lse.fill_(number)
            assert bool((outputs.lse == number).all())

    run_threads(6, work)
    assert finalizer.ran > 60


def test_a_result_dropped_by_a_collection_inside_acquire_is_free_afterwards(make_pool, spec, q, collect_often):
    pool = make_pool(max_slots=3)
    for step in range(100):
        cycle = [pool.acquire(spec, 10, q)]
        cycle.append(cycle)
        cycle[0].lse.fill_(step)
        del cycle
    gc.collect()
    stats = pool.stats()
    assert stats.live_slots == 0
    assert stats.slots <= 3


def test_pools_collected_inside_acquire_give_their_memory_back(make_pool, spec, q, collect_often):
    pool = make_pool()
    for rows in range(1, 60):
        other = OutputPool()
        other.acquire(spec, 10, q)
        other.me = other
        del other
        pool.acquire(spec, rows * 40, q)
    gc.collect()
    pool.acquire(spec, 5000, q)
    assert not any(slot.spec is spec and not slot.is_live() for slot in list(process.retired))


def test_closing_a_pool_in_a_finalizer_of_its_own_acquire_harms_no_result(spec, q, finalizer, collect_often):
    for _ in range(30):
        pool = OutputPool()
        pool.acquire(spec, 100, q)
        held = pool.acquire(spec, 5, q)
        held.lse.fill_(5)
        finalizer(pool.close)
        with contextlib.suppress(BufpoolError):
            for step in range(5):
                outputs = pool.acquire(spec, 100 + step, q)
                outputs.lse.fill_(6)
                assert bool((outputs.lse == 6).all())
        assert bool((held.lse == 5).all())
        pool.close()


def test_logging_happens_outside_the_lock(make_pool, spec, q):
    pool = make_pool(max_slots=1)
    seen = []

    class Handler(logging.Handler):
        def emit(self, record):
            # Another thread could not get in while the lock is held.
            thread = threading.Thread(target=lambda: seen.append(pool.stats().acquires), daemon=True)
            thread.start()
            thread.join(20)
            seen.append(thread.is_alive())

    handler = Handler()
    logger = logging.getLogger("bufpool")
    former = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    try:
        held = pool.acquire(spec, 5, q)
        pool.acquire(spec, 5, q)
        del held
        pool.trim()
        pool.sleep()
        pool.wake()
    finally:
        logger.removeHandler(handler)
        logger.setLevel(former)
    assert len(seen) == 2 * 6
    assert not any(alive for alive in seen[1::2])


def test_a_weak_reference_callback_on_a_result_may_acquire_again(make_pool, spec, q):
    pool = make_pool()
    again = []
    for _ in range(10):
        outputs = pool.acquire(spec, 5, q)
        watcher = weakref.ref(outputs.out, lambda _: again.append(pool.acquire(spec, 5, q)))
        outputs.lse.fill_(1)
        del outputs
        assert watcher() is None
        assert_disjoint(again)
        again.clear()

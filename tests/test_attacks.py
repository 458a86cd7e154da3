"""Attacks on the pool's promises that once succeeded: tracers, transforms, signals, failures, odd inputs."""

from __future__ import annotations

import gc
import logging
import signal
import threading

import pytest
import torch
from interrupts import Tick, interrupted_at
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._python_dispatch import TorchDispatchMode

from bufpool import OutputSpec, PoolLimitError, handout, host_memory
from bufpool.errors import DriverError


@pytest.fixture
def pair():
    return OutputSpec(out=((4,), torch.float32), lse=((), torch.float32))


@pytest.fixture
def trio():
    return OutputSpec(out=((4,), torch.float32), max_logits=((), torch.float32), lse=((), torch.float32))


@pytest.fixture
def doubled(pool, pair):
    """A function that writes its result into memory of the pool, whose lane was used before."""
    pool.acquire(pair, 3, torch.zeros(3, 4))

    def double(x):
        out = pool.acquire(pair, 3, x).out
        out.copy_(x * 2)
        return out

    return double


def _two_results(traced):
    return traced(torch.ones(3, 4)), traced(torch.full((3, 4), 5.0))


# Recorders and transforms


def test_two_results_of_a_graph_of_make_fx_share_no_memory(doubled):
    first, second = _two_results(make_fx(doubled, pre_dispatch=True)(torch.zeros(3, 4)))
    assert first.data_ptr() != second.data_ptr()
    assert (first == 2).all()
    assert (second == 10).all()


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::torch.jit.TracerWarning")
def test_two_results_of_a_traced_function_share_no_memory(doubled):
    first, second = _two_results(torch.jit.trace(doubled, (torch.zeros(3, 4),), check_trace=False))
    assert first.data_ptr() != second.data_ptr()
    assert (first == 2).all()
    assert (second == 10).all()


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_transform_may_write_into_a_result_as_into_one_of_torch_empty(doubled):
    x = torch.ones(3, 4)
    assert torch.equal(torch.func.grad(lambda x: doubled(x).sum())(x), torch.full((3, 4), 2.0))
    value, tangent = torch.func.jvp(doubled, (x,), (x,))
    assert torch.equal(value, tangent)
    assert torch.equal(torch.func.functionalize(doubled)(x), value)


def test_a_first_use_inside_a_transform_does_not_slow_the_process_down(make_pool, pair, monkeypatch):
    monkeypatch.setattr(handout, "_posts", {})
    handout._describe.cache_clear()
    handout._travels.cache_clear()
    pool = make_pool()

    def forward(x):
        pool.acquire(pair, 3, torch.zeros(3))
        return x.sum()

    torch.func.grad(forward)(torch.ones(3))
    pool.acquire(pair, 3, torch.zeros(3))
    assert handout._posts == {"cpu": True}


def test_no_dispatch_mode_of_the_user_runs_under_the_lock(make_pool):
    pool, is_held = make_pool(), []

    def ask():
        free = pool._lock.acquire(blocking=False)
        is_held.append(not free)
        if free:
            pool._lock.release()

    class Mode(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            thread = threading.Thread(target=ask)
            thread.start()
            thread.join()
            return func(*args, **(kwargs or {}))

    with Mode():
        pool.acquire(OutputSpec(bits=((3,), torch.bits8)), 3, torch.zeros(3))
    assert not any(is_held)


# Inputs


def test_like_may_be_a_named_tuple_with_a_field_called_values(pool, pair):
    like = torch.topk(torch.zeros(3, 4), 2)
    assert pool.acquire(pair, 3, like).out.shape == (3, 4)


def test_a_row_count_beyond_all_memory_releases_no_idle_slot(pool, pair):
    like = torch.zeros(1)
    pool.acquire(pair, 1000, like)
    before = pool.stats()
    with pytest.raises(PoolLimitError):
        pool.acquire(OutputSpec(other=((), torch.float32)), 2**60, like)
    assert pool.stats() == before


def test_rows_beyond_the_memory_of_the_machine_are_a_limit_error(pool, pair):
    with pytest.raises(PoolLimitError):
        pool.acquire(pair, 2 * host_memory.physical_bytes() // pair.row_nbytes, torch.zeros(1))


def test_a_spill_that_torch_refuses_is_not_counted(make_pool, pair, caplog):
    pool, like = make_pool(max_slots=1), torch.zeros(1)
    held = pool.acquire(pair, 3, like)
    before = pool.stats()
    with caplog.at_level(logging.CRITICAL), pytest.raises((MemoryError, RuntimeError)):
        pool.acquire(pair, 2**50, like)
    after = pool.stats()
    assert (after.acquires, after.hits, after.spills) == (before.acquires, before.hits, before.spills)
    assert held.out.shape == (3, 4)


def test_a_finalizer_inside_a_call_may_acquire_no_rows(pool, pair):
    like = torch.zeros(1)
    pool.acquire(pair, 3, like)
    pool._busy = True  # as inside another call of this thread
    try:
        with pool._lock:
            assert pool.acquire(pair, 3, like).out.shape == (3, 4)
            assert pool.acquire(pair, 0, like).out.shape == (0, 4)
    finally:
        pool._busy = False


# Failures


@pytest.mark.parametrize("call", ["trim", "sleep"])
@pytest.mark.parametrize("failing", [1, 2])
def test_a_slot_offers_no_row_whose_memory_was_given_back(pool, pair, monkeypatch, call, failing):
    pool.acquire(pair, 5000, torch.zeros(1))
    give_back, calls = host_memory.give_back, []

    def refuse(address, nbytes):
        calls.append(address)
        if len(calls) == failing:
            raise DriverError("madvise: refused")
        give_back(address, nbytes)

    monkeypatch.setattr(host_memory, "give_back", refuse)
    with pytest.raises(DriverError):
        getattr(pool, call)()
    for slot in pool._slots:
        assert slot.mapped_bytes == sum(arena.mapped_bytes for arena in slot.arenas)
        assert all(slot.spec.row_bytes[i] * slot.capacity <= arena.mapped_bytes for i, arena in enumerate(slot.arenas))


TAKES = [handout.PostHandout.take, handout.TripleHandout.take]


@pytest.mark.parametrize(
    ("spec_name", "line_of"),
    [
        ("pair", "if states[state] == _LIVE"),
        ("pair", "from_dlpack(capsule)"),
        ("pair", "return _new_tuple"),
        ("trio", "if states[state_1] == _LIVE"),
        ("trio", "states[state_1] = _LIVE"),
        ("trio", "third = from_dlpack(capsule_2)"),
        ("trio", "return _new_tuple"),
    ],
)
def test_an_exception_of_a_signal_handler_inside_a_hit_leaves_no_slot_held(pool, request, spec_name, line_of):
    spec = request.getfixturevalue(spec_name)
    like = torch.zeros(1)
    pool.acquire(spec, 3, like)
    error = interrupted_at(TAKES, line_of, lambda: pool.acquire(spec, 3, like))
    assert type(error) is Tick
    del error
    gc.collect()
    assert pool.stats().live_slots == 0
    assert pool.acquire(spec, 3, like).out.shape == (3, 4)
    assert pool.stats().slots == 1


@pytest.mark.parametrize(
    ("spec_name", "line_of"),
    [
        ("pair", "from_dlpack(capsule)"),
        ("pair", "return _new_tuple"),
        ("trio", "second = from_dlpack(capsule_1)"),
        ("trio", "return _new_tuple"),
    ],
)
def test_no_memory_is_unmapped_under_a_tensor_that_a_traceback_keeps(pool, request, spec_name, line_of):
    pair = request.getfixturevalue(spec_name)
    like = torch.zeros(1)
    pool.acquire(OutputSpec(first=((), torch.float32)), 1, like)  # so that the probe is done
    error = interrupted_at(TAKES, line_of, lambda: pool.acquire(pair, 3, like))
    assert type(error) is Tick  # and no AssertionError, which came after the unmapping
    traceback = error.__traceback__
    while traceback is not None:
        kept = traceback.tb_frame.f_locals
        assert not kept.get("tensors")
        assert not {"first", "second", "third"} & kept.keys()
        traceback = traceback.tb_next
    assert pool.stats().slots == 1  # that of the probe


@pytest.mark.skipif(not hasattr(signal, "setitimer"), reason="needs interval timers")
def test_signal_handlers_that_raise_leave_no_lock_held_and_no_slot_live(run_script):
    done = run_script(  # in a process of its own, since it spoils what all pools share if it fails
        """
        import gc, signal, threading, torch, bufpool
        from bufpool import process

        class Tick(BaseException):
            pass

        def tick(number, frame):
            if is_armed:
                raise Tick

        is_armed = False
        signal.signal(signal.SIGALRM, tick)
        spec = bufpool.OutputSpec(out=((4,), torch.float32), lse=((), torch.float32))
        like = torch.zeros(1)
        pool = bufpool.OutputPool()
        pool.reserve(spec, 5, like)
        kept = bufpool.OutputPool()
        held = kept.acquire(spec, 3, like)
        kept.close()  # its slot waits, so every slow call looks whether it can go
        for n in range(1500):
            try:
                is_armed = True
                signal.setitimer(signal.ITIMER_REAL, 5e-6 + n % 60 * 1e-6)
                while True:
                    pool.acquire(spec, 3, like)
                    pool.reserve(spec, 5, like)
            except Tick:
                pass
            finally:
                is_armed = False
        signal.setitimer(signal.ITIMER_REAL, 0)
        gc.collect()
        assert pool.stats().live_slots == 0, "a slot is counted as live for ever"
        del held
        pool.trim()
        assert not process.retired, "memory of a closed pool never comes back"
        answers = []
        thread = threading.Thread(target=lambda: answers.append(pool.stats()), daemon=True)
        thread.start()
        thread.join(20)
        assert answers, "the lock is held for ever"
        """
    )
    assert done.returncode == 0, done.stderr

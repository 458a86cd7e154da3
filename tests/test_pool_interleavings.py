"""What other threads, finalizers, signals and errors may do between two steps of the pool."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import sys
import threading
import types

import pytest
import torch
from interrupts import Tick, interrupted_at

from bufpool import FreshAllocator, OutputPool, OutputSpec, driver, handout, host_memory, process
from bufpool import pool as pool_module
from bufpool import slot as slot_module
from bufpool.arena import ADDRESS_BUDGET, HostArena, TorchArena
from bufpool.errors import BufpoolError, CaptureError, DriverError, PoolLimitError, WriteContractError
from bufpool.place import Place, SharedCaptures
from bufpool.slot import Slot

ASK_DEVICE = driver.is_idle
GRANULE = 64 * 1024  # of the fake driver


def addresses(outputs):
    return tuple(tensor.data_ptr() for tensor in outputs)


def reader(handle, index=0):
    """A stream that was declared to read."""
    return types.SimpleNamespace(cuda_stream=handle, device=torch.device("cuda", index))


def variables(error):
    """The variables of all frames in the traceback of an error."""
    trace = error.__traceback__
    while trace is not None:
        yield from trace.tb_frame.f_locals.items()
        trace = trace.tb_next


@pytest.fixture
def acquire_in(make_pool, fake_cuda):
    """A pool, and a function that acquires inside a capture, on a stream."""
    pool = make_pool(max_slots=2)

    def acquire(capture, stream, spec):
        fake_cuda.capture, fake_cuda.stream = capture, stream
        try:
            return pool.acquire(spec, 10, fake_cuda.like(0))
        finally:
            fake_cuda.capture, fake_cuda.stream = None, 0

    acquire.pool = pool
    return acquire


@pytest.fixture
def events(monkeypatch):
    """On which streams events are recorded."""
    recorded = []

    class Event:
        def record(self, stream):
            recorded.append(stream.cuda_stream)

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(
        torch.cuda, "current_stream", lambda device=None: types.SimpleNamespace(wait_event=lambda event: None)
    )
    return recorded


@pytest.fixture
def torch_arenas_on_host(monkeypatch):
    """Arenas of kind torch take host memory, whatever device they are for."""
    make = TorchArena.__init__
    monkeypatch.setattr(TorchArena, "__init__", lambda arena, device: make(arena, torch.device("cpu")))


@pytest.fixture
def streams(fake_cuda, monkeypatch):
    """Streams that are busy or capture, behind the driver's own questions."""
    state = types.SimpleNamespace(busy=set(), capturing=set())
    bindings = types.SimpleNamespace(CUstream=int, cuStreamQuery=lambda stream: (600 if stream in state.busy else 0,))
    monkeypatch.setattr(driver, "_bindings", lambda: bindings)
    for scope in ("_current_context", "_relaxed"):
        monkeypatch.setattr(driver, scope, lambda *args: contextlib.nullcontext())
    monkeypatch.setattr(driver, "_streams_of_torch", lambda index: (11, 12, 64))
    monkeypatch.setattr(driver, "is_idle", ASK_DEVICE)
    monkeypatch.setattr(driver, "is_stream_idle", lambda index, stream: stream not in state.busy)
    monkeypatch.setattr(driver, "is_capturing", lambda stream: stream in state.capturing or fake_cuda.stream == stream != 0)
    return state


# Readers


def test_a_slot_of_a_graph_that_is_gone_is_not_taken_behind_a_reader_that_captures(acquire_in, fake_cuda, spec, events):
    former = addresses(acquire_in(1, 64, spec))
    acquire_in.pool._slots[0].readers = [reader(77)]
    fake_cuda.end_graph(1)
    fake_cuda.capturing = 77
    assert addresses(acquire_in.pool.acquire(spec, 10, fake_cuda.like(0))) != former
    assert events == []  # an event there would pull this stream into the capture


def test_a_capture_takes_no_free_slot_whose_reader_is_busy(acquire_in, fake_cuda, spec, events, streams):
    former = addresses(acquire_in(1, 64, spec))
    acquire_in.pool._slots[0].readers = [reader(999)]  # made outside torch
    fake_cuda.end_graph(1)
    streams.busy = {999}
    assert addresses(acquire_in(2, 64, spec)) != former
    streams.busy = set()
    assert addresses(acquire_in(3, 64, spec)) == former


@pytest.mark.parametrize("call", ["trim", "sleep", "close"])
def test_a_reader_on_another_device_is_waited_for(make_pool, fake_cuda, spec, call):
    pool = make_pool()
    pool.acquire(spec, 10, fake_cuda.like(0))
    pool._slots[0].readers = [reader(77, 1)]
    fake_cuda.synchronized.clear()
    getattr(pool, call)()
    assert fake_cuda.drivers[0].mapped_bytes == 0
    assert set(fake_cuda.synchronized) == {0, 1}


@pytest.mark.parametrize("call", ["acquire", "reserve"])
def test_an_arena_of_torch_moves_only_behind_its_readers(make_pool, spec, q, monkeypatch, call):
    pool = make_pool(arena="torch")
    pool.acquire(spec, 10, q)
    pool._slots[0].readers = [reader(77)]
    order, grow = [], TorchArena.grow

    def wait(place, slot):
        order.append("wait")
        slot.readers = []

    monkeypatch.setattr(Place, "wait_for_readers", wait)
    monkeypatch.setattr(TorchArena, "grow", lambda arena, nbytes: (order.append("grow"), grow(arena, nbytes)))
    getattr(pool, call)(spec, 10000, q)
    assert order == ["wait", *["grow"] * len(spec)]


@pytest.mark.parametrize("kind", ["post", "owner"])
@pytest.mark.parametrize("is_current", [True, False])
def test_a_reader_that_a_finalizer_declares_just_before_the_drop_counts(
    make_pool, spec, q, monkeypatch, events, kind, is_current
):
    monkeypatch.setitem(handout._posts, "cpu", kind == "post")
    pool = make_pool()
    held = [pool.acquire(spec, 10, q)]
    slot = pool._slots[0]
    other = None if is_current else pool.acquire(spec, 10, q)
    take, done = type(slot.handout).take.__code__, []

    def collect(frame, event, arg):
        handout_ = frame.f_locals.get("self") if frame.f_code is take else None
        if handout_ is slot.handout and not done:
            done.append(True)
            slot.readers = [*slot.readers, reader(77)]  # record_stream(), which the host has no streams for
            held.clear()

    sys.settrace(collect)
    try:
        outputs = pool.acquire(spec, 10, q)
    finally:
        sys.settrace(None)
    assert done
    assert addresses(outputs) != slot.addresses or events == [77]
    del other
    assert pool.stats().acquires == 2 + (not is_current)


def test_sleep_keeps_the_readers_of_results_that_are_held(acquire_in, spec):
    held = acquire_in(1, 64, spec)
    slot = acquire_in.pool._slots[0]
    slot.readers = [reader(77)]
    acquire_in.pool.sleep()
    acquire_in.pool.wake()
    assert len(slot.readers) == 1
    del held
    acquire_in.pool.sleep()
    assert slot.readers == []


# Graphs


def test_work_on_a_stream_made_outside_torch_is_waited_for(acquire_in, fake_cuda, spec, streams):
    former = addresses(acquire_in(1, 64, spec))
    streams.busy = {999}  # a replay there
    fake_cuda.end_graph(1)
    fake_cuda.synchronized.clear()
    assert addresses(acquire_in.pool.acquire(spec, 10, fake_cuda.like(0))) == former
    assert fake_cuda.synchronized == [0]


def test_a_stream_that_captures_may_have_work_from_before(acquire_in, fake_cuda, spec, streams):
    former = addresses(acquire_in(1, 64, spec))
    fake_cuda.end_graph(1)
    streams.busy = streams.capturing = {11}  # CUDAGraph.capture_begin() waits for nothing
    fake_cuda.capturing = 11
    assert addresses(acquire_in.pool.acquire(spec, 10, fake_cuda.like(0))) != former


def test_threads_in_one_shared_capture_are_branches_of_their_own(acquire_in, spec):
    found = []

    def branch(capture, stream):
        with acquire_in.pool.shared_capture("set"):
            found.append(addresses(acquire_in(capture, stream, spec)))

    for stream in (64, 65):
        thread = threading.Thread(target=branch, args=(1, stream))
        thread.start()
        thread.join()
    assert found[0] != found[1]
    branch(2, 70)
    branch(2, 71)
    assert found[2:] == found[:2]


def test_per_thread_streams_in_one_shared_capture_are_branches_of_their_own(acquire_in, spec):
    found = []

    def branch():
        with acquire_in.pool.shared_capture("set"):
            found.append(addresses(acquire_in(1, 2, spec)))  # the same handle in all threads

    for _ in range(2):
        thread = threading.Thread(target=branch)
        thread.start()
        thread.join()
    assert found[0] != found[1]


def test_finalizers_of_two_threads_do_not_wait_for_each_other(make_pool, fake_cuda, spec, q, monkeypatch):
    pool, other = make_pool(), make_pool()
    in_branch, in_call = threading.Event(), threading.Event()

    class Branches(list):
        def __contains__(self, branch):  # a collection in the middle of counting branches
            if threading.current_thread().name == "first" and not in_branch.is_set():
                in_branch.set()
                in_call.wait(1)
                other.acquire(spec, 3, q)
            return super().__contains__(branch)

    def acquire_in_shared_capture():
        with pool.shared_capture("set"):
            pool.acquire(spec, 3, fake_cuda.like(0))

    def arena_kind(self, device, ask=OutputPool._arena_kind):  # a collection in the middle of a call
        if threading.current_thread().name == "second" and self is other and not in_call.is_set():
            in_call.set()
            acquire_in_shared_capture()
        return ask(self, device)

    def acquire_elsewhere():
        in_branch.wait(1)
        other.acquire(OutputSpec(other=((4,), torch.float32)), 3, q)

    pool._shared._branches[1] = Branches()
    monkeypatch.setattr(OutputPool, "_arena_kind", arena_kind)
    fake_cuda.capture, fake_cuda.stream = 1, 64
    threads = [
        threading.Thread(target=acquire_in_shared_capture, name="first", daemon=True),
        threading.Thread(target=acquire_elsewhere, name="second", daemon=True),
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    fake_cuda.capture, fake_cuda.stream = None, 0
    assert not any(thread.is_alive() for thread in threads)


@pytest.mark.parametrize("line", ["setdefault((capture", "move_to_end", "if len"])
def test_an_interrupt_loses_no_branch(line):
    shared = SharedCaptures()
    assert [shared.branch(1, 0, stream, 0) for stream in (64, 65)] == [0, 1]
    assert type(interrupted_at([SharedCaptures.branch], line, lambda: shared.branch(1, 0, 66, 0))) is Tick
    assert [shared.branch(1, 0, stream, 0) for stream in (66, 65, 64)] == [2, 1, 0]


def test_captures_in_turn_keep_their_branches(acquire_in, spec):
    found = []
    for capture, stream in ((1, 64), (2, 70), (1, 65), (2, 71), (1, 64)):
        with acquire_in.pool.shared_capture("set"):
            found.append(addresses(acquire_in(capture, stream, spec)))
    assert found[0] == found[1] == found[4] != found[2] == found[3]


def test_a_shared_capture_inside_another_one_ends_with_itself(acquire_in, spec):
    pool, found = acquire_in.pool, []
    with pool.shared_capture("outer"):
        found.append(addresses(acquire_in(1, 64, spec)))
        with pool.shared_capture("inner"):
            found.append(addresses(acquire_in(2, 64, spec)))
        found.append(addresses(acquire_in(3, 64, spec)))
    found.append(addresses(acquire_in(4, 64, spec)))
    assert found[0] == found[2]
    assert len(set(found)) == 3


def test_a_slot_that_a_failed_call_left_in_a_graph_waits_for_its_replays(acquire_in, fake_cuda, spec, monkeypatch):
    take, kept = handout.OwnerHandout.take, []

    def take_and_be_interrupted(self, rows):
        kept.append(take(self, rows))
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(handout.OwnerHandout, "take", take_and_be_interrupted)
        with pytest.raises(KeyboardInterrupt):
            acquire_in(1, 64, spec)
    former = addresses(kept.pop())
    fake_cuda.end_graph(1)
    fake_cuda.synchronized.clear()
    assert addresses(acquire_in.pool.acquire(spec, 10, fake_cuda.like(0))) == former
    assert fake_cuda.synchronized == [0]


@pytest.fixture
def stream_class(monkeypatch):
    class Stream:
        def __init__(self, index, handle):
            self.device = torch.device("cuda", index)
            self.cuda_stream = handle

    monkeypatch.setattr(torch.cuda, "Stream", Stream)
    return Stream


@pytest.fixture
def on_cuda():
    class OnCuda(torch.Tensor):
        is_cuda = True

        def record_stream(self, stream):
            raise AssertionError("passed on to torch, which does nothing for memory that is not its own")

    return OnCuda


def test_a_reader_can_be_declared_while_the_pool_sleeps(acquire_in, spec, on_cuda, stream_class):
    held = acquire_in(1, 64, spec)
    acquire_in.pool.sleep()
    acquire_in.pool.record_stream(held[0].as_subclass(on_cuda), stream_class(0, 77))
    acquire_in.pool.wake()
    assert [reader.cuda_stream for reader in acquire_in.pool._slots[0].readers] == [77]


def test_readers_on_the_default_streams_of_two_devices_are_two(acquire_in, spec, on_cuda, stream_class):
    held = acquire_in(1, 64, spec)
    for index in (0, 1, 1):
        acquire_in.pool.record_stream(held[0].as_subclass(on_cuda), stream_class(index, 0))
    readers = acquire_in.pool._slots[0].readers
    assert [(reader.device.index, reader.cuda_stream) for reader in readers] == [(0, 0), (1, 0)]


def test_a_reader_of_a_result_whose_pool_is_closed_is_waited_for(make_pool, fake_cuda, spec, on_cuda, stream_class):
    pool = make_pool()
    held = list(pool.acquire(spec, 64, fake_cuda.like(0)))
    pool.close()
    pool.record_stream(held[0].as_subclass(on_cuda), stream_class(1, 77))
    held.clear()
    fake_cuda.synchronized.clear()
    make_pool().close()
    assert set(fake_cuda.synchronized) == {0, 1}


@pytest.fixture
def told(monkeypatch):
    """Spilled results come from the host; of which bytes torch is told that somebody reads them."""
    told, fresh = [], FreshAllocator()
    on_host = types.SimpleNamespace(acquire=lambda spec, rows, like: fresh.acquire(spec, rows, torch.zeros(1)))
    monkeypatch.setattr(pool_module, "_fresh", on_host)
    monkeypatch.setattr(torch.Tensor, "record_stream", lambda self, stream: told.append((self.data_ptr(), self.nbytes)))
    return told


@pytest.mark.parametrize("is_closed", [False, True])
def test_a_spilled_result_that_came_back_from_a_capsule_tells_torch_by_its_own_storage(
    make_pool, spec, fake_cuda, on_cuda, stream_class, told, is_closed
):
    pool = make_pool(max_slots=1)
    held = pool.acquire(spec, 64, fake_cuda.like(0))
    spilled = pool.acquire(spec, 64, fake_cuda.like(0))
    assert pool.stats().spills == 1
    view = torch.from_dlpack(torch.utils.dlpack.to_dlpack(spilled[0][3:]))
    whole = (spilled[0].data_ptr(), spilled[0].nbytes)
    del spilled, held
    if is_closed:
        pool.close()
        pool = make_pool()  # of the same process: a new default pool
    pool.record_stream(view.as_subclass(on_cuda), stream_class(0, 77))
    assert told == [whole]


def test_a_spill_runs_no_user_code_under_the_lock(make_pool, spec, fake_cuda, told):
    under = []

    class Mode(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, func, types, args=(), kwargs=None):
            under.append(process.lock._is_owned())
            return func(*args, **(kwargs or {}))

    pool = make_pool(max_slots=1)
    held = pool.acquire(spec, 64, fake_cuda.like(0))
    with Mode():
        pool.acquire(spec, 64, fake_cuda.like(0))
    assert pool.stats().spills == 1
    assert under
    assert not any(under)
    del held


def test_the_per_thread_stream_as_a_reader_is_refused(make_pool, spec, fake_cuda, on_cuda, stream_class):
    held = make_pool().acquire(spec, 64, fake_cuda.like(0))
    with pytest.raises(ValueError, match="the same in all threads, got the per-thread default stream"):
        make_pool().record_stream(held[0].as_subclass(on_cuda), stream_class(0, 2))


def test_readers_are_declared_while_another_thread_makes_pools(make_pool, spec, fake_cuda, on_cuda, stream_class, told):
    pool, stop, kept = make_pool(max_slots=1), threading.Event(), []
    held, spilled = (pool.acquire(spec, 64, fake_cuda.like(0)) for _ in range(2))

    def make_pools():
        while not stop.is_set():
            kept.append(OutputPool())
            if len(kept) > 50:
                kept.clear()

    thread, former = threading.Thread(target=make_pools), sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    thread.start()
    try:
        for _ in range(3000):
            pool.record_stream(spilled[0].as_subclass(on_cuda), stream_class(0, 77))
    finally:
        stop.set()
        thread.join()
        sys.setswitchinterval(former)
    assert len(told) == 3000
    del held


def test_a_reader_that_a_finalizer_declares_while_slots_of_closed_pools_are_looked_at_counts(
    make_pool, fake_cuda, spec, on_cuda, stream_class, monkeypatch
):
    gone, pool = make_pool(), make_pool()
    held = list(gone.acquire(spec, 64, fake_cuda.like(0)))
    gone.close()
    (slot,) = process.retired
    is_live = Slot.is_live

    def declare_and_drop(self):
        if self is slot and held:
            pool.record_stream(held[0].as_subclass(on_cuda), stream_class(1, 77))
            held.clear()
        return is_live(self)

    monkeypatch.setattr(Slot, "is_live", declare_and_drop)
    fake_cuda.synchronized.clear()
    process.release_retired()
    assert not held
    assert sorted(fake_cuda.synchronized) == [0, 1]


# Arenas of kind torch


def test_blocks_that_a_wake_made_on_another_stream_are_waited_for(make_pool, fake_cuda, torch_arenas_on_host, spec):
    pool, like = make_pool(arena="torch"), fake_cuda.like(0)
    fake_cuda.stream = 64
    pool.acquire(spec, 10, like)
    pool.sleep()
    fake_cuda.synchronized.clear()
    fake_cuda.capturing = 65
    with pytest.raises(CaptureError, match="wake: expected no graph capture"):
        pool.wake()
    assert fake_cuda.synchronized == []
    fake_cuda.capturing = None
    fake_cuda.stream = 65
    pool.wake()  # torch's blocks of this stream, for a lane of the other one
    fake_cuda.stream = 0
    assert fake_cuda.synchronized == [0]


@pytest.mark.parametrize(
    "place",
    [
        (TorchArena.grow, "self._memory, self.address ="),
        (Slot._settle, "self.guard = None"),
        (Slot._settle, "self.handout.move"),
    ],
)
@pytest.mark.parametrize("rows", [1, 5000])
def test_a_growth_that_is_interrupted_leaves_no_address_of_a_block_that_is_gone(make_pool, q, place, rows):
    function, line = place
    spec = OutputSpec(first=((1024,), torch.float32), second=((8,), torch.float32))
    pool = make_pool(arena="torch")
    pool.acquire(spec, 10, q)
    assert type(interrupted_at([function], line, lambda: pool.acquire(spec, 5000, q))) is Tick
    outputs = pool.acquire(spec, rows, q)
    for tensor, arena in zip(outputs, pool._slots[0].arenas, strict=True):
        memory = arena._memory
        assert memory.data_ptr() <= tensor.data_ptr()
        assert tensor.data_ptr() + tensor.nbytes <= memory.data_ptr() + memory.nbytes


@pytest.mark.parametrize("kind", ["torch", "host"])
@pytest.mark.parametrize(
    "place",
    [
        (OutputPool.close, "slot.pins = "),
        (OutputPool.close, "process.retired.extend"),
        (OutputPool.close, "self._slots.clear"),
        (process._release_those_idle, "if slot.is_released"),
        (process._release_those_idle, "if slot.is_idle()"),
        (process._release_those_idle, "retired.rotate"),
        (process._release_those_idle, "retired.popleft()"),
    ],
)
def test_a_close_that_is_interrupted_loses_no_slot(make_pool, kind, q, place):
    function, line = place
    spec, pool = OutputSpec(page=((2**16,), torch.uint8)), make_pool(arena=kind)
    held, dropped = pool.acquire(spec, 4, q), pool.acquire(spec, 4, q)
    held.page.fill_(7)
    slots = list(pool._slots)
    del dropped
    assert type(interrupted_at([function], line, pool.close)) is Tick
    gc.collect()
    others = [torch.full((2**18,), 9, dtype=torch.uint8) for _ in range(4)]
    assert bool((held.page == 7).all())
    pool.close()
    held = None
    pool.close()
    assert [slot.mapped_bytes for slot in slots] == [0, 0]
    assert not process.retired
    del others


# Errors and interrupts


@pytest.mark.parametrize("call", ["acquire", "reserve"])
@pytest.mark.parametrize("stream", [999, 2])
def test_a_call_that_fails_in_a_capture_on_any_stream_waits_for_nothing(
    make_pool, fake_cuda, spec, monkeypatch, call, stream
):
    monkeypatch.setattr(driver, "capturing_stream", lambda index, known=(): 999 if 999 in known else None)
    pool = make_pool(max_bytes=GRANULE)
    fake_cuda.capture, fake_cuda.stream = 1, stream
    fake_cuda.synchronized.clear()
    with pytest.raises(PoolLimitError):
        getattr(pool, call)(spec, 10_000, fake_cuda.like(0))
    fake_cuda.capture, fake_cuda.stream = None, 0
    assert fake_cuda.synchronized == []  # that would break the capture


def test_a_call_above_the_limit_does_not_wait_for_the_device(make_pool, fake_cuda, spec):
    pool = make_pool(max_bytes=GRANULE)
    fake_cuda.synchronized.clear()
    with pytest.raises(PoolLimitError):
        pool.acquire(spec, 10_000, fake_cuda.like(0))
    assert fake_cuda.synchronized == []
    assert fake_cuda.drivers[0].is_clean


def test_reserved_memory_serves_at_once_after_a_call_that_was_refused(make_pool, fake_cuda):
    spec, pool, like = OutputSpec(page=((GRANULE,), torch.uint8)), make_pool(max_bytes=4 * GRANULE), fake_cuda.like(0)
    pool.reserve(spec, 4, like)
    (slot,) = pool._free
    fake_cuda.synchronized.clear()
    for _ in range(2):
        with pytest.raises(PoolLimitError):
            pool.acquire(spec, 5, like)
    fake_cuda.capture, fake_cuda.stream = 1, 64
    with pytest.raises(PoolLimitError):
        pool.acquire(spec, 5, like)
    outputs = pool.acquire(spec, 4, like)
    fake_cuda.capture, fake_cuda.stream = None, 0
    assert addresses(outputs) == slot.addresses
    assert fake_cuda.synchronized == []


def test_a_reserve_that_moved_a_part_of_a_slot_is_waited_for_on_another_stream(
    make_pool, fake_cuda, torch_arenas_on_host, monkeypatch
):
    spec = OutputSpec(first=((64,), torch.float32), second=((64,), torch.float32))
    grow = TorchArena.grow
    pool, like = make_pool(arena="torch"), fake_cuda.like(0)
    fake_cuda.stream = 64
    pool.reserve(spec, 10, like)
    (slot,) = pool._free
    former = slot.addresses

    def grow_the_first_alone(arena, nbytes):
        if arena is slot.arenas[1]:
            raise driver.DeviceOutOfMemoryError("no memory", nbytes)
        grow(arena, nbytes)

    with monkeypatch.context() as patch:
        patch.setattr(TorchArena, "grow", grow_the_first_alone)
        with pytest.raises(PoolLimitError):
            pool.reserve(spec, 1000, like)
    assert slot.addresses[0] != former[0]  # a block that torch gave on stream 64
    fake_cuda.synchronized.clear()
    fake_cuda.stream = 65
    pool.acquire(spec, 10, like)
    fake_cuda.stream = 0
    assert fake_cuda.synchronized == [0]


@pytest.mark.parametrize("call", ["acquire", "reserve"])
def test_a_call_that_fails_leaves_the_readers_of_a_free_slot(make_pool, q, events, monkeypatch, call):
    monkeypatch.setattr(driver, "synchronize", lambda index: None)
    spec = OutputSpec(page=((1024,), torch.float32))
    pool = make_pool(arena="torch", max_bytes=2**20)
    pool.reserve(spec, 10, q)
    (slot,) = pool._free
    slot.readers = [reader(77)]
    with pytest.raises(PoolLimitError):
        getattr(pool, call)(spec, 10_000, q)
    assert pool._free == [slot]
    assert len(slot.readers) == 1
    slot.readers = []


def test_a_result_that_a_signal_handler_keeps_is_waited_for_on_another_stream(make_pool, fake_cuda, spec, monkeypatch):
    take, kept = handout.OwnerHandout.take, []

    def take_and_be_interrupted(self, rows):
        kept.append(take(self, rows))
        raise KeyboardInterrupt

    pool = make_pool()
    fake_cuda.stream = 64
    with monkeypatch.context() as patch:
        patch.setattr(handout.OwnerHandout, "take", take_and_be_interrupted)
        with pytest.raises(KeyboardInterrupt):
            pool.acquire(spec, 10, fake_cuda.like(0))
    former = addresses(kept.pop())
    fake_cuda.synchronized.clear()
    fake_cuda.stream = 65
    assert addresses(pool.acquire(spec, 10, fake_cuda.like(0))) == former
    assert fake_cuda.synchronized == [0]


def test_a_pool_that_could_not_be_woken_hands_nothing_out(make_pool, monkeypatch, q):
    specs = [OutputSpec(**{name: ((1024,), torch.float32)}) for name in ("first", "second")]
    pool = make_pool()
    for spec in specs:
        pool.acquire(spec, 10, q)
    broken = pool._slots[1].arenas[0]
    shrink, grow = HostArena.shrink, HostArena.grow

    def shrink_and_break(arena, nbytes):
        shrink(arena, nbytes)
        if arena is broken:
            raise DriverError("unmap: broken")

    def grow_or_not(arena, nbytes):
        if arena is broken and nbytes:
            raise driver.DeviceOutOfMemoryError("no memory", nbytes)
        grow(arena, nbytes)

    with monkeypatch.context() as patch:
        patch.setattr(HostArena, "shrink", shrink_and_break)
        patch.setattr(HostArena, "grow", grow_or_not)
        with pytest.raises(DriverError):
            pool.sleep()
        assert pool.is_asleep
        with pytest.raises(BufpoolError, match="awake"):
            pool.acquire(specs[0], 10, q)
    pool.wake()
    assert addresses(pool.acquire(specs[0], 10, q)) == pool._slots[0].addresses


@pytest.mark.parametrize("line", ["try:", "with self._lock:", "self._runner_calls.add(call)", "yield"])
def test_an_interrupt_at_the_start_of_a_run_does_not_keep_the_pool_awake(make_pool, line):
    pool = make_pool()

    def run():
        with pool._kept_awake("runner"):
            pass

    error = interrupted_at([OutputPool._kept_awake.__wrapped__], line, run)
    assert type(error) is Tick
    pool.sleep()  # while the traceback is kept


def test_a_fork_in_a_run_does_not_keep_the_pool_of_the_child_awake(make_pool):
    pool = make_pool()
    with pool._kept_awake("runner"):
        with pytest.raises(BufpoolError, match="got 1"):
            pool.sleep()
        pool._after_fork()
    pool.sleep()


@pytest.mark.parametrize("error", [KeyboardInterrupt, DriverError("synchronize: broken")])
def test_what_a_broken_wait_leaves_of_a_closed_pool_comes_back_later(make_pool, fake_cuda, spec, monkeypatch, error):
    pool = make_pool()
    for index in (0, 1):
        pool.acquire(spec, 10, fake_cuda.like(index))

    def broken(index):
        raise error

    with monkeypatch.context() as patch:
        patch.setattr(driver, "synchronize", broken)
        with pytest.raises((KeyboardInterrupt, DriverError)):
            pool.close()
    assert all(fake.mapped_bytes for fake in fake_cuda.drivers[:2])
    process.release_retired()
    assert all(fake.is_clean for fake in fake_cuda.drivers)


def test_a_release_that_fails_loses_one_address_range_and_nothing_else(make_pool, fake_cuda, spec):
    pool = make_pool()
    for index in (0, 1):
        pool.acquire(spec, 10, fake_cuda.like(index))
    first, second = fake_cuda.drivers[:2]
    for fake in (first, second):
        fake.fail_after(len(spec))
    with pytest.raises(DriverError):
        pool.close()
    for fake in (first, second):
        fake.fail_at = None
    process.release_retired()
    assert first.mapped_bytes == second.mapped_bytes == 0
    assert len(first.reservations) + len(second.reservations) == 1
    for fake in (first, second):
        fake.reservations.clear()


@pytest.mark.parametrize("kind", ["post", "owner"])
def test_an_interrupt_behind_a_new_result_takes_no_memory_from_whoever_keeps_it(
    make_pool, fake_cuda, spec, monkeypatch, kind
):
    if kind == "post":
        monkeypatch.setitem(handout._posts, "cpu", True)
        monkeypatch.setattr(
            slot_module,
            "make_handout",
            lambda spec, device, places, address: handout.PostHandout(spec, torch.device("cpu"), places),
        )
    kept = []
    pool = make_pool()
    call = OutputPool._serve
    error = interrupted_at([call], "assert outputs is not None", lambda: pool.acquire(spec, 3, fake_cuda.like(0)))
    assert type(error) is Tick
    kept = [value for name, value in variables(error) if name == "outputs" and value is not None]
    assert all(fake_cuda.is_usable(tensor) for outputs in kept for tensor in outputs)
    assert pool.stats().mapped_bytes == fake_cuda.drivers[0].mapped_bytes


@pytest.mark.parametrize("line", ["for slot in ours:", "slot.readers = []", "self._is_asleep = True"])
def test_an_interrupt_while_a_pool_falls_asleep_leaves_graphs_mapped(acquire_in, fake_cuda, spec, line):
    held = acquire_in(1, 64, spec)
    del held
    assert type(interrupted_at([OutputPool.sleep], line, acquire_in.pool.sleep)) is Tick
    assert fake_cuda.drivers[0].mapped_bytes > 0
    assert not acquire_in.pool.is_asleep
    acquire_in.pool.sleep()
    acquire_in.pool.wake()


def test_a_sleep_that_fails_and_cannot_be_undone_leaves_a_pool_that_wakes_later(acquire_in, fake_cuda, spec, monkeypatch):
    pool, fake = acquire_in.pool, fake_cuda.drivers[0]
    held = acquire_in(1, 64, spec)
    pool.acquire(OutputSpec(other=((4096,), torch.float32)), 100, fake_cuda.like(0))
    unmap, done = fake.unmap, []

    def unmap_until_another_process_takes_the_memory(address, nbytes):
        done.append(address)
        if len(done) == len(spec) + 1:
            fake.memory_bytes = 0
            raise DriverError("unmap: broken")
        unmap(address, nbytes)

    with monkeypatch.context() as patch:
        patch.setattr(fake, "unmap", unmap_until_another_process_takes_the_memory)
        with pytest.raises(DriverError):
            pool.sleep()
    assert pool.is_asleep
    with pytest.raises(BufpoolError, match="awake"):
        pool.acquire(spec, 1, fake_cuda.like(0))
    fake.memory_bytes = fake.device_bytes
    pool.wake()
    assert all(fake_cuda.is_usable(tensor) for tensor in held)


def test_a_trim_that_fails_at_an_unused_lane_leaves_its_other_slots_to_the_next_call(make_pool, fake_cuda, spec):
    pool, fake = make_pool(), fake_cuda.drivers[0]
    held = [pool.acquire(spec, 10, fake_cuda.like(0)) for _ in range(3)]
    held.clear()
    pool.trim()
    fake.fail_after(1)
    with pytest.raises(DriverError):
        pool.trim()
    fake.fail_at = None
    pool.trim()
    assert pool._slots == []
    assert not process.retired
    assert len(fake.reservations) == 1  # whose release failed
    fake.reservations.clear()


def test_a_lane_that_is_dropped_to_make_room_does_not_keep_the_new_slot(make_pool, fake_cuda, spec, monkeypatch):
    pool = make_pool()
    held = [pool.acquire(spec, 10, fake_cuda.like(0))]
    monkeypatch.setattr(ADDRESS_BUDGET, "total", ADDRESS_BUDGET.taken)
    release_idle = pool._release_idle

    def release_what_another_thread_drops(device):
        held.clear()
        return release_idle(device)

    monkeypatch.setattr(pool, "_release_idle", release_what_another_thread_drops)
    outputs = pool.acquire(spec, 10, fake_cuda.like(0))
    assert [slot for lane in pool._lanes.values() for slot in lane.slots] == pool._slots
    assert pool._slots[0].addresses == addresses(outputs)


def test_the_error_of_an_overrun_keeps_no_memory(spec, q, monkeypatch):
    monkeypatch.setenv("BUFPOOL_DEBUG", "guard")
    pool = OutputPool()
    outputs = pool.acquire(spec, 4, q)
    ctypes.memset(outputs[0].data_ptr() + outputs[0].nbytes, 1, 8)
    del outputs
    with pytest.raises(WriteContractError) as caught:
        pool.acquire(spec, 4, q)
    kept = [value for _, value in variables(caught.value) if isinstance(value, torch.Tensor) and value is not q]
    assert kept == []
    pool.close()


# Several devices


BLOCK = OutputSpec(block=((GRANULE,), torch.uint8))


@pytest.fixture
def captures_on(fake_cuda, monkeypatch):
    """Says on which devices something captures."""

    def set_them(*indexes):
        monkeypatch.setattr(driver, "capturing_stream", lambda index, known=(): 64 if index in indexes else None)

    yield set_them
    set_them()


@pytest.mark.parametrize("call", ["trim", "sleep", "close"])
def test_a_wait_for_one_device_does_not_stop_the_threads_of_another(make_pool, fake_cuda, monkeypatch, call):
    mine, other = make_pool(), make_pool()
    mine.acquire(BLOCK, 4, fake_cuda.like(0))
    other.acquire(BLOCK, 4, fake_cuda.like(1))
    waiting, launched, ended = threading.Event(), threading.Event(), []

    def wait(index):  # device 0 runs its half of a collective, and ends when device 1 has got the other half
        waiting.set()
        ended.append(launched.wait(10))

    def rank_1():
        waiting.wait(10)
        other.acquire(BLOCK, 4, fake_cuda.like(1))
        launched.set()

    thread = threading.Thread(target=rank_1)
    with monkeypatch.context() as patch:
        patch.setattr(driver, "synchronize", wait)
        thread.start()
        getattr(mine, call)()
        thread.join()
    assert ended
    assert all(ended)


def test_a_call_on_one_device_waits_for_no_other(make_pool, fake_cuda, spec, q):
    former, pool = make_pool(), make_pool()
    former.acquire(BLOCK, 4, fake_cuda.like(0))
    fake_cuda.capturing = 64
    former.close()
    fake_cuda.capturing = None
    assert len(process.retired) == 1
    pool.acquire(BLOCK, 4, fake_cuda.like(1))
    pool.acquire(spec, 4, q)
    assert fake_cuda.synchronized == []
    pool.trim()
    assert not process.retired


def test_a_device_whose_context_is_lost_stops_no_other(make_pool, fake_cuda, monkeypatch, spec, q):
    former, pool = make_pool(), make_pool()
    held = former.acquire(BLOCK, 4, fake_cuda.like(0))
    former.close()
    del held
    process.note_capture(torch.device("cuda", 0), 77)

    def lost(*args):
        raise DriverError("an illegal memory access was encountered")

    with monkeypatch.context() as patch:
        patch.setattr(driver, "synchronize", lost)
        patch.setattr(driver, "is_capturing", lost)
        pool.acquire(spec, 4, q)
        pool.acquire(BLOCK, 4, fake_cuda.like(1))


def test_torchs_cache_is_left_alone_while_another_device_captures(make_pool, fake_cuda, captures_on):
    pool = make_pool()
    fake_cuda.drivers[0].memory_bytes = 2 * GRANULE
    captures_on(1)
    with pytest.raises(PoolLimitError):
        pool.acquire(BLOCK, 3, fake_cuda.like(0))
    assert fake_cuda.emptied == 0
    captures_on()
    with pytest.raises(PoolLimitError):
        pool.acquire(BLOCK, 3, fake_cuda.like(0))
    assert fake_cuda.emptied == 1


@pytest.mark.parametrize("device", [0, 1])
def test_a_wake_leaves_torchs_cache_alone_while_something_captures(make_pool, fake_cuda, captures_on, device):
    pool = make_pool()
    pool.acquire(BLOCK, 4, fake_cuda.like(0))
    pool.sleep()
    fake_cuda.drivers[0].memory_bytes = 2 * GRANULE
    captures_on(device)
    with pytest.raises(PoolLimitError):
        pool.wake()
    assert fake_cuda.emptied == 0
    captures_on()
    fake_cuda.drivers[0].memory_bytes = 2**26
    pool.wake()


def test_a_wake_that_fails_says_which_device_is_short(make_pool, fake_cuda, monkeypatch):
    pool = make_pool()
    for index in (0, 1):
        pool.acquire(BLOCK, 4, fake_cuda.like(index))
    pool.sleep()
    fake_cuda.drivers[1].memory_bytes = 2 * GRANULE
    free = {0: 100 * GRANULE, 1: 2 * GRANULE}
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (free[torch.device(device).index], 2**26))
    with pytest.raises(PoolLimitError, match="cuda:1: wake") as caught:
        pool.wake()
    assert (caught.value.need, caught.value.have, caught.value.limit) == (4 * GRANULE, 0, 2 * GRANULE)
    fake_cuda.drivers[1].memory_bytes = 2**26
    pool.wake()


@pytest.mark.parametrize("is_idle", [False, True])
def test_lanes_of_another_device_give_their_addresses_back_if_it_is_idle(make_pool, fake_cuda, monkeypatch, spec, is_idle):
    pool = make_pool()
    fake_cuda.idle = is_idle
    monkeypatch.setattr(ADDRESS_BUDGET, "total", ADDRESS_BUDGET.taken + 4 * GRANULE)
    for fake_cuda.stream in (0, 64):
        pool.acquire(spec, 10, fake_cuda.like(0))
    fake_cuda.stream = 0
    with contextlib.nullcontext() if is_idle else pytest.raises(PoolLimitError):
        pool.acquire(spec, 10, fake_cuda.like(1))
    assert len(pool.stats().lanes) == (1 if is_idle else 2)
    fake_cuda.stream = 128
    pool.acquire(spec, 10, fake_cuda.like(0))
    fake_cuda.stream = 0


def test_branches_of_a_shared_set_are_counted_on_their_device(make_pool, fake_cuda):
    pool = make_pool()

    def acquire_in(capture, stream, index):
        fake_cuda.capture, fake_cuda.stream = capture, stream
        try:
            return addresses(pool.acquire(BLOCK, 4, fake_cuda.like(index)))
        finally:
            fake_cuda.capture, fake_cuda.stream = None, 0

    with pool.shared_capture("set"):
        first = acquire_in(1, 128, 1)
        acquire_in(2, 64, 0)
        assert acquire_in(2, 128, 1) == first


def test_addresses_of_a_pool_that_is_gone_come_back_to_a_call_on_another_device(make_pool, fake_cuda, monkeypatch, spec):
    monkeypatch.setattr(ADDRESS_BUDGET, "total", ADDRESS_BUDGET.taken + 4 * GRANULE)
    former, pool = OutputPool(), make_pool()
    for fake_cuda.stream in (0, 64):
        former.acquire(spec, 10, fake_cuda.like(0))
    fake_cuda.stream = 0
    del former
    gc.collect()
    assert len(process.retired) == 2
    with pytest.raises(PoolLimitError):
        pool.acquire(spec, 10, fake_cuda.like(1))  # device 0 may be at work
    fake_cuda.idle = True
    pool.acquire(spec, 10, fake_cuda.like(1))
    assert not process.retired


def test_addresses_come_back_from_as_many_devices_as_it_takes(make_pool, fake_cuda, monkeypatch, spec):
    pool, little = make_pool(), OutputSpec(little=((16,), torch.uint8))
    fake_cuda.idle = True
    monkeypatch.setattr(ADDRESS_BUDGET, "total", ADDRESS_BUDGET.taken + 5 * GRANULE)
    pool.acquire(little, 1, fake_cuda.like(1))
    for fake_cuda.stream in (0, 64):
        pool.acquire(spec, 10, fake_cuda.like(0))
    fake_cuda.stream = 0
    pool.acquire(spec, 10, fake_cuda.like(1))
    assert len(pool.stats().lanes) == 1


def test_a_call_waits_for_no_reader_on_another_device_to_get_addresses(make_pool, fake_cuda, monkeypatch, spec):
    pool = make_pool()
    monkeypatch.setattr(driver, "is_idle", lambda index, known=(): index == 0)
    monkeypatch.setattr(ADDRESS_BUDGET, "total", ADDRESS_BUDGET.taken + 4 * GRANULE)
    for fake_cuda.stream in (0, 64):
        pool.acquire(spec, 10, fake_cuda.like(0))
    fake_cuda.stream = 0
    for slot in pool._slots:
        slot.readers = [reader(9, 2)]
    fake_cuda.synchronized.clear()
    with pytest.raises(PoolLimitError):
        pool.acquire(spec, 10, fake_cuda.like(1))
    assert fake_cuda.synchronized == []


@pytest.mark.parametrize("call", ["trim", "sleep", "close"])
def test_a_capture_on_the_device_of_a_gone_pool_leaves_the_wait_without_the_lock(
    make_pool, fake_cuda, captures_on, monkeypatch, call
):
    former, mine = make_pool(), make_pool()
    captures_on(2)
    former.acquire(BLOCK, 4, fake_cuda.like(2))
    former.close()
    mine.acquire(BLOCK, 4, fake_cuda.like(0))
    owned = []
    with monkeypatch.context() as patch:
        patch.setattr(driver, "synchronize", lambda index: owned.append((index, process.lock._is_owned())))
        getattr(mine, call)()
    assert owned == [(0, False), (0, True)]


def test_a_lack_of_memory_says_so_though_another_device_is_lost(make_pool, fake_cuda, monkeypatch):
    pool = make_pool()
    fake_cuda.drivers[0].memory_bytes = 2 * GRANULE

    def capturing_stream(index, known=()):
        if index == 1:
            raise DriverError("an illegal memory access was encountered")

    monkeypatch.setattr(driver, "capturing_stream", capturing_stream)
    with pytest.raises(PoolLimitError):
        pool.acquire(BLOCK, 3, fake_cuda.like(0))
    assert fake_cuda.emptied == 0


def test_a_capture_elsewhere_is_nothing_to_a_wake_of_blocks_on_the_host(make_pool, fake_cuda, monkeypatch, q):
    monkeypatch.setattr(host_memory, "is_available", lambda: False)
    pool = make_pool()
    pool.acquire(BLOCK, 3, fake_cuda.like(0))
    pool.acquire(BLOCK, 3, q)
    assert pool.stats().arena == "cuda+torch"
    pool.sleep()
    fake_cuda.capturing = 64
    pool.wake()
    fake_cuda.capturing = None


def test_a_slot_whose_release_is_interrupted_is_asked_nothing_any_more(make_pool, q):
    spec, pool, other = OutputSpec(page=((2**16,), torch.uint8)), make_pool(), make_pool()
    pool.acquire(spec, 4, q)
    assert type(interrupted_at([OutputPool.close], "self._slots.clear", pool.close)) is Tick
    assert type(interrupted_at([Slot.release], "for arena in", pool.close)) is Tick
    other.acquire(spec, 4, q)
    other.acquire(spec, 400, q)
    assert not process.retired


def test_idle_lanes_of_a_device_that_captures_keep_their_addresses(make_pool, fake_cuda, captures_on, monkeypatch, spec):
    pool = make_pool()
    fake_cuda.idle = True
    captures_on(0)
    monkeypatch.setattr(ADDRESS_BUDGET, "total", ADDRESS_BUDGET.taken + 4 * GRANULE)
    for fake_cuda.stream in (0, 64):
        pool.acquire(spec, 10, fake_cuda.like(0))
    fake_cuda.stream = 0
    with pytest.raises(PoolLimitError):
        pool.acquire(spec, 10, fake_cuda.like(1))
    assert fake_cuda.synchronized == []
    assert len(pool.stats().lanes) == 2


def test_a_call_that_gives_its_new_slot_up_waits_for_no_other_device(make_pool, fake_cuda, monkeypatch):
    former, pool = make_pool(), make_pool()
    former.acquire(BLOCK, 4, fake_cuda.like(0))
    fake_cuda.capturing = 64
    former.close()
    fake_cuda.capturing = None
    monkeypatch.setattr(handout.OwnerHandout, "take", lambda handout, rows: 1 // 0)
    with pytest.raises(ZeroDivisionError):
        pool.acquire(BLOCK, 4, fake_cuda.like(1))
    assert fake_cuda.synchronized == [1]
    assert fake_cuda.drivers[1].is_clean


def test_blocks_that_a_failing_sleep_made_anew_are_waited_for(make_pool, fake_cuda, torch_arenas_on_host, monkeypatch):
    pool, like, sleep = make_pool(arena="torch"), fake_cuda.like(0), Slot.sleep
    held = [pool.acquire(BLOCK, 4, like) for _ in range(2)]
    held.clear()
    waits = []

    def sleep_once(slot):
        if slot is pool._slots[1]:
            raise DriverError("injected")
        waits.extend(fake_cuda.synchronized)
        fake_cuda.synchronized.clear()
        sleep(slot)

    with monkeypatch.context() as patch:
        patch.setattr(Slot, "sleep", sleep_once)
        with pytest.raises(DriverError, match="injected"):
            pool.sleep()
    assert waits == [0, 0]
    assert fake_cuda.synchronized == [0]  # after the blocks of the first slot came anew
    assert not pool.is_asleep


@pytest.mark.parametrize(("device", "is_at_rest"), [("cpu", True), ("meta", False), ("cuda:0", True), ("cuda:1", False)])
def test_a_device_that_cannot_be_asked_is_not_at_rest(fake_cuda, monkeypatch, device, is_at_rest):
    def is_idle(index, known=()):
        if index == 1:
            raise DriverError("an illegal memory access was encountered")
        return True

    monkeypatch.setattr(driver, "is_idle", is_idle)
    assert process.is_at_rest(torch.device(device)) is is_at_rest


def test_a_reader_is_asked_for_on_its_own_device(acquire_in, fake_cuda, spec, events, monkeypatch):
    asked = []
    monkeypatch.setattr(driver, "is_capturing", lambda stream: False)
    monkeypatch.setattr(driver, "is_stream_idle", lambda index, stream: bool(asked.append((index, stream))))
    acquire_in(1, 64, spec)
    acquire_in.pool._slots[0].readers = [reader(0, 3)]
    fake_cuda.end_graph(1)
    acquire_in(2, 64, spec)
    assert asked == [(3, 0)]

"""The pool: finds the lane, lets a slot serve that nobody holds, grows it in place.

Note [One acquire at a time]
    Rationale: between finding a slot idle and handing it out nothing else may find it idle too.
    Approach: one re-entrant lock for all pools of the process, held for a few microseconds, and a flag in each pool that
    says that a call is under way. (With a lock each, finalizers that call other pools could wait for one another.) A
    collection inside a call can run somebody's ``__del__`` that calls the pool again from the same thread: it gets through
    the lock, sees the flag, and is served from ``torch.empty`` (a counted spill) instead of touching half-changed lanes;
    calls other than ``acquire`` raise. No logging, no ``empty_cache`` and no user code runs under the lock, and finalizers
    only append to a queue. Calls whose purpose is to give memory back wait for the device without the lock first.
    Limits: inside a capture a re-entrant ``acquire`` raises, because torch.empty would draw from the graph's private pool.
    A call that has to make room waits under the lock, for its own device and those of readers.

Concurrency:
    Every public method may be called from any thread, also on free-threaded Python. ``sleep``, ``trim`` and ``close`` wait
    for the device before they take memory away. A forked child may use host lanes; CUDA lanes raise there.
"""

from __future__ import annotations

import contextlib
import logging
import os
import sys
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch

from . import driver, host_memory, process
from .allocator import FreshAllocator, Like, home_device
from .debug import Debug
from .device import present_device
from .errors import BufpoolError, CaptureError, PoolLimitError
from .lane import Lane
from .pin import Pin
from .place import Place, SharedCaptures
from .slot import Slot
from .spec import OutputSpec, row_count
from .stats import LaneStats, PoolStats
from .torch_state import (
    PER_THREAD_STREAM,
    current_device,
    dispatch_depth,
    has_no_memory,
    is_current_stream_capturing,
    is_inference,
    is_jit_tracing,
    is_pre_dispatch_tracing,
    is_tracing,
    normal_mode,
    raw_stream,
    tracing_mode,
    transform_level,
    without_modes,
)

__all__ = ["OutputPool", "default_pool", "set_default_pool"]

_logger = logging.getLogger("bufpool")
_fresh = FreshAllocator()
_ARENAS = ("auto", "cuda", "host", "torch")

_Note = tuple[int, str]  # logging level and text, emitted when the lock is free again


class OutputPool:
    """Hands out kernel outputs with ``torch.empty`` semantics on memory whose addresses never move.

    Args:
        max_bytes: most mapped bytes on each device; None for the device's own limit.
        max_slots: results of one eager lane that may be held at once before the next one spills to ``torch.empty``.
        arena: ``auto`` (CUDA virtual memory on CUDA, a lazily committed range on the host, torch's allocator elsewhere), or
            one of ``cuda``, ``host``, ``torch`` to insist.
        trace: remember where each held result was acquired; ``stats()`` lists it. Costs some microseconds a call.

    Raises:
        TypeError, ValueError: an argument of the wrong kind.

    Example:
        >>> import torch, bufpool
        >>> spec = bufpool.OutputSpec(out=((4, 8), torch.bfloat16), lse=((4,), torch.float32))
        >>> pool = bufpool.OutputPool()
        >>> q = torch.zeros(10, 4, 8)
        >>> out, lse = pool.acquire(spec, rows=10, like=q)
        >>> tuple(out.shape), tuple(lse.shape)
        ((10, 4, 8), (10, 4))
    """

    def __init__(
        self, max_bytes: int | None = None, max_slots: int = 8, *, arena: str = "auto", trace: bool = False
    ) -> None:
        if max_bytes is not None:
            max_bytes = _positive("max_bytes", max_bytes)
        self._max_slots = _positive("max_slots", max_slots)
        if arena not in _ARENAS:
            raise ValueError(f"arena: expected one of {', '.join(_ARENAS)}, got {arena!r}")
        self._max_bytes = max_bytes
        self._arena = arena
        self._trace = bool(trace)
        self._debug = Debug.from_environment()
        self._lock = process.lock
        self._busy = False
        self._has_lost_cuda = process.has_lost_cuda
        self._lanes: dict[tuple[Any, ...], Lane] = {}
        self._quick: dict[tuple[Any, ...], Lane] = {} if trace or self._debug else self._lanes
        """What the hit path sees: the eager lanes, or nothing while the pool is closed, asleep, traced or debugged."""
        self._captures: dict[tuple[Any, ...], Lane] = {}
        self._shared = SharedCaptures()
        self._free: list[Slot] = []
        self._served: set[torch.device] = set()  # devices of which the log says what serves
        self._slots: list[Slot] = []  # all of them; the finalizer owns this list too
        self._former = _Counts()
        self._peak_bytes = 0
        self._is_asleep = False
        self._is_closed = False
        self._runner_calls: weakref.WeakSet[_RunnerCall] = weakref.WeakSet()
        """Calls of graph runners under way, during which the pool stays awake."""
        self._finalizer = weakref.finalize(self, process.retired.extend, self._slots)
        self._finalizer.atexit = False
        process.watch_forks()
        process.pools[id(self)] = self

    # Handing out

    def acquire(self, spec: OutputSpec, rows: int, like: Like) -> Any:
        """Return outputs ``[rows, *row_shape]`` for a kernel that writes every one of their rows.

        The tensors are contiguous, new in every respect (leaf, no grad, storage of exactly their rows), on the device of
        ``like``, ordered after earlier work of its current stream, and start at a multiple of 256 bytes (spilled ones where
        torch puts them). Their contents are undefined. The memory is handed out again only when no tensor, view, storage or
        other export of it is left; holding only ``data_ptr()`` does not count.

        Args:
            spec: what the kernel writes.
            rows: leading dimension, >= 0. With 0 no memory is touched.
            like: an input tensor, or several (a sequence, or a mapping of names): the outputs live where they live.

        Returns:
            A named tuple of tensors in the order of the spec.

        Raises:
            DeviceMismatchError: the tensors of ``like`` are on different devices.
            PoolLimitError: ``max_bytes``, the device's memory or the address range is too small.
            CaptureError: inside a graph capture, an arena of kind ``torch`` would have to grow.
            BufpoolError: the pool is closed or asleep, or was made before this process was forked.
            TypeError, ValueError: an argument of the wrong kind.
        """
        if is_tracing():
            return _fresh.acquire(spec, rows, like)
        tensor = like if type(like) is torch.Tensor else _first_of(like)
        if (
            type(rows) is int
            and tensor is not None
            and type(spec) is OutputSpec
            and not (dispatch_depth() or transform_level() is not None or is_jit_tracing() or is_pre_dispatch_tracing())
        ):
            index = tensor.get_device()
            if index >= 0:
                stream = raw_stream(index) if tensor.is_cuda else PER_THREAD_STREAM
            else:
                stream = 0 if tensor.is_cpu else PER_THREAD_STREAM
            key = (index, stream, spec.key)
            # Only a stream that was used before can have a lane, so a forked child asks torch nothing about CUDA here.
            quick = self._quick
            lane = quick.get(key)
            if lane is not None and (
                stream == 0
                or (stream != PER_THREAD_STREAM and index == current_device() and not is_current_stream_capturing())
            ):
                with self._lock:
                    # A lane that was dropped meanwhile has no capacity: its slots refuse.
                    if self._quick is quick and not self._busy and rows > 0:
                        current = lane.current
                        if is_inference():
                            with normal_mode(False):
                                outputs = lane.take(rows)
                        elif current is None or current.readers:
                            outputs = lane.take(rows)
                        else:
                            outputs = current.handout.take(rows)
                            if outputs is None:
                                outputs = lane.take(rows)
                            elif current.readers:  # declared by a finalizer just before it dropped the result
                                outputs = None
                            else:
                                lane.acquires += 1
                        if outputs is not None:
                            return outputs
        return self._acquire(spec, rows, like)

    def _acquire(self, spec: OutputSpec, rows: Any, like: Like) -> Any:
        """Everything that the hit path leaves out."""
        if not isinstance(spec, OutputSpec):
            raise TypeError(f"spec: expected an OutputSpec, got {spec!r}")
        if isinstance(rows, torch.SymInt):
            return _fresh.acquire(spec, rows, like)  # type: ignore[arg-type]
        rows = row_count(rows)
        device = home_device(like)
        if has_no_memory(like) or tracing_mode():
            return _fresh.acquire(spec, rows, like)
        if rows == 0:
            self._check_usable(device)
            with self._lock:
                self._former.acquires += 1
            with normal_mode(False):
                return _fresh.acquire(spec, 0, like)
        self._check_usable(device)  # before CUDA is asked: a forked child gets our words
        place = Place(spec, device, self._shared)
        site = _call_site() if self._trace or self._debug else None

        def serve(notes: list[_Note]) -> Any:
            with without_modes(), normal_mode(False):
                return self._serve(place, rows, site, notes)

        if self._busy and self._is_owned():
            return self._reentered(place, rows, like)
        outputs = self._with_memory("acquire", place, serve)
        return self._spilled(place, rows, like) if outputs is None else outputs

    def _spilled(self, place: Place, rows: int, like: Like) -> Any:
        """Outputs from ``torch.empty``, counted when they are there."""
        with normal_mode(False):
            outputs = _fresh.acquire(place.spec, rows, like)
            if self._debug is not None:
                self._debug.fill_spilled(outputs)
        storages = []
        if place.device.type == "cuda":
            with without_modes():
                storages = [tensor.untyped_storage() for tensor in outputs if type(tensor) is torch.Tensor]
        with self._lock:
            process.spills.note(storages)
            counts = self._lanes.get(place.key, self._former)
            counts.acquires += 1
            counts.misses += 1
            counts.spills += 1
        return outputs

    def _reentered(self, place: Place, rows: int, like: Like) -> Any:
        """Serve a call that a finalizer made inside another call of the same thread (Note [One acquire at a time])."""
        if place.capture is not None:
            raise CaptureError("acquire: expected no call from a finalizer inside a capture, got one")
        return self._spilled(place, rows, like)

    def _serve(self, place: Place, rows: int, site: str | None, notes: list[_Note]) -> Any:
        """Outputs from a slot of the lane; None for a spill. Under the lock. Commits last."""
        self._check_usable(place.device)
        lanes = self._lanes if place.capture is None else self._captures
        lane = lanes.get(place.key)
        is_new_lane = lane is None
        if lane is None:
            lane = Lane(place.lane_key())
        room = rows if self._debug is None else rows + self._debug.guard_rows
        slot = lane.idle_slot(room, place.can_wait_for)
        is_new_slot = slot is None
        if slot is None and place.capture is None and len(lane.slots) >= self._max_slots:
            self._warn_of_spills(lane, place, notes)
            return None
        if slot is None:
            slot = self._free_slot(place, room)
        is_from_free = is_new_slot and slot is not None
        if slot is None:
            slot = self._new_slot(place, room, notes)
            if not is_new_lane and lanes.get(place.key) is not lane:  # it was dropped to make room
                lane, is_new_lane = Lane(place.lane_key()), True
        is_growing = room > slot.capacity
        readers = slot.readers
        is_touched = not slot.is_stable  # torch's block may carry work of this stream
        try:
            if slot.readers:
                place.wait_for_readers(slot)
            if self._debug is not None and place.capture is None and not process.is_capturing(place.device):
                self._debug.check(slot)
            if is_growing:
                self._grow(slot, room, place.capture is not None, notes)
            is_touched = True
            if place.capture is not None and all(pin.capture_id != place.capture for pin in slot.pins):
                slot.pins.append(Pin(place.capture, place.graph))
            outputs = slot.handout.take(rows)
            assert outputs is not None
        except BaseException:
            outputs = None
            if is_new_slot:
                slot.readers, slot.is_clean = readers, slot.is_clean and not is_touched
            if is_new_slot and not is_from_free:
                if slot.pins or slot.is_live():
                    self._free.append(slot)  # a graph has seen it already, or a signal handler
                else:
                    self._discard(slot, place.capture is not None)
            raise
        if place.capture is not None:
            self._quick = {}  # the next eager call looks whether graphs are gone
            if not place.thread:
                process.note_capture(place.device, place.stream)
        slot.site = site
        if is_new_lane:
            lanes[place.key] = lane
        if is_from_free:
            self._free.remove(slot)
        if is_new_slot:
            lane.slots.append(slot)
        if lane.current is not None and lane.current is not slot:
            lane.rotations += 1
        lane.current = slot
        lane.acquires += 1
        lane.misses += is_growing or (is_new_slot and not is_from_free)
        lane.grows += is_growing
        lane.note_peak()
        if self._debug is not None:
            self._debug.fill(slot, is_capture=place.capture is not None)
        return outputs

    def _warn_of_spills(self, lane: Lane, place: Place, notes: list[_Note]) -> None:
        if not lane.was_warned:
            lane.was_warned = True
            notes.append(
                (
                    logging.WARNING,
                    f"{place.device}: all {len(lane.slots)} slots of ({', '.join(place.spec.names)}) are held; this and"
                    " further results come from torch.empty until one is dropped (stats().spills counts them;"
                    " trace=True says who holds)",
                )
            )

    def reserve(self, spec: OutputSpec, rows: int, like: Like | torch.device | str) -> None:
        """Map memory for ``rows`` rows ahead of need; hands nothing out.

        The next result on the current stream of the device of ``like`` finds its memory mapped. If no slot of that lane is
        idle, or there is no such lane yet, the memory waits for the first lane, or capture, of the same spec and device
        that needs a slot. Reserving the same again maps nothing more.

        Args:
            spec: what will be acquired.
            rows: how many rows, >= 0.
            like: a tensor, several, or a device.

        Raises:
            DeviceMismatchError, PoolLimitError, CaptureError, BufpoolError: as in ``acquire``.
            TypeError, ValueError: an argument of the wrong kind, or a device that is not here.
        """
        if not isinstance(spec, OutputSpec):
            raise TypeError(f"spec: expected an OutputSpec, got {spec!r}")
        rows = row_count(rows)
        if isinstance(like, (str, torch.device)):
            device = present_device("like", like)
            is_without_memory = device.type == "meta"
        else:
            device = home_device(like)
            is_without_memory = has_no_memory(like)
        if is_without_memory or tracing_mode():
            return
        self._check_usable(device)
        if rows == 0:
            return
        if self._debug is not None:
            rows += self._debug.guard_rows
        place = Place(spec, device, self._shared)

        def serve(notes: list[_Note]) -> bool:
            with without_modes(), normal_mode(False):
                return prepare(notes)

        def prepare(notes: list[_Note]) -> bool:
            self._check_usable(place.device)
            lane = (self._lanes if place.capture is None else self._captures).get(place.key)
            slot = lane.idle_slot(rows, place.can_wait_for) if lane is not None else None
            is_free = slot is None
            if slot is None:
                slot = self._free_slot(place, rows)
            is_new = slot is None
            if slot is None:
                slot = self._new_slot(place, rows, notes)
            readers = slot.readers
            try:
                is_growing = rows > slot.capacity
                if is_growing:
                    if slot.readers and not slot.is_stable:
                        place.wait_for_readers(slot)  # torch may give the former block to anybody
                    self._grow(slot, rows, place.capture is not None, notes)
            except BaseException:
                slot.readers = readers
                if is_free and not slot.is_stable:
                    slot.is_clean = False
                if is_new:
                    self._discard(slot, place.capture is not None)
                raise
            slot.handout.high_water_rows = max(slot.high_water_rows, rows)
            if is_free and is_growing and not slot.is_stable:
                slot.is_clean = False  # torch's block may carry work of this stream
            if is_new:
                self._free.append(slot)
            if is_free:
                self._former.grows += is_growing
            elif lane is not None:
                lane.grows += is_growing
                lane.note_peak()
            return True

        self._with_memory("reserve", place, serve)

    @contextlib.contextmanager
    def shared_capture(self, name: str) -> Iterator[None]:
        """Let the graphs captured inside, by this thread, share one set of slots, as large as the largest needs.

        For graphs that are replayed in turn, such as one for each row count: a replay overwrites what the last one left,
        as with graphs that share a memory pool of torch. Results that somebody still holds are not shared away: the next
        capture then takes another slot. The same name continues the same set as long as one of its graphs lives.

        Args:
            name: names the set within this pool.

        Raises:
            TypeError: ``name`` is not a string.
        """
        if not isinstance(name, str):
            raise TypeError(f"name: expected a string, got {name!r}")
        former, self._shared.name = self._shared.name, name
        try:
            yield
        finally:
            self._shared.name = former

    def release_captures(self) -> int:
        """Release the pins of graphs whose end cannot be seen; the caller knows that those graphs are gone.

        Only needed where the driver offers no user objects; elsewhere a pin ends with its graph, and this does nothing.

        Returns:
            How many pins were released.
        """
        with self._lock:
            self._refuse_reentry("release_captures")
            self._busy = True
            try:
                released = 0
                for slot in self._slots:
                    kept = [pin for pin in slot.pins if pin.is_tracked]
                    released += len(slot.pins) - len(kept)
                    slot.pins = kept
                return released
            finally:
                self._busy = False

    def record_stream(self, outputs: torch.Tensor | Iterable[torch.Tensor], stream: torch.cuda.Stream) -> None:
        """Declare that ``stream`` reads these results; their memory is reused only after its work.

        What is queued on ``stream`` until the last holder drops the result counts, also work queued after this call.
        ``torch.Tensor.record_stream`` has no effect on memory of the pool: use this one. Results that spilled are torch's
        own memory; torch is told, whatever keeps them: also a tensor that came back from a DLPack capsule, of which
        torch's own method knows nothing.

        Args:
            outputs: what ``acquire`` returned, or some of its tensors, or views of them.
            stream: the stream that reads.

        Raises:
            TypeError: not tensors, or not a CUDA stream.
            ValueError: a tensor is not on a CUDA device, or belongs to another pool; the stream is the per-thread default
                one, which is another stream in the thread that waits for it.
        """
        if not isinstance(stream, torch.cuda.Stream):
            raise TypeError(f"stream: expected a torch.cuda.Stream, got {stream!r}")
        if stream.cuda_stream == PER_THREAD_STREAM:
            raise ValueError("stream: expected one that is the same in all threads, got the per-thread default stream")
        for tensor in [outputs] if isinstance(outputs, torch.Tensor) else list(outputs):
            if not isinstance(tensor, torch.Tensor):
                raise TypeError(f"outputs: expected tensors, got {tensor!r}")
            if not tensor.is_cuda:
                raise ValueError(f"outputs: expected tensors on a CUDA device, got one on {tensor.device}")
            if tensor.numel() == 0:
                continue
            address = tensor.untyped_storage().data_ptr()
            with self._lock:
                self._refuse_reentry("record_stream")
                self._busy = True
                try:
                    slots = [*self._slots, *process.retired.copy()]  # results outlive their pool
                    slot = next((slot for slot in slots if slot.has_address(address)), None)
                    if slot is not None:
                        known = ((reader.device, reader.cuda_stream) for reader in slot.readers)
                        if (stream.device, stream.cuda_stream) not in known:
                            slot.readers = [*slot.readers, stream]
                        continue
                    spilled = process.spills.at(address)
                finally:
                    self._busy = False
            for pool in process.every_pool():
                if pool is not self and any(slot.has_address(address) for slot in list(pool._slots)):
                    raise ValueError("outputs: expected a result of this pool, got one of another pool")
            (tensor if spilled is None else spilled).record_stream(stream)

    # Memory

    def _with_memory(self, call: str, place: Place, serve: Callable[[list[_Note]], Any]) -> Any:
        """Run ``serve`` under the lock; on lack of memory make room, first in torch's cache, then here, and try again."""
        for attempt in range(3):
            notes: list[_Note] = []
            try:
                with self._lock:
                    self._refuse_reentry(call)
                    self._busy = True
                    try:
                        self._collect(place.device, place.capture is not None)
                        if attempt == 2 and not process.is_capturing(place.device):
                            self._evict(place.device, None, notes)
                        return serve(notes)
                    finally:
                        self._busy = False
            except driver.DeviceOutOfMemoryError as error:
                # Making room may synchronise and call torch: legal only while nothing captures.
                if attempt == 2 or place.capture is not None or process.is_capturing(place.device):
                    have = self._mapped_bytes(place.device)
                    limit = _device_bytes(place.device)
                    what = f"{place.device}: memory ({error})"
                    raise PoolLimitError(what, need=error.nbytes, have=have, limit=limit) from error
                if attempt == 0 and place.device.type == "cuda" and not process.is_capturing_anywhere():
                    torch.cuda.empty_cache()
            finally:
                _emit(notes)
        raise AssertionError("unreachable")

    def _new_slot(self, place: Place, rows: int, notes: list[_Note]) -> Slot:
        kind = self._arena_kind(place.device)
        while True:
            try:
                slot = Slot(place.spec, place.device, kind, rows)
                break
            except PoolLimitError as error:
                # Address space is short: lanes that nobody uses give theirs back, unless all of it would not do.
                if place.capture is not None or error.need > error.limit or not self._release_idle(place):
                    raise
        self._slots.append(slot)
        if place.device not in self._served:
            self._served.add(place.device)
            notes.append(self._what_serves(place.device, kind))
        return slot

    def _what_serves(self, device: torch.device, kind: str) -> _Note:
        if kind != "torch" or self._arena == "torch":
            return logging.INFO, f"{device}: arenas of kind {kind!r} serve"
        reason = "no virtual memory of bufpool's own on such devices"
        if device.type == "cuda":
            reason = driver.unavailable_reason() or "the device has no virtual memory management"
        elif device.type == "cpu":
            reason = "no lazily committed memory on this system"
        return logging.WARNING, f"{device}: arenas of kind 'torch' serve, which move when they grow: {reason}"

    def _free_slot(self, place: Place, rows: int) -> Slot | None:
        """The free slot of the same spec and device that fits best; it stays in the list."""
        fitting = [
            slot
            for slot in self._free
            if slot.device == place.device and slot.spec == place.spec and slot.is_idle() and place.can_wait_for(slot)
        ]
        if any(not slot.is_clean for slot in fitting):
            if self._has_come_to_rest(fitting, place):
                for slot in fitting:
                    slot.is_clean = True
            else:
                fitting = [slot for slot in fitting if slot.is_clean]
        with_room = [slot for slot in fitting if slot.capacity >= rows]
        if with_room:
            return min(with_room, key=lambda slot: slot.capacity)
        return max(fitting, key=lambda slot: slot.capacity, default=None)

    @staticmethod
    def _has_come_to_rest(slots: list[Slot], place: Place) -> bool:
        """Whether all work on these slots is done: waited for, unless something captures.

        A capture cannot wait. It asks the streams that it knows, to which those made outside torch do not belong.
        """
        if place.capture is not None:
            return driver.is_idle(place.device.index, process.capture_streams(place.device) | {place.stream})
        if process.capturing_device(slots) is not None:
            return False
        process.synchronize(slots)
        return True

    def _discard(self, slot: Slot, is_capture: bool = False) -> None:
        """Give a slot up, addresses too. In a capture, where nothing may wait, it joins those of closed pools."""
        self._slots.remove(slot)
        if slot.mapped_bytes == 0:  # nothing is there that could be worked on
            slot.release()
            return
        process.retired.append(slot)
        if not is_capture:
            process.release_retired(slot.device)

    def _grow(self, slot: Slot, rows: int, is_capture: bool, notes: list[_Note]) -> None:
        slot.check_reservation(rows)
        former = slot.mapped_bytes
        added = slot.bytes_for(rows) - former
        if self._max_bytes is not None:
            self._make_room(slot, added, is_capture, notes)
        slot.grow(rows)
        self._note_peak()
        notes.append(
            (
                logging.INFO,
                f"{slot.device}: mapped {slot.mapped_bytes - former} bytes more for {rows} rows of"
                f" ({', '.join(slot.spec.names)}), {slot.mapped_bytes} bytes in this slot",
            )
        )

    def _make_room(self, slot: Slot, added: int, is_capture: bool, notes: list[_Note]) -> None:
        """Unmap idle slots until ``added`` bytes fit under ``max_bytes``; change nothing if they cannot."""
        limit = self._max_bytes
        assert limit is not None
        have = self._mapped_bytes(slot.device)
        excess = have + added - limit
        if excess <= 0:
            return
        what = f"{slot.device}: max_bytes of the pool"
        idle = self._idle_slots(slot.device, slot)
        if sum(other.mapped_bytes for other in idle) < excess:
            raise PoolLimitError(what, need=added, have=have, limit=limit)
        if is_capture or process.is_capturing(slot.device):
            raise PoolLimitError(f"{what} (idle slots stay mapped during a capture)", need=added, have=have, limit=limit)
        self._evict(slot.device, slot, notes, excess)

    def _idle_slots(self, device: torch.device, keep: Slot | None) -> list[Slot]:
        """Mapped slots of the device that neither live nor are pinned, largest first."""
        idle = [
            slot
            for slot in self._slots
            if slot is not keep
            and slot.device == device
            and slot.mapped_bytes
            and slot.is_ours
            and slot.is_idle()
            and not any(process.is_capturing(reader.device) for reader in slot.readers if reader.device != device)
        ]
        return sorted(idle, key=lambda slot: slot.mapped_bytes, reverse=True)

    def _evict(self, device: torch.device, keep: Slot | None, notes: list[_Note], enough: int | None = None) -> None:
        """Unmap idle slots of the device, until ``enough`` bytes came free. The caller made sure that nothing captures."""
        idle = self._idle_slots(device, keep)
        if not idle:
            return
        process.synchronize(idle)
        freed = 0
        for slot in idle:
            if enough is not None and freed >= enough:
                break
            freed += slot.shrink(0)
            slot.readers = []
        notes.append((logging.INFO, f"{device}: unmapped {freed} bytes of idle slots to make room"))

    def _release_idle(self, place: Place) -> int:
        """Release idle slots of the device, or else those of another device that is idle, with their address ranges.

        Returns how many. Nothing is released on a device that captures.
        """
        idle: dict[torch.device, list[Slot]] = {place.device: []}
        for slot in self._slots:
            if slot.is_ours and slot.is_idle():
                idle.setdefault(slot.device, []).append(slot)
        for slots in idle.values():
            if not slots or not process.can_be_waited_for(slots, place.device):
                continue
            if process.capturing_device(slots) is not None:
                continue
            process.synchronize(slots)
            for slot in slots:
                self._drop(slot)
            return len(slots)
        return 0

    def _drop(self, slot: Slot) -> None:
        """Give a slot up and take it out of its lane or the free list."""
        if slot in self._free:
            self._free.remove(slot)
        for lanes in (self._lanes, self._captures):
            for key, lane in list(lanes.items()):
                if slot in lane.slots:
                    lane.slots.remove(slot)
                    if lane.current is slot:
                        lane.current = None
                    if not lane.slots:
                        self._forget(lanes, key)
        self._discard(slot)

    def _forget(self, lanes: dict[tuple[Any, ...], Lane], key: tuple[Any, ...]) -> None:
        self._former.add(lanes.pop(key))

    def _collect(self, home: torch.device | None, is_capture: bool = False) -> None:
        """Take back slots of graphs that are gone, and, outside captures, memory of pools that are gone.

        ``home``: the device of a call, which waits for no other one.
        """
        for key, lane in list(self._captures.items()):
            for slot in [slot for slot in lane.slots if slot.is_idle()]:
                lane.slots.remove(slot)
                if lane.current is slot:
                    lane.current = None
                slot.is_clean = False
                self._free.append(slot)
            if not lane.slots:
                self._forget(self._captures, key)
        if not is_capture:
            self._show_lanes()
            process.forget_ended_captures(home)
            if process.retired:
                process.release_retired(home)

    def trim(self) -> int:
        """Give back memory above the rows in use; addresses stay. Returns bytes given back.

        A slot keeps the rows of the result that somebody holds, and all that a graph contains. Lanes that nobody used
        since the last ``trim`` are dropped together with their addresses: lanes of streams that are gone go this way. A
        pool that sleeps holds nothing to give back.

        Raises:
            CaptureError: something captures.
            BufpoolError: called from a finalizer inside another call, or the pool is closed.
        """
        notes: list[_Note] = []
        self._wait_without_lock("trim")
        try:
            with self._lock:
                self._refuse_reentry("trim")
                self._busy = True
                try:
                    self._check_open()
                    if self._is_asleep:
                        return 0
                    self._refuse_capture("trim")
                    self._collect(None)
                    kept = self._kept_by_trim()
                    unused = self._unused_since_trim()
                    # A result that another thread drops from here on counts as held: its work may not be done.
                    process.synchronize([*kept, *(slot for lane in unused for slot in lane.slots)])
                    freed = 0
                    for slot, rows in kept.items():
                        freed += slot.shrink(rows)
                        if not rows:
                            slot.readers = []
                    for key, lane in list(self._lanes.items()):
                        if lane in unused:
                            self._forget(self._lanes, key)  # first: a child forked in between must not find the slots
                            for slot in lane.slots:
                                self._slots.remove(slot)
                            process.retired.extend(lane.slots)
                        lane.acquires_at_trim = lane.acquires
                    if unused:
                        process.release_retired()
                    notes.append((logging.INFO, f"trim: gave back {freed} bytes"))
                    return freed
                finally:
                    self._busy = False
        finally:
            _emit(notes)

    def _wait_without_lock(self, call: str) -> None:
        """Wait for the devices before a call that waits under the lock, which is over soon then.

        Meanwhile another thread can launch what this device may be waiting for, such as its half of a collective.
        """
        with self._lock:
            self._refuse_reentry(call)
            self._check_open()
            if self._is_asleep:
                return
            self._refuse_capture(call)
            slots = [slot for slot in self._slots if slot.is_ours and slot.mapped_bytes] + process.idle_retired()
        process.synchronize(slots)

    def _kept_by_trim(self) -> dict[Slot, int]:
        """The slots that may hold too much memory, and how many rows each must keep."""
        kept = {slot: slot.rows if slot.is_live() else 0 for slot in self._slots if slot.is_ours and not slot.is_pinned()}
        return {slot: rows for slot, rows in kept.items() if slot.bytes_for(0) and not (rows and rows == slot.capacity)}

    def _unused_since_trim(self) -> list[Lane]:
        """Lanes that nobody used since the last trim, nor holds a result of."""
        return [
            lane
            for lane in self._lanes.values()
            if lane.acquires == lane.acquires_at_trim and all(slot.is_idle() for slot in lane.slots)
        ]

    def sleep(self) -> None:
        """Give all physical memory back and keep the addresses; ``acquire`` raises until ``wake()``.

        Results of graphs may be held: their bytes are undefined until the next replay after ``wake()``.

        Raises:
            BufpoolError: an eager result is live (the text says how many), another thread is in a call of a graph runner,
                or the pool sleeps or is closed.
            CaptureError: something captures.
        """
        notes: list[_Note] = []
        self._wait_without_lock("sleep")
        try:
            with self._lock:
                self._refuse_reentry("sleep")
                self._busy = True
                try:
                    self._check_open()
                    if self._is_asleep:
                        raise BufpoolError("sleep: expected a pool that is awake, got one that sleeps")
                    self._refuse_capture("sleep")
                    self._collect(None)
                    ours = [slot for slot in self._slots if slot.is_ours]
                    live = [slot for slot in ours if slot.is_live() and not slot.is_pinned()]
                    if live:
                        raise BufpoolError(f"sleep: expected no live result outside graphs, got {len(live)}")
                    if self._runner_calls:
                        raise BufpoolError(
                            f"sleep: expected no call of a graph runner under way, got {len(self._runner_calls)}"
                        )
                    fixed = [slot for slot in ours if not slot.is_stable and slot.is_pinned()]
                    if fixed:
                        raise BufpoolError(
                            f"sleep: expected graphs on address-stable arenas, got {len(fixed)} slots of kind 'torch'"
                        )
                    process.synchronize(slot for slot in ours if slot.mapped_bytes)
                    freed = sum(slot.mapped_bytes for slot in ours)
                    asleep: list[Slot] = []
                    try:
                        for slot in ours:
                            asleep.append(slot)
                            slot.sleep()
                        for slot in ours:
                            if not slot.is_live():
                                slot.readers = []
                        self._is_asleep = True
                    except BaseException:
                        self._is_asleep = True  # until all are back, which another error may prevent
                        self._show_lanes()
                        for slot in asleep:
                            slot.wake()
                        process.synchronize(slot for slot in asleep if not slot.is_stable)  # as wake() does
                        self._is_asleep = False
                        self._show_lanes()
                        raise
                    self._show_lanes()
                    notes.append((logging.INFO, f"sleep: gave back {freed} bytes"))
                finally:
                    self._busy = False
        finally:
            _emit(notes)

    @contextlib.contextmanager
    def _kept_awake(self, name: str) -> Iterator[None]:
        """Let no ``sleep`` begin while the caller launches a graph."""
        call = _RunnerCall()
        try:
            with self._lock:
                if self._is_asleep:
                    raise BufpoolError(f"{name}: expected a pool that is awake, got one that sleeps; call wake()")
                self._runner_calls.add(call)
            yield
        finally:
            self._runner_calls.discard(call)

    def wake(self) -> None:
        """Map after ``sleep()`` the same sizes at the same addresses. All or nothing.

        Raises:
            PoolLimitError: the memory is not there any more; the pool still sleeps.
            CaptureError: something captures, and there are arenas of kind ``torch``, whose blocks are new.
            BufpoolError: the pool does not sleep or is closed.
        """
        for attempt in range(2):
            notes: list[_Note] = []
            try:
                with self._lock:
                    self._refuse_reentry("wake")
                    self._busy = True
                    try:
                        self._check_open()
                        if not self._is_asleep:
                            raise BufpoolError("wake: expected a pool that sleeps, got one that is awake")
                        self._refuse_capture("wake", [slot for slot in self._slots if not slot.is_stable])
                        woken: list[Slot] = []
                        try:
                            for slot in [slot for slot in self._slots if slot.is_ours]:
                                device = slot.device
                                slot.wake()
                                woken.append(slot)
                            # torch's blocks may carry work of this stream, and lanes are of other streams.
                            process.synchronize(slot for slot in woken if not slot.is_stable)
                        except BaseException:
                            for slot in woken:
                                slot.sleep()
                            raise
                        self._is_asleep = False
                        self._show_lanes()
                        self._note_peak()
                        for lane in self._every_lane():
                            lane.note_peak()
                        notes.append((logging.INFO, f"wake: mapped {sum(slot.mapped_bytes for slot in woken)} bytes again"))
                        return
                    finally:
                        self._busy = False
            except driver.DeviceOutOfMemoryError as error:
                if attempt == 1 or process.is_capturing_anywhere():
                    asleep = [slot for slot in self._slots if slot.device == device]
                    need = sum(sum(slot.asleep_bytes or ()) for slot in asleep)
                    raise PoolLimitError(f"{device}: wake", need=need, have=0, limit=_free_bytes(device)) from error
                torch.cuda.empty_cache()
            finally:
                _emit(notes)

    def close(self) -> None:
        """Refuse further calls and give back what is idle. Results still held and graphs keep their memory until they die.

        Closing twice is allowed.
        """
        with self._lock:
            self._refuse_reentry("close")
            self._busy = True
            try:
                self._is_closed = True
                self._show_lanes()
                for lanes in (self._lanes, self._captures):
                    for key in list(lanes):
                        self._forget(lanes, key)
                self._free.clear()
                for slot in self._slots:
                    # What no graph can report as gone lasts until now, by contract.
                    slot.pins = [pin for pin in slot.pins if pin.is_tracked]
                process.retired.extend(self._slots)
                self._slots.clear()  # second: handed in twice is better than lost
            finally:
                self._busy = False
        process.synchronize(process.idle_retired())  # without the lock, as in _wait_without_lock()
        process.release_retired()

    def __copy__(self) -> OutputPool:
        """The pool itself: a copy of what holds it shares it."""
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> OutputPool:
        return self

    def __reduce__(self) -> tuple[object, ...]:
        raise TypeError("pool: expected a process to make its own OutputPool, got one to pickle")

    def __enter__(self) -> OutputPool:  # noqa: PYI034
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    # Numbers

    @property
    def is_asleep(self) -> bool:
        """Whether the pool is between ``sleep()`` and ``wake()``."""
        return self._is_asleep

    def stats(self) -> PoolStats:
        """What the pool did and holds, in sum and per lane."""
        with self._lock:
            self._refuse_reentry("stats")
            self._busy = True
            try:
                every = self._every_lane()
                lanes = tuple(self._lane_stats(lane) for lane in every)
                former = self._former
                slots = self._slots
                live = [slot for slot in slots if slot.is_live()]
                return PoolStats(
                    arena="+".join(sorted({slot.kind for slot in slots})),
                    handout="+".join(sorted({slot.handout.kind for slot in slots})),
                    acquires=former.acquires + sum(lane.acquires for lane in every),
                    hits=former.acquires - former.misses + sum(lane.hits for lane in lanes),
                    grows=former.grows + sum(lane.grows for lane in every),
                    rotations=former.rotations + sum(lane.rotations for lane in every),
                    spills=former.spills + sum(lane.spills for lane in every),
                    slots=len(slots),
                    free_slots=len(self._free),
                    live_slots=len(live),
                    pinned_slots=sum(slot.is_pinned() for slot in slots),
                    reserved_bytes=sum(slot.reserved_bytes for slot in slots),
                    mapped_bytes=sum(slot.mapped_bytes for slot in slots),
                    in_use_bytes=sum(slot.spec.nbytes(slot.rows) for slot in live),
                    needed_bytes=sum(slot.spec.nbytes(slot.high_water_rows) for slot in slots),
                    peak_mapped_bytes=self._peak_bytes,
                    short_reservations=sum(slot.is_short for slot in slots),
                    asleep=self._is_asleep,
                    lanes=lanes,
                )
            finally:
                self._busy = False

    def _lane_stats(self, lane: Lane) -> LaneStats:
        key, slots = lane.key, lane.slots
        live = [slot for slot in slots if slot.is_live()]
        return LaneStats(
            device=str(key.device),
            stream=key.stream,
            capture=key.capture,
            shared=key.shared,
            spec=key.spec,
            arena="+".join(sorted({slot.kind for slot in slots})),
            acquires=lane.acquires,
            hits=lane.acquires - lane.misses,
            grows=lane.grows,
            rotations=lane.rotations,
            spills=lane.spills,
            slots=len(slots),
            live_slots=len(live),
            pinned_slots=sum(slot.is_pinned() for slot in slots),
            reserved_bytes=sum(slot.reserved_bytes for slot in slots),
            mapped_bytes=lane.mapped_bytes,
            in_use_bytes=sum(slot.spec.nbytes(slot.rows) for slot in live),
            needed_bytes=sum(slot.spec.nbytes(slot.high_water_rows) for slot in slots),
            peak_mapped_bytes=lane.peak_mapped_bytes,
            holders=tuple(slot.site for slot in live if slot.site is not None),
        )

    def report(self) -> str:
        """``stats()`` as a plain-text table."""
        return self.stats().report()

    def reset_peak_stats(self) -> None:
        """Let ``peak_mapped_bytes`` start again from what is mapped now."""
        with self._lock:
            self._refuse_reentry("reset_peak_stats")
            self._busy = True
            try:
                self._peak_bytes = self._mapped_bytes(None)
                for lane in self._every_lane():
                    lane.peak_mapped_bytes = lane.mapped_bytes
            finally:
                self._busy = False

    # State

    def _refuse_reentry(self, call: str) -> None:
        """Under the lock: refuse a call that a finalizer makes inside another one (Note [One acquire at a time])."""
        if self._busy:
            raise BufpoolError(f"{call}: expected no call of the pool from a finalizer inside another one, got one")

    def _is_owned(self) -> bool:
        """Whether this thread holds the lock."""
        return self._lock._is_owned()  # type: ignore[attr-defined, no-any-return]

    def _show_lanes(self) -> None:
        """Let the hit path see the eager lanes, or none."""
        self._quick = {} if self._trace or self._debug or self._is_asleep or self._is_closed else self._lanes

    def _check_open(self) -> None:
        if self._is_closed:
            raise BufpoolError("pool: expected an open pool, got a closed one")

    def _check_usable(self, device: torch.device) -> None:
        self._check_open()
        if self._is_asleep:
            raise BufpoolError("pool: expected a pool that is awake, got one that sleeps; call wake()")
        if device.type != "cpu" and self._has_lost_cuda:
            raise BufpoolError(
                f"{device}: expected the process that started CUDA, got a forked child; start it with 'spawn'"
            )

    def _arena_kind(self, device: torch.device) -> str:
        natural = "torch"
        if device.type == "cuda" and driver.is_available() and driver.supports_virtual_memory(device.index):
            natural = "cuda"
        elif device.type == "cpu" and host_memory.is_available():
            natural = "host"
        if self._arena in ("auto", natural, "torch"):
            return natural if self._arena == "auto" else self._arena
        reason = driver.unavailable_reason() if self._arena == "cuda" and device.type == "cuda" else None
        raise BufpoolError(
            f"{device}: expected a device that an arena of kind {self._arena!r} can serve"
            + (f", got none: {reason}" if reason else f", got one for kind {natural!r}")
        )

    def _every_lane(self) -> list[Lane]:
        return [*self._lanes.values(), *self._captures.values()]

    def _mapped_bytes(self, device: torch.device | None) -> int:
        return sum(slot.mapped_bytes for slot in self._slots if device is None or slot.device == device)

    def _note_peak(self) -> None:
        self._peak_bytes = max(self._peak_bytes, self._mapped_bytes(None))

    def _refuse_capture(self, call: str, slots: list[Slot] | None = None) -> None:
        device = process.capturing_device(slot for slot in (self._slots if slots is None else slots) if slot.is_ours)
        if device is not None:
            raise CaptureError(f"{call}: expected no graph capture on {device}, got one under way")

    def _after_fork(self) -> None:
        """In the child: a free lock, and no CUDA lanes."""
        self._lock = process.lock
        self._busy = False
        self._runner_calls = weakref.WeakSet()
        self._has_lost_cuda = process.has_lost_cuda or any(slot.device.type != "cpu" for slot in self._slots)
        self._free = [slot for slot in self._free if slot.device.type == "cpu"]
        for lanes in (self._lanes, self._captures):
            for key, lane in list(lanes.items()):
                if lane.key.device.type != "cpu":
                    self._forget(lanes, key)


class _RunnerCall:
    """A call of a graph runner."""


class _Counts:
    """Counters of calls that no lane of today owns."""

    def __init__(self) -> None:
        self.acquires = 0
        self.misses = 0
        self.grows = 0
        self.rotations = 0
        self.spills = 0

    def add(self, lane: Lane) -> None:
        self.acquires += lane.acquires
        self.misses += lane.misses
        self.grows += lane.grows
        self.rotations += lane.rotations
        self.spills += lane.spills


def _positive(name: str, value: Any) -> int:
    if isinstance(value, bool) or not hasattr(value, "__index__"):
        raise TypeError(f"{name}: expected an integer >= 1, got {value!r}")
    number = int(value.__index__())
    if number < 1:
        raise ValueError(f"{name}: expected an integer >= 1, got {number}")
    return number


def _first_of(like: Any) -> torch.Tensor | None:
    """The first of several plain tensors that share a device; None where a closer look is needed."""
    if type(like) is not tuple and type(like) is not list:
        return None
    first: torch.Tensor | None = None
    for tensor in like:
        if type(tensor) is not torch.Tensor:
            return None
        if first is None:
            first = tensor
        elif tensor.get_device() != first.get_device() or tensor.is_cpu is not first.is_cpu:
            return None
    return first


def _call_site() -> str:
    """``file:line in function`` of the first caller outside this package."""
    frame = sys._getframe(1)
    package = os.path.dirname(__file__) + os.sep
    while frame.f_back is not None and frame.f_code.co_filename.startswith(package):
        frame = frame.f_back
    return f"{frame.f_code.co_filename}:{frame.f_lineno} in {frame.f_code.co_name}"


def _emit(notes: list[_Note]) -> None:
    for level, text in notes:
        _logger.log(level, text)


def _free_bytes(device: torch.device) -> int:
    """Free memory of a device, in bytes; 0 where it is not known."""
    return int(torch.cuda.mem_get_info(device)[0]) if device.type == "cuda" else 0


def _device_bytes(device: torch.device) -> int:
    """Physical memory of a device, in bytes; 0 where it is not known."""
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).total_memory)
    return host_memory.physical_bytes() if device.type == "cpu" else 0


# The default pool

_default: OutputPool | None = None


def default_pool() -> OutputPool:
    """The pool that wrappers use when no allocator is passed; made at the first call."""
    global _default
    if _default is None:
        pool = OutputPool()
        with process.lock:
            if _default is None:
                _default = pool
    return _default


def set_default_pool(pool: OutputPool) -> None:
    """Make ``pool`` the default; the former one stays as it is.

    Raises:
        TypeError: ``pool`` is not an OutputPool.
    """
    global _default
    if not isinstance(pool, OutputPool):
        raise TypeError(f"pool: expected an OutputPool, got {pool!r}")
    with process.lock:
        _default = pool

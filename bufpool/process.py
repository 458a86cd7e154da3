"""What all pools of a process share: the lock, the slots of pools that are gone, streams that capture, and forks."""

from __future__ import annotations

import os
import threading
import weakref
from collections import deque
from collections.abc import Iterable
from functools import cache
from typing import Protocol

import torch

from . import driver
from .arena import ADDRESS_BUDGET
from .errors import DriverError
from .slot import Slot
from .spills import Spills
from .torch_state import has_context

__all__ = [
    "can_be_waited_for",
    "capture_streams",
    "capture_turn",
    "capturing_device",
    "every_pool",
    "forget_ended_captures",
    "has_lost_cuda",
    "idle_retired",
    "is_at_rest",
    "is_capturing",
    "is_capturing_anywhere",
    "lock",
    "note_capture",
    "pools",
    "release_retired",
    "retired",
    "spills",
    "synchronize",
    "watch_forks",
]


class Pool(Protocol):
    """What is known here of a pool."""

    _slots: list[Slot]

    def _after_fork(self) -> None:
        """In the child: a free lock, and no CUDA lanes."""


lock = threading.RLock()
"""One for all pools (``pool``, Note [One acquire at a time]). A forked child has another one."""
capture_turn = threading.RLock()
"""Held by the thread whose graph runner captures, ``fn`` included: torch captures one graph at a time."""
pools: weakref.WeakValueDictionary[int, Pool] = weakref.WeakValueDictionary()
"""By ``id``: its references, unlike those of a WeakSet, are listed at one stroke while other threads make pools."""
spills = Spills()
"""Results that spilled from any pool; they outlive it."""
retired: deque[Slot] = deque()
"""Slots whose pool is closed or collected; finalizers append here and do nothing else."""
_is_releasing = False
_capture_streams: dict[torch.device, set[int]] = {}
"""Streams on which some pool was used inside a capture that may still be under way."""


def every_pool() -> list[Pool]:
    """The pools that live."""
    return [pool for reference in pools.valuerefs() if (pool := reference()) is not None]


def _devices_at_work(slots: Iterable[Slot]) -> set[torch.device]:
    """The devices whose work may use memory of these slots: their own, and those of declared readers."""
    return {device for slot in slots for device in (slot.device, *(reader.device for reader in slot.readers))}


def is_capturing(device: torch.device) -> bool:
    """Whether something captures on the device, as far as can be seen."""
    if device.type != "cuda" or not driver.is_available():
        return False
    return driver.capturing_stream(device.index, capture_streams(device)) is not None


def is_capturing_anywhere() -> bool:
    """Whether something captures on a device that this process has started, or one of them cannot be asked.

    ``torch.cuda.empty_cache`` acts on them all.
    """
    if not driver.is_available():
        return False
    started = filter(has_context, range(torch.cuda.device_count()))
    try:
        return any(is_capturing(torch.device("cuda", index)) for index in started)
    except DriverError:  # of a device whose context is lost
        return True


def capturing_device(slots: Iterable[Slot]) -> torch.device | None:
    """One of the devices whose work may use memory of these slots, on which something captures; None if none does."""
    return next(filter(is_capturing, _devices_at_work(slots)), None)


def synchronize(slots: Iterable[Slot]) -> None:
    """Wait for all work that may use memory of these slots.

    Whoever gives memory back looks first who holds what, and waits then: what is dropped later may still be worked on.
    """
    for device in _devices_at_work(slots):
        if device.type == "cuda":
            driver.synchronize(device.index)
        elif device.type != "cpu":
            getattr(torch, device.type).synchronize(device)


def is_at_rest(device: torch.device) -> bool:
    """Whether all work of a device is done, as far as can be seen without waiting; not if it cannot be asked."""
    if device.type != "cuda":
        return device.type == "cpu"
    try:
        return driver.is_idle(device.index, capture_streams(device))
    except RuntimeError:  # of the driver, or of torch
        return False


def can_be_waited_for(slots: Iterable[Slot], home: torch.device) -> bool:
    """Whether a call on ``home`` may wait for all work on these slots: it waits for no other device, which may be waiting
    for what the caller is to launch next.
    """
    return all(device == home or is_at_rest(device) for device in _devices_at_work(slots))


def note_capture(device: torch.device, stream: int) -> None:
    """A pool was used on this stream inside a capture."""
    _capture_streams.setdefault(device, set()).add(stream)


def capture_streams(device: torch.device) -> set[int]:
    """Streams of the device that may capture, as far as pools have met them."""
    return _capture_streams.get(device, set())


def forget_ended_captures(home: torch.device | None = None) -> None:
    """Forget streams whose capture has ended: their owner may destroy them, and nobody asks for them again.

    With ``home`` only those of this device: what became of the others is nothing to a call there.
    """
    for device, streams in list(_capture_streams.items()):
        if home not in (None, device):
            continue
        _capture_streams[device] = {stream for stream in streams if driver.is_capturing(stream)}
        if not _capture_streams[device]:
            del _capture_streams[device]


def idle_retired() -> list[Slot]:
    """Retired slots of this process that could be released, were it not for work that may use their memory."""
    with lock:
        return [
            slot
            for slot in retired.copy()
            if slot.is_ours and slot.mapped_bytes and slot.is_idle() and capturing_device([slot]) is None
        ]


def release_retired(home: torch.device | None = None) -> None:
    """Release retired slots that are neither live nor pinned; the rest waits. Nothing happens on a device that captures.

    With ``home``, the device of a call, no other one is waited for: its work may wait for what the caller is to launch
    next, and its context may be lost. What may still be worked on there stays.
    """
    global _is_releasing
    with lock:
        if _is_releasing:  # a finalizer inside of another call of this function
            return
        _is_releasing = True
        try:
            _release_retired_now(home)
        finally:
            _is_releasing = False


def _release_retired_now(home: torch.device | None) -> None:
    idle: dict[torch.device, list[Slot]] = {}
    try:
        _release_those_idle(idle, home)
    finally:
        for slots in idle.values():
            retired.extend(slots)


def _release_those_idle(idle: dict[torch.device, list[Slot]], home: torch.device | None) -> None:
    """Sort the retired slots that are idle into ``idle``, by device, and take each out as it is released."""
    for _ in range(len(retired)):
        slot = retired[0]  # it stays there while it is asked: an interrupt loses nothing, and readers find it
        if slot.is_released or not slot.is_ours:
            retired.popleft()  # of the parent process, or handed in twice by an interrupted close()
            continue
        slot.pins = [pin for pin in slot.pins if pin.is_tracked]  # the pool is closed: others cannot end
        if slot.is_idle():
            idle.setdefault(slot.device, []).append(slot)
            retired.popleft()
        else:
            retired.rotate(-1)
    for slots in idle.values():
        if home is not None and not can_be_waited_for(slots, home):
            continue
        if capturing_device(slots) is not None:
            continue
        synchronize(slots)
        while slots:
            slots.pop().release()  # the one that fails is lost, the others wait


@cache
def watch_forks() -> None:
    """Let this process and its forked children know about forks."""
    os.register_at_fork(before=_before_fork, after_in_child=_after_fork)


_had_cuda = False
"""Whether CUDA had been started when this process last forked."""
has_lost_cuda = False
"""Whether this process is the forked child of one that had started CUDA."""


def _before_fork() -> None:
    global _had_cuda
    _had_cuda = has_lost_cuda or torch.cuda.is_initialized()  # type: ignore[no-untyped-call]


def _after_fork() -> None:
    global capture_turn, has_lost_cuda, _is_releasing, lock
    _capture_streams.clear()
    has_lost_cuda = _had_cuda
    lock = threading.RLock()
    capture_turn = threading.RLock()
    _is_releasing = False
    ADDRESS_BUDGET.after_fork()
    for pool in every_pool():
        pool._after_fork()

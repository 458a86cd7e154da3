"""Places: where a call of the pool is served, by device, stream, thread and capture."""

from __future__ import annotations

import itertools
import threading
from collections import OrderedDict
from typing import Any

import torch

from . import driver, process
from .errors import CaptureError
from .lane import LaneKey
from .slot import Slot
from .spec import OutputSpec
from .torch_state import PER_THREAD_STREAM, is_capturing_on, raw_stream

__all__ = ["Place", "SharedCaptures"]

_LEGACY_STREAM = 1  # another handle of the legacy default stream 0

_thread_tokens = itertools.count(1)


class _ThisThread(threading.local):
    """A number that no other thread has or will have; the system uses its own again."""

    def __init__(self) -> None:
        self.token = next(_thread_tokens)


_this_thread = _ThisThread()


class SharedCaptures:
    """The set of slots that captures of each thread share now, and the branches of each capture.

    Concurrency: the name belongs to the thread. Threads may share a capture: branches are counted under the lock of all
    pools, since with one of its own finalizers in two threads could wait for one another.
    """

    MOST_CAPTURES = 1024
    """Of which branches are known: those used last."""

    def __init__(self) -> None:
        self._of_thread = threading.local()
        self._branches: OrderedDict[tuple[int, int], list[tuple[int, int]]] = OrderedDict()
        """Stream and thread of each branch, by capture and device."""

    @property
    def name(self) -> str | None:
        return getattr(self._of_thread, "name", None)

    @name.setter
    def name(self, name: str | None) -> None:
        self._of_thread.name = name

    def branch(self, capture: int, device: int, stream: int, thread: int) -> int:
        """Which branch of a capture a stream is, counted by first use on its device (an index): the same branches of all
        captures share slots.
        """
        with process.lock:
            branches = self._branches.setdefault((capture, device), [])
            self._branches.move_to_end((capture, device))
            if len(self._branches) > self.MOST_CAPTURES:
                self._branches.popitem(last=False)
            if (stream, thread) not in branches:
                branches.append((stream, thread))
            return branches.index((stream, thread))


class Place:
    """Where a call is served: device with index, stream, thread and capture."""

    __slots__ = ("capture", "device", "graph", "key", "shared", "spec", "stream", "thread")

    def __init__(self, spec: OutputSpec, device: torch.device, shared: SharedCaptures) -> None:
        self.spec = spec
        self.stream = 0
        self.thread = 0
        self.capture: int | None = None
        self.graph: Any = None
        self.shared: str | None = None
        if device.type == "cpu":
            self.device = torch.device("cpu")
            self.key: tuple[Any, ...] = (-1, 0, spec.key)
            return
        if device.type != "cuda":
            self.device = device
            self.key = (str(device), 0, spec.key)
            return
        if device.index is None:
            device = torch.device("cuda", torch.cuda.current_device())
        self.device = device
        self.stream = raw_stream(device.index)
        if self.stream == _LEGACY_STREAM:
            self.stream = 0
        if self.stream == PER_THREAD_STREAM:
            self.thread = _this_thread.token
        if self.stream != 0:
            self._find_capture()
        self.key = (device.index, self.stream, spec.key)
        if self.thread:
            self.key += (self.thread,)
        if self.capture is None:
            return
        self.shared = shared.name
        if self.shared is None:
            self.key = (self.capture, *self.key)
        else:
            branch = shared.branch(self.capture, device.index, self.stream, self.thread)
            self.key = (self.shared, device.index, branch, spec.key)

    def _find_capture(self) -> None:
        if driver.is_available():
            found = driver.capture_of(self.device.index, self.stream)
            if found is not None:
                self.capture, self.graph = found
            return
        if is_capturing_on(self.device):
            raise CaptureError(
                f"{self.device}: expected cuda.bindings for a call inside a capture, got none"
                f" ({driver.unavailable_reason()})"
            )

    def can_wait_for(self, slot: Slot) -> bool:
        """Whether this place can be ordered after the declared readers of a slot.

        An eager one after readers that do not capture; one in a capture after readers in the same capture, and after
        readers whose work is done already.
        """
        for reader in slot.readers:
            stream = reader.cuda_stream
            is_capturing = stream != 0 and driver.is_available() and driver.is_capturing(stream)
            if self.capture is None:
                if is_capturing:
                    return False
            elif is_capturing:
                if not self._is_branch(stream):
                    return False
            elif not driver.is_stream_idle(reader.device.index, stream):
                return False
        return True

    def _is_branch(self, stream: int) -> bool:
        """Whether a stream that captures takes part in the same capture."""
        found = driver.capture_of(self.device.index, stream)
        return found is not None and found[0] == self.capture

    def wait_for_readers(self, slot: Slot) -> None:
        """Let the current stream wait for all that the readers of an idle slot have queued."""
        current = torch.cuda.current_stream(slot.device)
        for reader in slot.readers:
            if self.capture is not None and not (reader.cuda_stream != 0 and driver.is_capturing(reader.cuda_stream)):
                continue  # done already: can_wait_for() asked
            event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            event.record(reader)
            current.wait_event(event)
        slot.readers = []

    def lane_key(self) -> LaneKey:
        return LaneKey(self.device, self.stream, self.thread, self.capture, self.shared, self.spec)

"""Lanes: the slots that share one execution order, and which of them serves next."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from .slot import Slot
from .spec import OutputSpec

__all__ = ["Lane", "LaneKey"]


@dataclass(frozen=True, slots=True)
class LaneKey:
    """What makes an execution order: device, stream (and thread, for the per-thread default stream), capture, spec.

    With ``shared``, the name of a shared capture, ``capture`` and ``stream`` are those of the first capture.
    """

    device: torch.device
    stream: int
    thread: int
    capture: int | None
    shared: str | None
    spec: OutputSpec


class Lane:
    """Slots of one (device, stream, spec), or of one (capture, stream, spec).

    ``current`` is the slot that served last. Only the last hand-out of a slot can be live, since a slot is only handed out
    again when it is not. Not thread-safe: the pool's lock serialises.
    """

    __slots__ = (
        "acquires",
        "acquires_at_trim",
        "current",
        "grows",
        "key",
        "misses",
        "peak_mapped_bytes",
        "rotations",
        "slots",
        "spills",
        "was_warned",
    )

    def __init__(self, key: LaneKey) -> None:
        self.key = key
        self.slots: list[Slot] = []
        self.current: Slot | None = None
        self.acquires = 0
        self.misses = 0
        """Acquires that had to add a slot, to grow or to spill."""
        self.grows = 0
        self.rotations = 0
        self.spills = 0
        self.peak_mapped_bytes = 0
        self.acquires_at_trim = -1
        """What ``acquires`` was at the last trim: if it still is, nobody used the lane since."""
        self.was_warned = False

    @property
    def mapped_bytes(self) -> int:
        return sum(slot.mapped_bytes for slot in self.slots)

    def note_peak(self) -> None:
        """Memory was mapped."""
        self.peak_mapped_bytes = max(self.peak_mapped_bytes, self.mapped_bytes)

    def take(self, rows: int) -> Any:
        """Outputs of a slot that nobody holds and whose memory is mapped, the current one first; None if there is none.

        The hit path. Slots that a reader on another stream was declared for are left to ``idle_slot``; readers are asked
        again when the slot is taken, since a finalizer may have declared one and dropped the result in between.
        """
        current = self.current
        if current is not None and not current.readers:
            outputs = current.handout.take(rows)
            if outputs is not None and not current.readers:
                self.acquires += 1
                return outputs
        for slot in self.slots:
            if slot is not current and not slot.readers:
                outputs = slot.handout.take(rows)
                if outputs is not None and not slot.readers:
                    self.acquires += 1
                    self.rotations += 1
                    self.current = slot
                    return outputs
        return None

    def idle_slot(self, rows: int, is_ready: Callable[[Slot], bool]) -> Slot | None:
        """The slot to serve ``rows`` rows among those that nobody holds; None if all are held.

        The current one if it has room, else the smallest with room; else the largest, which has least to grow.

        Args:
            rows: rows asked for.
            is_ready: whether a slot with declared readers can be waited for.
        """
        idle = [slot for slot in self.slots if not slot.is_live() and (not slot.readers or is_ready(slot))]
        if not idle:
            return None
        with_room = [slot for slot in idle if slot.capacity >= rows]
        if not with_room:
            return max(idle, key=lambda slot: slot.capacity)
        if self.current in with_room:
            return self.current
        return min(with_room, key=lambda slot: slot.capacity)

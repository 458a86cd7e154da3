"""Lanes: the slots that share one execution order, and which of them serves next."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from .slot import Slot
from .spec import OutputSpec

__all__ = ["Lane", "LaneKey"]


@dataclass(frozen=True, slots=True)
class LaneKey:
    """What makes an execution order: device, stream (and thread, for the per-thread default stream), capture, spec."""

    device: torch.device
    stream: int
    thread: int
    capture: int | None
    spec: OutputSpec


class Lane:
    """Slots of one (device, stream, spec), or of one (capture, stream, spec).

    ``current`` is the slot that served last. Only the last hand-out of a slot can be live, since a slot is only handed out
    again when it is not. Not thread-safe: the pool's lock serialises.
    """

    __slots__ = (
        "acquires",
        "current",
        "grows",
        "key",
        "misses",
        "peak_mapped_bytes",
        "rotations",
        "slots",
        "spills",
        "was_used",
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
        self.was_used = True
        """Whether it served since the last trim."""
        self.was_warned = False

    @property
    def mapped_bytes(self) -> int:
        return sum(slot.mapped_bytes for slot in self.slots)

    def idle_slot(self, rows: int) -> Slot | None:
        """The slot to serve ``rows`` rows: the current one if nobody holds it, else the idle one that fits best.

        Fits best: the smallest with room, so that the high-water mark of the others stays; else the largest.
        """
        current = self.current
        if current is not None and not current.is_live():
            return current
        idle = [slot for slot in self.slots if slot is not current and not slot.is_live()]
        if not idle:
            return None
        with_room = [slot for slot in idle if slot.capacity >= rows]
        if with_room:
            return min(with_room, key=lambda slot: slot.capacity)
        return max(idle, key=lambda slot: slot.capacity)

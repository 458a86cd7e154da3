"""Slots: one complete set of arenas for a spec, the memory behind one handed-out result."""

from __future__ import annotations

import contextlib
import os
from typing import Any

import torch

from . import host_memory
from .arena import ADDRESS_BUDGET, Arena, CudaArena, HostArena, TorchArena, round_down, round_up
from .driver import DeviceOutOfMemoryError, cuda_driver
from .errors import PoolLimitError
from .handout import Handout, make_handout
from .pin import Pin
from .spec import OutputSpec

__all__ = ["LEAST_RESERVATION_BYTES", "Slot"]

LEAST_RESERVATION_BYTES = 64 * 2**20
"""Where address space is short, a slot's reservation is halved down to this, or to what the call needs if that is more."""


class Slot:
    """The arenas of one spec on one device, and the tensors last handed out over them.

    Not thread-safe: the pool's lock serialises. Methods that give memory back need a synchronised device.

    Args:
        spec: what is handed out.
        device: its home, with an index except for the CPU.
        kind: arena kind, ``cuda``, ``host`` or ``torch``.
        rows: rows that must fit in the reservation.

    Raises:
        PoolLimitError: there is no address space for so many rows.
        DriverError: the driver refused.
        BufpoolError: torch cannot make tensors over given memory on this device.
    """

    __slots__ = (
        "arenas",
        "asleep_bytes",
        "device",
        "granted_bytes",
        "guard",
        "handout",
        "is_clean",
        "is_released",
        "is_short",
        "kind",
        "mapped_bytes",
        "pins",
        "process_id",
        "readers",
        "site",
        "spec",
    )

    def __init__(self, spec: OutputSpec, device: torch.device, kind: str, rows: int) -> None:
        self.spec = spec
        self.device = device
        self.kind = kind
        self.readers: list[Any] = []
        """Streams that were declared to read the last hand-out."""
        self.pins: list[Pin] = []
        self.is_clean = True
        """Whether all work on its memory is known to be done, or ordered before the lane's stream."""
        self.site: str | None = None
        self.guard: Any = None
        """What ``debug`` left behind the rows of the last hand-out; None after the memory changed."""
        self.mapped_bytes = 0
        self.asleep_bytes: list[int] | None = None
        self.process_id = os.getpid()
        self.granted_bytes = 0
        self.is_released = False
        self.is_short = False
        """Whether the reservation is smaller than the device's memory."""
        self.arenas = self._reserve(rows)
        try:
            self.handout: Handout = make_handout(spec, device, self.addresses, self.arenas[0].address)
        except BaseException:
            for arena in self.arenas:
                arena.release()
            ADDRESS_BUDGET.give_back(self.granted_bytes)
            raise

    # Reservation

    def _reserve(self, rows: int) -> list[Arena]:
        if self.kind == "torch":
            return [TorchArena(self.device) for _ in self.spec.names]
        if self.kind == "cuda":
            driver = cuda_driver(self.device.index)
            granule, wanted = driver.granule, driver.device_bytes
        else:
            granule, wanted = host_memory.PAGE_BYTES, host_memory.physical_bytes()
        least = sum(self._split(0, rows, granule))
        if least > wanted:
            raise PoolLimitError(
                f"{self.device}: {rows} rows in the memory of the device", need=least, have=0, limit=wanted
            )
        floor = max(least, LEAST_RESERVATION_BYTES)
        size = granted = ADDRESS_BUDGET.take(max(wanted, least), least)
        try:
            while True:
                arenas = self._try_reserve(self._split(size, rows, granule))
                if arenas is not None:
                    break
                if size <= floor:
                    raise PoolLimitError(
                        f"{self.device}: address range for {rows} rows, refused by the system",
                        need=least,
                        have=0,
                        limit=size,
                    )
                size = max(floor, size // 2)
        except BaseException:
            ADDRESS_BUDGET.give_back(granted)
            raise
        if size < granted:
            ADDRESS_BUDGET.give_back(granted - size)
        self.granted_bytes = size
        self.is_short = size < wanted
        return arenas

    def _split(self, total: int, rows: int, granule: int) -> list[int]:
        """Bytes of each arena: its share of ``total`` by row bytes, and never less than ``rows`` rows take."""
        spec = self.spec
        return [
            max(round_down(total * row_bytes // spec.row_nbytes, granule), round_up(max(rows, 1) * row_bytes, granule))
            for row_bytes in spec.row_bytes
        ]

    def _try_reserve(self, sizes: list[int]) -> list[Arena] | None:
        arenas: list[Arena] = []
        try:
            for size in sizes:
                if self.kind == "cuda":
                    arenas.append(CudaArena(cuda_driver(self.device.index), size))
                    continue
                host_arena = HostArena.reserve(size)
                if host_arena is None:
                    break
                arenas.append(host_arena)
        except DeviceOutOfMemoryError:
            pass
        except BaseException:
            for arena in arenas:
                arena.release()
            raise
        if len(arenas) == len(sizes):
            return arenas
        for arena in arenas:
            arena.release()
        return None

    # What it holds

    @property
    def addresses(self) -> tuple[int, ...]:
        """Base address of each tensor."""
        return tuple(arena.address for arena in self.arenas)

    @property
    def reserved_bytes(self) -> int:
        return sum(arena.reserved_bytes for arena in self.arenas)

    @property
    def is_stable(self) -> bool:
        """Whether its addresses stay when it grows."""
        return self.arenas[0].is_stable

    @property
    def capacity(self) -> int:
        """Rows that fit in mapped memory."""
        return self.handout.capacity

    @property
    def rows(self) -> int:
        """Rows of the last hand-out."""
        return self.handout.rows

    @property
    def high_water_rows(self) -> int:
        """Most rows handed out or reserved since memory was last given back."""
        return self.handout.high_water_rows

    def is_live(self) -> bool:
        """Whether somebody holds memory of the last hand-out."""
        return not self.is_released and self.handout.is_live()

    def is_idle(self) -> bool:
        """Whether nobody holds memory of it, and no living graph contains its addresses."""
        return not self.is_live() and not self.is_pinned()

    @property
    def is_ours(self) -> bool:
        """Whether this process may touch it: CUDA memory of the parent means nothing in a forked child."""
        return self.device.type == "cpu" or self.process_id == os.getpid()

    def is_pinned(self) -> bool:
        """Whether a living graph contains its addresses; forgets the graphs that are gone."""
        if not self.pins:
            return False
        ended = [pin for pin in self.pins if pin.has_ended()]
        if ended:
            self.pins = [pin for pin in self.pins if pin not in ended]
            for pin in ended:
                pin.release()
        return bool(self.pins)

    def has_address(self, address: int) -> bool:
        """Whether ``address`` lies in the address range of this slot, also while that sleeps."""
        return any(arena.address <= address < arena.address + arena.reserved_bytes for arena in self.arenas)

    # Growing and giving back

    def bytes_for(self, rows: int) -> int:
        """Mapped bytes that the slot would have with room for ``rows`` rows."""
        return sum(
            arena.bytes_for(rows * row_bytes) for arena, row_bytes in zip(self.arenas, self.spec.row_bytes, strict=True)
        )

    def check_reservation(self, rows: int) -> None:
        """Raise PoolLimitError if ``rows`` rows do not fit in the reservation."""
        if not self.is_stable:
            return
        for arena, row_bytes in zip(self.arenas, self.spec.row_bytes, strict=True):
            if rows * row_bytes > arena.reserved_bytes:
                raise PoolLimitError(
                    f"{self.device}: {rows} rows in one reservation",
                    need=self.spec.nbytes(rows),
                    have=0,
                    limit=self.reserved_bytes,
                )

    def grow(self, rows: int) -> None:
        """Map memory until ``rows`` rows fit. All or nothing.

        Raises:
            DeviceOutOfMemoryError, DriverError: no physical memory; the driver refused.
            CaptureError: an arena of kind ``torch`` would have to grow inside a capture.
        """
        former = [arena.mapped_bytes for arena in self.arenas]
        if not self.is_stable:
            self.handout.capacity = 0  # wherever it ends, nothing is handed out over blocks that are gone
        try:
            for arena, row_bytes in zip(self.arenas, self.spec.row_bytes, strict=True):
                arena.grow(rows * row_bytes)
        except BaseException:
            for arena, nbytes in zip(self.arenas, former, strict=True):
                if arena.is_stable:
                    arena.shrink(nbytes)
            raise
        finally:
            self._settle()

    def shrink(self, rows: int) -> int:
        """Give back memory behind ``rows`` rows; returns bytes given back."""
        former = self.mapped_bytes
        self.handout.capacity = min(self.handout.capacity, rows)  # whatever fails below, nothing unmapped is handed out
        try:
            for arena, row_bytes in zip(self.arenas, self.spec.row_bytes, strict=True):
                arena.shrink(rows * row_bytes)
            self.handout.lower_high_water(rows)
        finally:
            self._settle()
        return former - self.mapped_bytes

    def sleep(self) -> None:
        """Give back all memory; ``wake`` maps as much again, also after a failure here."""
        self.asleep_bytes = [arena.mapped_bytes for arena in self.arenas]
        self.handout.capacity = 0  # whatever fails below, nothing unmapped is handed out
        try:
            for arena in self.arenas:
                arena.shrink(0)
        finally:
            self._settle()

    def wake(self) -> None:
        """Map again what ``sleep`` gave back, at the same addresses. All or nothing."""
        if self.asleep_bytes is None:
            return
        try:
            for arena, nbytes in zip(self.arenas, self.asleep_bytes, strict=True):
                arena.grow(nbytes)
        except BaseException:
            for arena in self.arenas:
                arena.shrink(0)
            raise
        finally:
            self._settle()
        self.asleep_bytes = None

    def _settle(self) -> None:
        self.guard = None
        self.mapped_bytes = sum(arena.mapped_bytes for arena in self.arenas)
        if not self.is_stable:
            self.handout.move(self.addresses)
        self.handout.capacity = min(
            arena.mapped_bytes // row_bytes for arena, row_bytes in zip(self.arenas, self.spec.row_bytes, strict=True)
        )

    def release(self) -> None:
        """Give everything back, addresses too. It must neither live nor be pinned."""
        self.is_released = True  # first: if anything fails below it is lost, and nobody asks it anything
        self.handout.release()
        with contextlib.ExitStack() as every:  # an arena that fails keeps no other one
            for arena in self.arenas:
                every.callback(arena.release)
        self.mapped_bytes = 0
        ADDRESS_BUDGET.give_back(self.granted_bytes)
        self.granted_bytes = 0

"""Arenas: one address range, reserved once at its maximum, of which a growing prefix is mapped.

Note [Stable addresses]
    Rationale: kernels, descriptors and captured CUDA graphs hold raw addresses. Memory behind them may grow, sleep and
    come back, but must never move.
    Approach: reserve address space for the most an arena could ever need, and map physical memory behind a prefix of it.
    Growth maps one more extent behind the last one. Giving back unmaps whole extents from the end. The address is the
    start of the reservation and never changes.
    Driver facts relied on: see ``driver``; on the host, untouched pages of a MAP_NORESERVE range cost nothing.
    Limits: address space is finite (``AddressBudget``); a torch arena has no such range and moves when it grows.
"""

from __future__ import annotations

import abc
import contextlib
import threading
from typing import Any

import torch

from . import host_memory
from .driver import DeviceOutOfMemoryError, VirtualMemoryDriver
from .errors import CaptureError, DriverError, PoolLimitError
from .torch_state import is_capturing_on

__all__ = [
    "ADDRESS_BUDGET",
    "AddressBudget",
    "Arena",
    "CudaArena",
    "HostArena",
    "TorchArena",
    "round_down",
    "round_up",
]

BASE_ALIGNMENT = 256
"""Bytes; every arena starts at a multiple."""


def round_up(nbytes: int, granule: int) -> int:
    """Smallest multiple of ``granule`` that is not below ``nbytes``."""
    return -(-nbytes // granule) * granule


def round_down(nbytes: int, granule: int) -> int:
    """Largest multiple of ``granule`` that is not above ``nbytes``."""
    return nbytes // granule * granule


class AddressBudget:
    """How much address space the arenas of this process may reserve together.

    A 47-bit address space holds 128 TiB. Half of it is left to the program. While there is plenty, a slot gets all it
    asks for; when it gets short, each takes a fixed share of what is left, so that many small slots still find room.

    Concurrency: one lock around two integers.
    """

    SHARE = 64
    """A slot takes at most one part in this many of what is left."""

    def __init__(self, total: int = 2**46) -> None:
        self.total = total
        self.taken = 0
        self._lock = threading.RLock()  # a finalizer of another pool may come in between

    def take(self, wanted: int, least: int) -> int:
        """Take ``wanted`` bytes, or a smaller share not below ``least``; returns what was taken.

        Raises:
            PoolLimitError: fewer than ``least`` bytes are left.
        """
        with self._lock:
            left = self.total - self.taken
            granted = min(wanted, max(least, left // self.SHARE))
            if granted > left:
                raise PoolLimitError("address space of the process", need=least, have=self.taken, limit=self.total)
            self.taken += granted
            return granted

    def give_back(self, nbytes: int) -> None:
        """Return bytes that ``take`` granted."""
        with self._lock:
            self.taken -= nbytes

    def after_fork(self) -> None:
        """In a forked child: a free lock."""
        self._lock = threading.RLock()


ADDRESS_BUDGET = AddressBudget()


class Arena(abc.ABC):
    """Memory of one tensor of a slot.

    ``address`` is where it starts, ``reserved_bytes`` its address space, ``mapped_bytes`` the physical memory behind its
    start. Methods other than ``grow`` need a synchronised device. Not thread-safe: the pool's lock serialises.
    """

    kind: str
    is_stable = True
    """Whether ``address`` stays the same when the arena grows."""
    address: int
    reserved_bytes: int
    granule: int
    mapped_bytes: int = 0

    def bytes_for(self, nbytes: int) -> int:
        """Mapped bytes that the arena would have after ``grow(nbytes)``."""
        return max(self.mapped_bytes, round_up(nbytes, self.granule))

    @abc.abstractmethod
    def grow(self, nbytes: int) -> None:
        """Map whole granules until ``nbytes`` fit. All or nothing.

        Raises:
            DeviceOutOfMemoryError: no physical memory is left.
            DriverError: the driver refused.
        """

    @abc.abstractmethod
    def shrink(self, nbytes: int) -> None:
        """Give back memory behind the first ``nbytes`` bytes, as far as it can be given back in part."""

    @abc.abstractmethod
    def release(self) -> None:
        """Give back everything, the address range too."""


class CudaArena(Arena):
    """A reserved range of CUDA addresses with physical memory of one device mapped behind its start.

    Note [Books and driver]
        Rationale: a signal handler may raise when a driver call has just taken effect, before anything could be noted.
        Approach: what is not sure to be mapped is not in the books. Before a call the extent behind the books is noted as
        doubtful; when the call has returned, books and note change in assignments alone, which no handler comes between.
        Whoever needs the place next takes a doubtful mapping away, whether it is there or not.
        Limits: physical memory that was made by the very call that the handler interrupted is lost to the process.
    """

    kind = "cuda"

    def __init__(self, driver: VirtualMemoryDriver, reserve_bytes: int) -> None:
        self._driver = driver
        self.granule = driver.granule
        self.reserved_bytes = max(self.granule, round_down(reserve_bytes, self.granule))
        self.address = driver.address_reserve(self.reserved_bytes)
        self._extents: list[int] = []  # bytes of each mapping, in address order
        self._doubtful_bytes = 0  # of an extent behind the books that may be mapped

    def grow(self, nbytes: int) -> None:
        extent = round_up(nbytes, self.granule) - self.mapped_bytes
        if extent <= 0:
            return
        self._unmap_doubtful()
        driver, start = self._driver, self.address + self.mapped_bytes
        with contextlib.ExitStack() as undo:
            handle = driver.create(extent)
            undo.callback(self._release_handle, handle)
            self._doubtful_bytes = extent
            undo.callback(self._unmap_doubtful)
            driver.map(start, extent, handle)
            driver.set_access(start, extent)
            driver.release(handle)
            undo.pop_all()
        self._extents = [*self._extents, extent]
        self.mapped_bytes += extent
        self._doubtful_bytes = 0

    def shrink(self, nbytes: int) -> None:
        self._unmap_doubtful()
        while self._extents and self.mapped_bytes - self._extents[-1] >= nbytes:
            extent = self._extents[-1]
            self._extents = self._extents[:-1]
            self.mapped_bytes -= extent
            self._doubtful_bytes = extent
            try:
                self._driver.unmap(self.address + self.mapped_bytes, extent)
            except DriverError:  # it is still there
                self._extents = [*self._extents, extent]
                self.mapped_bytes += extent
                self._doubtful_bytes = 0
                raise
            self._doubtful_bytes = 0

    def _unmap_doubtful(self) -> None:
        """Take a doubtful mapping away; the driver's complaint that there is none says nothing new."""
        if self._doubtful_bytes:
            with contextlib.suppress(DriverError):
                self._driver.unmap(self.address + self.mapped_bytes, self._doubtful_bytes)
            self._doubtful_bytes = 0

    def _release_handle(self, handle: Any) -> None:
        """Drop the handle of a growth that failed, unless it is dropped already."""
        with contextlib.suppress(DriverError):
            self._driver.release(handle)

    def release(self) -> None:
        self.shrink(0)
        if self.reserved_bytes:
            self._driver.address_free(self.address, self.reserved_bytes)
            self.reserved_bytes = 0


class HostArena(Arena):
    """An anonymous private mapping of the whole range; pages get memory when they are first touched.

    ``mapped_bytes`` is the prefix that was asked for, rounded up to pages: an upper bound of what is committed.
    """

    kind = "host"
    granule = host_memory.PAGE_BYTES

    def __init__(self, address: int, reserved_bytes: int) -> None:
        self.address = address
        self.reserved_bytes = reserved_bytes

    @classmethod
    def reserve(cls, nbytes: int) -> HostArena | None:
        """An arena of ``nbytes``; None where the system has no room for the range."""
        nbytes = max(cls.granule, round_down(nbytes, cls.granule))
        address = host_memory.reserve(nbytes)
        return None if address is None else cls(address, nbytes)

    def grow(self, nbytes: int) -> None:
        self.mapped_bytes = self.bytes_for(nbytes)

    def shrink(self, nbytes: int) -> None:
        kept = round_up(nbytes, self.granule)
        if kept < self.mapped_bytes:
            host_memory.give_back(self.address + kept, self.mapped_bytes - kept)
            self.mapped_bytes = kept

    def release(self) -> None:
        if self.reserved_bytes:
            host_memory.release(self.address, self.reserved_bytes)
            self.mapped_bytes = self.reserved_bytes = 0


_MOST_BYTES = 2**62  # what torch takes as a size, with room to spare


class TorchArena(Arena):
    """Memory from torch's own allocator, for devices without virtual memory. It moves when it grows.

    ``reserved_bytes`` equals ``mapped_bytes``: there is no address space apart from the memory.
    """

    kind = "torch"
    is_stable = False
    granule = BASE_ALIGNMENT

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._memory: torch.Tensor | None = None
        self.address = 0
        self.reserved_bytes = 0

    def grow(self, nbytes: int) -> None:
        wanted = self.bytes_for(nbytes)
        if wanted == self.mapped_bytes:
            return
        if self._device.type == "cuda":
            if is_capturing_on(self._device):
                raise CaptureError(
                    f"{self._device}: expected memory mapped before the capture, got a growth to {wanted} bytes inside it;"
                    " an arena of kind 'torch' moves when it grows: call reserve() before capturing"
                )
            if self._memory is not None:
                self._memory.record_stream(torch.cuda.current_stream(self._device))
        if wanted > _MOST_BYTES:
            raise DeviceOutOfMemoryError(f"{self._device}: torch.empty of {wanted} bytes", wanted)
        try:
            memory = torch.empty(wanted + BASE_ALIGNMENT, dtype=torch.uint8, device=self._device)
        except RuntimeError as error:
            if self._device.type != "cpu" and not isinstance(error, torch.OutOfMemoryError):
                raise
            raise DeviceOutOfMemoryError(f"{self._device}: torch.empty of {wanted} bytes: {error}", wanted) from error
        address = round_up(memory.data_ptr(), BASE_ALIGNMENT)
        self._memory, self.address = memory, address
        self.mapped_bytes = self.reserved_bytes = wanted

    def shrink(self, nbytes: int) -> None:
        if nbytes == 0:
            self._memory = None
            self.address = self.mapped_bytes = self.reserved_bytes = 0

    def release(self) -> None:
        self.shrink(0)

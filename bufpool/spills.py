"""Spilled results: memory of torch's allocator, found again by address while anything holds it.

torch's ``Tensor.record_stream`` acts on storages that torch's allocator made, and passes over all others without a word. A
spilled result that comes back from a DLPack capsule has a storage of its own; only the original one can declare a reader.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from .torch_state import storage_of_weak, without_modes

__all__ = ["Spills"]


class Spills:
    """The storages of spilled results, as long as they live. It keeps none of them alive.

    Concurrency: the pools' lock serialises. A finalizer that runs inside a call may spill too.
    """

    LEAST_ENTRIES = 64
    """Ended storages are forgotten when there are more entries than this, and than twice those alive last time."""

    def __init__(self) -> None:
        self._entries: list[StorageWeakRef] = []
        self._most = self.LEAST_ENTRIES
        self._is_forgetting = False

    def note(self, storages: Iterable[torch.UntypedStorage]) -> None:
        """Remember new results."""
        self._entries += [StorageWeakRef(storage) for storage in storages]  # type: ignore[no-untyped-call]
        if len(self._entries) > self._most and not self._is_forgetting:
            self._is_forgetting = True  # what a finalizer adds meanwhile stands behind those that are looked at
            try:
                self._forget(len(self._entries))
            finally:
                self._is_forgetting = False

    def _forget(self, count: int) -> None:
        """Forget those of the first ``count`` that have ended."""
        self._entries[:count] = [weak for weak in self._entries[:count] if not weak.expired()]  # type: ignore[no-untyped-call]
        self._most = max(self.LEAST_ENTRIES, 2 * len(self._entries))

    def at(self, address: int) -> torch.Tensor | None:
        """The bytes of the living result at this address, over its own storage; None if there is none."""
        for weak in self._entries[::-1]:
            storage = storage_of_weak(weak.cdata)
            if storage is not None and storage.data_ptr() <= address < storage.data_ptr() + storage.nbytes():
                with without_modes():
                    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
        return None

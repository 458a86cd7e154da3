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

    Concurrency: the pool's lock serialises.
    """

    LEAST_ENTRIES = 64
    """Ended storages are forgotten when there are more entries than this, and than twice those alive last time."""

    def __init__(self) -> None:
        self._entries: list[tuple[int, int, StorageWeakRef]] = []  # first address, last one + 1
        self._most = self.LEAST_ENTRIES

    def note(self, tensors: Iterable[torch.Tensor]) -> None:
        """Remember new results."""
        count = len(self._entries)
        if count >= self._most:
            self._most = 2 * count  # first: a finalizer may spill meanwhile, and append
            self._entries[:count] = [entry for entry in self._entries[:count] if not entry[2].expired()]  # type: ignore[no-untyped-call]
            self._most = max(self.LEAST_ENTRIES, 2 * len(self._entries))
        for tensor in tensors:
            storage = tensor.untyped_storage()
            start = storage.data_ptr()
            self._entries.append((start, start + storage.nbytes(), StorageWeakRef(storage)))  # type: ignore[no-untyped-call]

    def at(self, address: int) -> torch.Tensor | None:
        """The bytes of the living result at this address, over its own storage; None if there is none."""
        for start, end, weak in self._entries[::-1]:
            if start <= address < end:
                storage = storage_of_weak(weak.cdata)
                if storage is not None:
                    with without_modes():
                        return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
        return None

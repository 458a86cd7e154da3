"""What the pool is measured against: the grow-only cache that engines write by hand."""

from __future__ import annotations

from typing import Any

import torch

from ..allocator import Like, home_device
from ..spec import OutputSpec

__all__ = ["GrowOnlyAllocator"]


class GrowOnlyAllocator:
    """The cache as it is usually written: a buffer per output, replaced by a larger one, handed out as ``buf[:rows]``.

    A baseline, **not for use**: the second result overwrites the first, growth moves the address, and the old and the
    new buffer live side by side while it grows. It is quick, and that is what it is here for. It looks no further than
    spec and device, and checks nothing.
    """

    def __init__(self) -> None:
        self._buffers: dict[tuple[int, torch.device], list[torch.Tensor]] = {}

    def acquire(self, spec: OutputSpec, rows: int, like: Like) -> Any:
        """Return the first ``rows`` rows of the lane's buffers, whoever holds them already."""
        device = like.device if isinstance(like, torch.Tensor) else home_device(like)
        buffers = self._buffers.get((spec.key, device))
        if buffers is None or buffers[0].shape[0] < rows:
            buffers = [
                torch.empty((rows, *shape), dtype=dtype, device=device)
                for shape, dtype in zip(spec.row_shapes, spec.dtypes, strict=True)
            ]
            self._buffers[spec.key, device] = buffers
        return spec.outputs_type(*[buffer[:rows] for buffer in buffers])

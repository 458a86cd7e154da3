"""Bytes that the baselines would hold for the same calls: what the pool's mapped bytes are drawn beside."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import torch

from ..allocator import FreshAllocator, OutputAllocator
from ..spec import OutputSpec
from .baselines import GrowOnlyAllocator

__all__ = ["baseline_bytes"]


def baseline_bytes(
    rows: Sequence[int], spec: OutputSpec, hold: int, device: torch.device
) -> tuple[dict[str, list[int]], str]:
    """Bytes held by ``fresh`` and ``grow_only`` at each call, and what the figure is.

    On CUDA the calls are made again without the operator, and the figure is what torch's caching allocator reserves
    for them, which is what other programs go without. Elsewhere freed memory goes back, and the figure is the sum of
    the buffers that exist during the call: for a growing cache the old and the new one.
    """
    if device.type == "cuda":
        like = torch.empty(1, device=device)
        return {
            "fresh": _reserved(FreshAllocator(), rows, spec, hold, like),
            "grow_only": _reserved(GrowOnlyAllocator(), rows, spec, 0, like),
        }, "reserved by torch"
    return {"fresh": _live(rows, spec, hold), "grow_only": _grow_only(rows, spec)}, "buffers"


def _reserved(
    allocator: OutputAllocator, rows: Sequence[int], spec: OutputSpec, hold: int, like: torch.Tensor
) -> list[int]:
    torch.cuda.synchronize(like.device)
    torch.cuda.empty_cache()
    before = torch.cuda.memory_reserved(like.device)
    kept: deque[object] = deque(maxlen=hold)
    reserved = []
    for count in rows:
        kept.append(allocator.acquire(spec, count, like))
        reserved.append(torch.cuda.memory_reserved(like.device) - before)
    del allocator
    kept.clear()
    torch.cuda.empty_cache()
    return reserved


def _live(rows: Sequence[int], spec: OutputSpec, hold: int) -> list[int]:
    return [spec.nbytes(sum(rows[max(number - hold, 0) : number + 1])) for number in range(len(rows))]


def _grow_only(rows: Sequence[int], spec: OutputSpec) -> list[int]:
    held = []
    capacity = 0
    for count in rows:
        held.append(spec.nbytes(capacity + count if count > capacity else capacity))
        capacity = max(capacity, count)
    return held

"""Bytes over calls: what the pool maps and needs, and what the baselines would hold for the same calls."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import cycle

import torch

from ..allocator import FreshAllocator, OutputAllocator
from ..pool import OutputPool
from ..stats import PoolStats
from .acquire_case import Setting
from .baselines import GrowOnlyAllocator

__all__ = ["PoolBytes", "baseline_bytes", "pool_bytes"]


@dataclass(frozen=True)
class PoolBytes:
    """A pool's bytes after each call of a workload, and its figures after the last one."""

    mapped: list[int]
    needed: list[int]
    stats: PoolStats


def pool_bytes(setting: Setting) -> PoolBytes:
    """What a new pool maps for the workload, and what it needs."""
    mapped, needed = [], []
    with OutputPool() as pool:
        for _ in _calls(pool, setting):
            stats = pool.stats()
            mapped.append(stats.mapped_bytes)
            needed.append(stats.needed_bytes)
        return PoolBytes(mapped, needed, pool.stats())


def baseline_bytes(setting: Setting) -> tuple[dict[str, list[int]], str]:
    """Bytes held by ``fresh`` and ``grow_only`` at each call, and what the figure is.

    On CUDA the calls are made again without the operator, and the figure is what torch's caching allocator reserves
    for them, which is what other programs go without. Elsewhere freed memory goes back, and the figure is the sum of
    the buffers that exist during the call: for a growing cache the old and the new one.
    """
    if setting.like.device.type == "cuda":
        return {
            "fresh": _reserved(FreshAllocator(), setting),
            "grow_only": _reserved(GrowOnlyAllocator(), setting),
        }, "reserved by torch"
    return {"fresh": _live(setting), "grow_only": _grow_only(setting)}, "buffers"


def _calls(allocator: OutputAllocator, setting: Setting) -> Iterator[None]:
    """Make the workload's calls; every result is alive until the caller asks for the next one."""
    workload = setting.workload
    kept: deque[object] = deque()
    for number, (spec, rows) in enumerate(zip(cycle(setting.specs), workload.rows, strict=False)):
        with setting.on_stream(number):
            kept.append(allocator.acquire(spec, rows, setting.like))
        yield
        while len(kept) > workload.hold:
            kept.popleft()


def _reserved(allocator: OutputAllocator, setting: Setting) -> list[int]:
    device = setting.like.device
    torch.cuda.synchronize(device)
    torch.cuda.empty_cache()
    before = torch.cuda.memory_reserved(device)
    reserved = [torch.cuda.memory_reserved(device) - before for _ in _calls(allocator, setting)]
    del allocator
    torch.cuda.empty_cache()
    return reserved


def _live(setting: Setting) -> list[int]:
    hold = setting.workload.hold
    nbytes = _call_bytes(setting)
    return [sum(nbytes[max(number - hold, 0) : number + 1]) for number in range(len(nbytes))]


def _grow_only(setting: Setting) -> list[int]:
    held = []
    capacity = [0] * len(setting.specs)
    for number, nbytes in enumerate(_call_bytes(setting)):
        lane = number % len(capacity)
        is_growing = nbytes > capacity[lane]
        held.append(sum(capacity) + nbytes * is_growing)
        capacity[lane] = max(capacity[lane], nbytes)
    return held


def _call_bytes(setting: Setting) -> list[int]:
    return [spec.nbytes(rows) for spec, rows in zip(cycle(setting.specs), setting.workload.rows, strict=False)]

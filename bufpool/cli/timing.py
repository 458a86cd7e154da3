"""Host time of acquires: tight loops over row counts, contenders in turn, medians.

A loop here is a function that takes a batch of row counts and makes one acquire for each. Results are dropped as a
careful caller does it: nothing refers to the last result when the next acquire begins (``out = None`` at the end of a
layer). A caller that keeps ``out`` bound across the next call, as ``out = acquire(...)`` in a loop does, holds two
results at a time; that is what ``hold=1`` measures.
"""

from __future__ import annotations

import gc
import statistics
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from itertools import cycle
from time import perf_counter_ns

import torch

from ..allocator import OutputAllocator
from ..spec import OutputSpec

__all__ = ["BATCH_CALLS", "Loop", "acquire_loop", "batches", "median_us", "on_streams", "time_loops"]

BATCH_CALLS = 200
"""Calls between two readings of the clock, which itself costs about 0.05 us."""

Loop = Callable[[Sequence[int]], None]


def acquire_loop(
    allocator: OutputAllocator,
    specs: Sequence[OutputSpec],
    like: torch.Tensor,
    *,
    hold: int = 0,
    streams: Sequence[torch.cuda.Stream] = (),
) -> Loop:
    """A loop that acquires from ``allocator``, one spec after another in turn.

    Args:
        allocator: who serves.
        specs: one for each lane.
        like: a tensor on the device.
        hold: the last ``hold`` results are alive while the next one is acquired, across batches too.
        streams: each batch is dealt to them in as many runs of successive calls, so that the change of stream, some
            microseconds in torch, is a small part of the time. None: the current stream.
    """
    acquire = allocator.acquire
    spec = specs[0]
    kept: deque[object] = deque(maxlen=hold)

    def hold_results(rows: Sequence[int]) -> None:
        for lane, count in zip(cycle(specs), rows, strict=False):
            kept.append(acquire(lane, rows=count, like=like))

    def drop_results_of_lanes(rows: Sequence[int]) -> None:
        for lane, count in zip(cycle(specs), rows, strict=False):
            acquire(lane, rows=count, like=like)

    def drop_results(rows: Sequence[int]) -> None:
        for count in rows:
            acquire(spec, rows=count, like=like)

    loop = hold_results if hold else drop_results if len(specs) == 1 else drop_results_of_lanes
    return on_streams(loop, streams) if streams else loop


def on_streams(loop: Loop, streams: Sequence[torch.cuda.Stream]) -> Loop:
    """The same calls, in as many runs as there are streams, each run on another one."""

    def deal(rows: Sequence[int]) -> None:
        share = -(-len(rows) // len(streams))
        for number, stream in enumerate(streams):
            with torch.cuda.stream(stream):
                loop(rows[number * share : (number + 1) * share])

    return deal


def batches(rows: Sequence[int], batch_calls: int = BATCH_CALLS) -> list[Sequence[int]]:
    """Cut row counts into whole batches; a rest at the end is left out, unless it is all there is."""
    whole = [rows[place : place + batch_calls] for place in range(0, len(rows) - batch_calls + 1, batch_calls)]
    return whole or [rows]


def time_loops(
    loops: Mapping[str, Loop],
    rounds: Sequence[Sequence[int]],
    device: torch.device,
    *,
    before: Callable[[str], None] = lambda name: None,
    on_round: Callable[[], None] = lambda: None,
) -> dict[str, list[float]]:
    """Host microseconds per call, for each loop and round.

    In every round each loop runs the same batch once, and the order of the loops moves on by one from round to round.
    The garbage collector is off meanwhile, and work queued on the device is waited for before each reading.

    Args:
        loops: the contenders.
        rounds: a batch of row counts for each round.
        device: what is waited for.
        before: told the loop that comes next, outside the clock.
        on_round: called after each round, outside the clock.
    """
    us: dict[str, list[float]] = {name: [] for name in loops}
    names = list(loops)
    was_enabled = gc.isenabled()
    gc.collect()
    gc.disable()
    try:
        for number, batch in enumerate(rounds):
            first = number % len(names)
            for name in names[first:] + names[:first]:
                loop = loops[name]
                before(name)
                _wait(device)
                start = perf_counter_ns()
                loop(batch)
                us[name].append((perf_counter_ns() - start) / 1e3 / len(batch))
            on_round()
    finally:
        if was_enabled:
            gc.enable()
    return us


def median_us(us: Mapping[str, Sequence[float]]) -> dict[str, float]:
    """The median over the rounds, for each loop."""
    return {name: statistics.median(values) for name, values in us.items()}


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)

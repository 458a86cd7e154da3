"""One workload for several allocators: checked once, warmed, then timed by the host clock in turn.

``bufpool bench`` and ``benchmarks/bench_acquire.py`` take their cases from here, so that both measure the same.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch

from ..allocator import FreshAllocator, OutputAllocator
from ..ops.sparse_mla import sparse_mla_spec
from ..pool import OutputPool
from ..spec import OutputSpec
from ..workloads import Workload
from .baselines import GrowOnlyAllocator
from .timing import Loop, acquire_loop, batches, time_loops

__all__ = [
    "ALLOCATORS",
    "WARM_ROUNDS",
    "Case",
    "Setting",
    "first_fault",
    "lane_heads",
    "make_case",
    "time_cold",
    "unsuited",
]

ALLOCATORS: dict[str, Callable[[], OutputAllocator]] = {
    "fresh": FreshAllocator,
    "grow_only": GrowOnlyAllocator,
    "pool": OutputPool,
}
"""Who is compared, by name."""

WARM_ROUNDS = 2
_NUMBERS = 251  # bfloat16 holds integers up to 256; a prime is no multiple of the number of outputs


@dataclass(frozen=True)
class Setting:
    """A workload with what it needs on one device: a spec for each lane, an input, the streams."""

    workload: Workload
    specs: tuple[OutputSpec, ...]
    like: torch.Tensor
    streams: tuple[torch.cuda.Stream, ...]

    @classmethod
    def of(cls, workload: Workload, heads: int, device: torch.device) -> Setting:
        """``heads`` query heads; the second lane has half of them."""
        return cls(
            workload,
            tuple(sparse_mla_spec(count) for count in lane_heads(workload, heads)),
            torch.empty(1, device=device),
            tuple(_stream(device) for _ in range(workload.streams)) if workload.streams > 1 else (),
        )

    @property
    def largest_rows(self) -> int:
        """One more than the workload's largest row count, so that row counts never seen stay so."""
        return max(self.workload.rows) + 1

    def loop(self, allocator: OutputAllocator) -> Loop:
        """The workload's calls on ``allocator``."""
        return acquire_loop(allocator, self.specs, self.like, hold=self.workload.hold, streams=self.streams)

    def on_stream(self, call: int) -> AbstractContextManager[object]:
        """The stream whose turn it is."""
        return torch.cuda.stream(self.streams[call % len(self.streams)]) if self.streams else nullcontext()


@dataclass(frozen=True)
class Case:
    """Loops of all contenders, warmed by the largest row count, and the batches that each of them runs."""

    loops: dict[str, Loop]
    warm: list[Sequence[int]]
    timed: list[Sequence[int]]


def lane_heads(workload: Workload, heads: int) -> list[int]:
    """Query heads of each lane."""
    return [heads, max(heads // 2, 1)][: workload.lanes]


def unsuited(workload: Workload, device: torch.device) -> str | None:
    """Why the workload cannot run there; None if it can."""
    if workload.streams > 1 and device.type != "cuda":
        return f"expected a CUDA device, which has streams, got {device}"
    return None


def make_case(setting: Setting, contenders: Mapping[str, Loop]) -> Case:
    """Warm the contenders and cut the workload into batches.

    A workload of too few batches, such as a short trace, is taken several times over.
    """
    workload = setting.workload
    parts = batches(workload.rows)
    parts = parts * -(-(WARM_ROUNDS + 1) // len(parts))
    together = workload.lanes * (workload.hold + 1) * workload.streams
    for loop in contenders.values():
        loop([setting.largest_rows] * together)
    return Case(dict(contenders), parts[:WARM_ROUNDS], parts[WARM_ROUNDS:])


def time_cold(
    setting: Setting,
    makers: Mapping[str, Callable[[], OutputAllocator]],
    rounds: int,
    on_round: Callable[[], None] = lambda: None,
) -> dict[str, list[float]]:
    """Host microseconds per call, each round on a new allocator with no memory cached by torch; growth is in it."""
    device = setting.like.device
    loops = {name: _ColdLoop(make, setting) for name, make in makers.items()}

    def before(name: str) -> None:
        for loop in loops.values():
            loop.drop()
        if device.type == "cuda":
            torch.cuda.empty_cache()
        loops[name].renew()

    batch = setting.workload.rows
    try:
        time_loops(loops, [batch], device, before=before)
        return time_loops(loops, [batch] * rounds, device, before=before, on_round=on_round)
    finally:
        for loop in loops.values():
            loop.drop()
        if device.type == "cuda":
            torch.cuda.empty_cache()


class _ColdLoop:
    """The workload's calls on an allocator that is replaced between the rounds."""

    def __init__(self, make: Callable[[], OutputAllocator], setting: Setting) -> None:
        self._make = make
        self._setting = setting
        self._allocator: OutputAllocator | None = None
        self._loop: Loop | None = None

    def renew(self) -> None:
        self._allocator = self._make()
        self._loop = self._setting.loop(self._allocator)

    def drop(self) -> None:
        allocator = self._allocator
        self._loop = self._allocator = None
        if isinstance(allocator, OutputPool):
            allocator.close()

    def __call__(self, rows: Sequence[int]) -> None:
        assert self._loop is not None
        self._loop(rows)


def first_fault(allocator: OutputAllocator, setting: Setting) -> str | None:
    """What is wrong with results that are alive together, or None.

    As many results as the workload has at a time: one more than it holds, for each lane and stream (dropped results of
    several streams count too: the kernels that write them run side by side). The last row of every tensor is filled
    with a number of its own, and has to keep it while the others are filled.
    """
    rows = setting.largest_rows
    workload = setting.workload
    device = setting.like.device
    results = []
    for call in range((workload.hold + 1) * workload.streams):
        with setting.on_stream(call):
            results += [(spec, allocator.acquire(spec, rows, setting.like)) for spec in setting.specs]
    _wait(device)
    numbered = [each for spec, result in results for each in zip(spec, result, strict=True)]
    for number, ((name, shape, dtype), tensor) in enumerate(numbered):
        want, got = ((rows, *shape), dtype, device), (tuple(tensor.shape), tensor.dtype, tensor.device)
        if got != want:
            return f"{name}: expected {want}, got {got}"
        tensor[-1].fill_(number % _NUMBERS)
    for number, ((name, _, _), tensor) in enumerate(numbered):
        if not bool((tensor[-1] == number % _NUMBERS).all()):
            got_number = int(tensor[-1].flatten()[0])
            return f"{name}: expected a held result to keep its {number % _NUMBERS}, got {got_number}"
    return None


def _stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)

"""The main job: prefill chunks through layers, each one acquire, operator, consumer, with results compared bit for bit.

One call is one layer of one chunk. The outputs come from the allocator under test, through the operator's
``allocator=``; a consumer reads all three at once; then the result is kept for ``hold`` further calls and dropped.
Every n-th call is computed once more on `FreshAllocator`, and the kept result is compared with that at the moment it is
dropped: whatever overwrote it in between shows.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

import torch

from ..allocator import FreshAllocator, OutputAllocator
from ..ops.sparse_mla import sparse_mla_spec
from ..workloads import Chunk, chunks

__all__ = ["Call", "Job", "JobResult", "job_bytes", "plan_calls", "run_calls"]

_D_QK = 576
_TILE_ROWS = 4093  # prime, so that no head count makes two rows of q start alike
_MOST_CHECKS = 64
_LEAST_STEP = 7  # calls from one comparison to the next; each comparison costs one more operator call
_SHIFTS = 127  # layers and requests take turns at as many places of the random inputs

Operator = Callable[..., Any]


@dataclass(frozen=True)
class Call:
    """One layer of one chunk."""

    chunk: Chunk
    layer: int

    @property
    def rows(self) -> int:
        return self.chunk.rows


@dataclass(frozen=True)
class Job:
    """What to compute: the calls and the shape of one of them."""

    calls: Sequence[Call]
    layers: int
    heads: int
    topk: int
    hold: int
    seed: int
    device: torch.device


@dataclass(frozen=True)
class JobResult:
    """What came out: results that were equal and different, the first that differed, and a sum over all results."""

    verified: int
    failed: int
    first_failure: str | None
    checksum: float


def plan_calls(prompts: Iterable[int], *, chunk: int, layers: int, max_calls: int) -> list[Call]:
    """The first ``max_calls`` calls: request after request, chunk after chunk, layer after layer."""
    return list(islice((Call(part, layer) for part in chunks(prompts, chunk) for layer in range(layers)), max_calls))


def job_bytes(job: Job) -> int:
    """Bytes that inputs and results of the job take at least, beside what the operator needs while it computes."""
    rows, tokens = _extent(job)
    # kv is drawn in float32 before it becomes one byte a value; indices are drawn, widened and narrowed again.
    inputs = (rows + _SHIFTS) * job.heads * _D_QK + (tokens + _SHIFTS) * _D_QK * 5 + rows * job.topk * 20
    return inputs + sparse_mla_spec(job.heads).nbytes(rows) * (job.hold + 2)


def _extent(job: Job) -> tuple[int, int]:
    """Most rows of a call, and most tokens of a request."""
    return max(call.rows for call in job.calls), max(call.chunk.start + call.rows for call in job.calls)


class _Inputs:
    """Random inputs of every call, made once; each layer and request looks at another part of them."""

    def __init__(self, job: Job) -> None:
        rows, tokens = _extent(job)
        self._layers = job.layers
        self._device = job.device
        self._topk = job.topk
        self._source = torch.Generator(job.device).manual_seed(job.seed)
        tile = self._random(_TILE_ROWS)
        places = torch.arange((rows + _SHIFTS) * job.heads, device=job.device) % _TILE_ROWS
        # Gathered as bytes: not every torch indexes float8.
        self._q = tile.view(torch.uint8)[places].view(tile.dtype).view(rows + _SHIFTS, job.heads, _D_QK)
        self._kv = self._random(tokens + _SHIFTS)
        self.q_scale = torch.full((), 0.5, device=job.device)
        self.kv_scale = torch.full((), 0.25, device=job.device)

    def _random(self, rows: int) -> torch.Tensor:
        values = torch.randn(rows, _D_QK, generator=self._source, device=self._device)
        return values.to(torch.float8_e4m3fn)

    def indices(self, chunk: Chunk) -> torch.Tensor:
        """``[rows, topk]`` int32: each row's own token, and earlier ones; -1 where there are not that many."""
        own = torch.arange(chunk.start, chunk.start + chunk.rows, device=self._device).unsqueeze(1)
        draws = torch.rand(chunk.rows, self._topk, generator=self._source, device=self._device)
        # float32 draws times a large position may round up to the position itself plus one.
        places = torch.minimum((draws * (own + 1)).long(), own)
        places[:, :1] = own
        places.masked_fill_(torch.arange(self._topk, device=self._device) > own, -1)
        return places.to(torch.int32)

    def layer(self, call: Call) -> tuple[torch.Tensor, torch.Tensor]:
        """``q [rows, heads, d_qk]`` and ``kv [tokens so far, d_qk]`` of this call, float8."""
        shift = (call.chunk.request * self._layers + call.layer) % _SHIFTS
        return self._q[shift : shift + call.rows], self._kv[shift : shift + call.chunk.start + call.rows]


def run_calls(
    job: Job,
    allocator: OutputAllocator,
    operator: Operator,
    on_call: Callable[[int], None] = lambda done: None,
) -> JobResult:
    """Compute every call and compare every n-th.

    Args:
        job: the calls; at least one.
        allocator: serves the outputs.
        operator: `bufpool.ops.sparse_mla_prefill`, or something called like it.
        on_call: told the number of calls done, after each call, while its result is still held if ``job.hold`` is
            not 0.
    """
    return _Run(job, allocator, operator).all_calls(on_call)


class _Run:
    def __init__(self, job: Job, allocator: OutputAllocator, operator: Operator) -> None:
        self._job = job
        self._allocator = allocator
        self._fresh = FreshAllocator()
        self._operator = operator
        self._inputs = _Inputs(job)
        self._step = _check_step(len(job.calls), job.layers)
        self._kept: deque[tuple[int, Any, Any]] = deque()
        self._sum = torch.zeros((), dtype=torch.float64, device=job.device)
        self._verified = 0
        self._failed = 0
        self._first_failure: str | None = None

    def all_calls(self, on_call: Callable[[int], None]) -> JobResult:
        indices = None
        chunk = None
        for number, call in enumerate(self._job.calls):
            if indices is None or call.chunk != chunk:
                chunk = call.chunk
                indices = self._inputs.indices(chunk)
            self._one_call(number, call, indices)
            self._drop(self._job.hold)
            on_call(number + 1)
        self._drop(0)
        return JobResult(self._verified, self._failed, self._first_failure, float(self._sum))

    def _one_call(self, number: int, call: Call, indices: torch.Tensor) -> None:
        # A function of its own, so that nothing but the queue refers to the outputs when it returns.
        outputs = self._compute(call, indices, self._allocator)
        self._consume(outputs)
        is_checked = number % self._step == 0 or number == len(self._job.calls) - 1
        expected = self._compute(call, indices, self._fresh) if is_checked else None
        self._kept.append((number, outputs, expected))

    def _compute(self, call: Call, indices: torch.Tensor, allocator: OutputAllocator) -> Any:
        q, kv = self._inputs.layer(call)
        return self._operator(q, kv, indices, _D_QK**-0.5, self._inputs.q_scale, self._inputs.kv_scale, allocator=allocator)

    def _consume(self, outputs: Any) -> None:
        for tensor in outputs:
            self._sum += tensor.sum(dtype=torch.float32)

    def _drop(self, hold: int) -> None:
        while len(self._kept) > hold:
            number, outputs, expected = self._kept.popleft()
            if expected is not None:
                self._compare(number, outputs, expected)

    def _compare(self, number: int, outputs: Any, expected: Any) -> None:
        call = self._job.calls[number]
        for name, got, want in zip(sparse_mla_spec(self._job.heads).names, outputs, expected, strict=True):
            difference = _difference(got, want)
            if difference:
                self._failed += 1
                if self._first_failure is None:
                    self._first_failure = (
                        f"call {number} (request {call.chunk.request}, layer {call.layer}, {call.rows} rows), "
                        f"{name}: {difference}"
                    )
                return
        self._verified += 1


def _check_step(calls: int, layers: int) -> int:
    """Calls from one comparison to the next: few comparisons, and every layer gets its turn."""
    step = max(_LEAST_STEP, -(-calls // _MOST_CHECKS))
    while math.gcd(step, layers) != 1:
        step += 1
    return step


def _difference(got: torch.Tensor, want: torch.Tensor) -> str | None:
    """What differs first, or None where both hold the same bits."""
    if got.shape != want.shape or got.dtype != want.dtype:
        return f"expected {list(want.shape)} {want.dtype}, got {list(got.shape)} {got.dtype}"
    bits = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[want.dtype.itemsize]
    got_bits, want_bits = got.contiguous().view(bits), want.contiguous().view(bits)
    if torch.equal(got_bits, want_bits):
        return None
    place = tuple((got_bits != want_bits).nonzero()[0].tolist())
    return f"expected {want[place].item()!r} at {list(place)}, got {got[place].item()!r}"

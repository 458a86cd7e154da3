"""What engines ask for: request traces, prefill chunks, and the row counts of successive acquires.

A *prompt* is a number of tokens; a *chunk* is the part of one prompt that one forward computes; every layer of that
forward acquires outputs of as many rows as the chunk has. Pure Python and deterministic: the same arguments give the
same numbers on every machine. The main job, ``bufpool bench`` and the benchmarks take their row counts from here.
"""

from __future__ import annotations

import csv
import math
import os
import random
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice

from .errors import BufpoolError

__all__ = [
    "CHUNK_ROWS",
    "HOLDS",
    "LAYERS",
    "PROMPT_COLUMN",
    "RAMP_ROWS",
    "RAMP_STEPS",
    "STREAMS",
    "Chunk",
    "TraceError",
    "Workload",
    "chunks",
    "constant",
    "held",
    "layered_trace",
    "many_streams",
    "ramp",
    "read_trace",
    "suite",
    "synthetic_trace",
    "two_lanes",
    "unseen",
]

PROMPT_COLUMN = "ContextTokens"
"""Column of prompt lengths in the public Azure LLM inference traces."""

CHUNK_ROWS = 8192
"""Most rows of one forward in the measured trace."""
LAYERS = 61
"""Layers of a large model; each asks for the same rows."""
RAMP_ROWS, RAMP_STEPS = 16384, 400
HOLDS = (1, 4)
"""Results held; 1 is ``out = acquire(...)`` in a loop: the last result is alive while the next one is acquired."""
STREAMS = 8
_UNSEEN_ROWS = 8192

MEDIAN_TOKENS = 1000
P99_TOKENS = 4100
MAX_TOKENS = 14_000
_P99_SIGMAS = 2.326347874  # the standard normal's 99th percentile
_SIGMA = math.log(P99_TOKENS / MEDIAN_TOKENS) / _P99_SIGMAS
_MAX_DIGITS = 15


class TraceError(BufpoolError, ValueError):
    """A trace file is missing or unreadable, or a value is not a token count. Name another file or column."""


@dataclass(frozen=True)
class Chunk:
    """Part of one prompt, computed in one forward: tokens ``start`` to ``start + rows`` of request ``request``."""

    request: int
    start: int
    rows: int


@dataclass(frozen=True)
class Workload:
    """Row counts of successive acquires, and what happens to the results.

    Attributes:
        name: what is asked.
        rows: rows of each call, in order.
        lanes: call ``i`` goes to lane ``i % lanes`` (each lane has a spec of its own).
        hold: the last ``hold`` results are alive while the next one is acquired; 0 drops each before the next call.
        streams: so many streams take turns; 1 stays on the current one.
        is_cold: the first call is part of the question: every run begins with a new allocator.
    """

    name: str
    rows: tuple[int, ...]
    lanes: int = 1
    hold: int = 0
    streams: int = 1
    is_cold: bool = False


def read_trace(path: str | os.PathLike[str], column: str = PROMPT_COLUMN) -> list[int]:
    """Prompt lengths in tokens, in file order, from one column of a CSV file with a header line.

    Raises:
        TraceError: the file cannot be read, has no such column, or a value is not an integer >= 0; the text names
            the file, the line, what was wanted and what was got.
    """
    name = os.fspath(path)
    try:
        with open(path, encoding="utf-8-sig", newline="") as file:
            return _prompts(name, csv.reader(file), column)
    except OSError as e:
        raise TraceError(f"{name}: expected a readable CSV file, got {e.strerror or e}") from e
    except UnicodeDecodeError as e:
        raise TraceError(f"{name}: expected UTF-8 text, got byte 0x{e.object[e.start]:02x} at {e.start}") from e
    except csv.Error as e:
        raise TraceError(f"{name}: expected CSV, got a line that is not ({e})") from e


def _prompts(name: str, lines: Iterator[list[str]], column: str) -> list[int]:
    header = next(lines, None)
    if not header:
        raise TraceError(f"{name}: expected a header line with a column {column!r}, got an empty first line")
    header = [title.strip() for title in header]
    if column not in header:
        raise TraceError(f"{name}: expected a column {column!r}, got columns {_shown(', '.join(header))}")
    place = header.index(column)
    prompts = []
    for number, fields in enumerate(lines, start=2):
        if not fields:
            continue
        value = fields[place].strip() if place < len(fields) else ""
        if not (value.isascii() and value.isdigit() and len(value) <= _MAX_DIGITS):
            raise TraceError(
                f"{name}, line {number}: expected {column} as an integer >= 0 of at most {_MAX_DIGITS} digits, "
                f"got {_shown(repr(value)) if value else 'nothing'}"
            )
        prompts.append(int(value))
    if not any(prompts):
        raise TraceError(f"{name}: expected at least one request with {column} > 0, got {len(prompts)} requests without")
    return prompts


def _shown(text: str) -> str:
    """One line of at most 120 characters, so that an error stays one line whatever the file holds."""
    text = " ".join(text.split())
    return text if len(text) <= 120 else text[:117] + "..."


def synthetic_trace(requests: int, seed: int = 0) -> list[int]:
    """Prompt lengths in tokens like those of a public conversation trace.

    Log-normal with median 1000 and 99th percentile 4100, cut at 14000; at least 1.
    """
    source = random.Random(seed)
    draws = (source.lognormvariate(math.log(MEDIAN_TOKENS), _SIGMA) for _ in range(requests))
    return [min(max(round(tokens), 1), MAX_TOKENS) for tokens in draws]


def chunks(prompts: Iterable[int], chunk: int) -> Iterator[Chunk]:
    """Cut each prompt into parts of at most ``chunk`` rows; requests are not merged, empty prompts are left out."""
    for request, tokens in enumerate(prompts):
        for start in range(0, tokens, chunk):
            yield Chunk(request, start, min(chunk, tokens - start))


def constant(rows: int, calls: int) -> Workload:
    """One row count, every result dropped."""
    return Workload("constant", (rows,) * calls)


def unseen(max_rows: int, calls: int, seed: int = 0) -> Workload:
    """``calls`` row counts of which no two are equal, all in 1 .. ``max_rows``, in random order.

    Raises:
        ValueError: there are fewer than ``calls`` row counts up to ``max_rows``.
    """
    if calls > max_rows:
        raise ValueError(f"calls: expected at most max_rows = {max_rows} different row counts, got {calls}")
    return Workload("unseen", tuple(random.Random(seed).sample(range(1, max_rows + 1), calls)))


def ramp(max_rows: int, steps: int) -> Workload:
    """``steps`` row counts that rise evenly from 1 to ``max_rows``, on a new allocator: nearly every call grows."""
    last = max(steps - 1, 1)
    return Workload("ramp", tuple(1 + (max_rows - 1) * step // last for step in range(steps)), is_cold=True)


def layered_trace(prompts: Iterable[int], chunk: int, layers: int, calls: int) -> Workload:
    """The first ``calls`` acquires of a trace: each chunk's row count once for every layer, results dropped."""
    per_layer = (part.rows for part in chunks(prompts, chunk) for _ in range(layers))
    return Workload("trace", tuple(islice(per_layer, calls)))


def two_lanes(rows: int, calls: int) -> Workload:
    """One row count, two specs in turn, every result dropped."""
    return Workload("two-lanes", (rows,) * calls, lanes=2)


def held(rows: Sequence[int], hold: int) -> Workload:
    """Row counts with the last ``hold`` results alive while the next one is acquired."""
    return Workload(f"held-{hold}", tuple(rows), hold=hold)


def many_streams(rows: int, calls: int, streams: int) -> Workload:
    """One row count, ``streams`` streams in turn, every result dropped."""
    return Workload(f"streams-{streams}", (rows,) * calls, streams=streams)


def suite(
    rows: int,
    calls: int,
    *,
    prompts: Sequence[int] | None = None,
    seed: int = 0,
    layers: int = LAYERS,
    holds: Iterable[int] = HOLDS,
    streams: int = STREAMS,
    ramp_rows: int = RAMP_ROWS,
    ramp_steps: int = RAMP_STEPS,
) -> dict[str, Workload]:
    """Everything that is measured, by name: what ``bufpool bench`` and the benchmarks choose from.

    Args:
        rows: of the workloads with one row count.
        calls: of each workload, at most; a ramp has ``ramp_steps``, a short trace has fewer.
        prompts: of the trace, in tokens; by default synthetic ones.
        seed: of the synthetic trace and of the unseen row counts.
        layers: calls for each chunk of the trace. Time is asked for all of them; for bytes 1 is enough.
        holds: one workload for each number of results held.
        streams: streams that take turns.
        ramp_rows: where the ramp ends.
        ramp_steps: calls of the ramp.
    """
    workloads = [
        constant(rows, calls),
        unseen(_UNSEEN_ROWS, min(calls, _UNSEEN_ROWS), seed),
        ramp(ramp_rows, ramp_steps),
        layered_trace(prompts or synthetic_trace(calls, seed), CHUNK_ROWS, layers, calls),
        two_lanes(rows, calls),
        *(held((rows,) * calls, hold) for hold in holds),
        many_streams(rows, calls, streams),
    ]
    return {workload.name: workload for workload in workloads}

"""``bufpool run``: the main job on a request trace, with its figures."""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from .. import __version__
from ..allocator import FreshAllocator, OutputAllocator
from ..ops.sparse_mla import sparse_mla_prefill, sparse_mla_spec
from ..pool import OutputPool
from ..spec import OutputSpec
from ..workloads import PROMPT_COLUMN, held, synthetic_trace
from .acquire_case import Setting
from .baselines import GrowOnlyAllocator
from .footprint import baseline_bytes
from .job import Job, job_bytes, plan_calls, run_calls
from .plot import plot_bytes, require_matplotlib
from .progress import progress
from .table import bytes_text, print_table
from .timing import acquire_loop, batches, median_us, time_loops
from .usage import UsageError, integer, open_device, png_file, trace_prompts

__all__ = ["add_arguments", "run_job"]

_MAX_CALLS = 300
_SMALL_ROW = 2**14  # heads times topk; about 0.5 ms of CPU work a row
_LEAST_ROUNDS = 45
_MOST_BATCHES = 60


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``bufpool run``."""
    parser.add_argument(
        "--trace",
        metavar="FILE.csv",
        help="prompt lengths from a CSV file with a header line (default: a synthetic conversation trace)",
    )
    parser.add_argument(
        "--column", default=PROMPT_COLUMN, metavar="NAME", help="its column of prompt lengths in tokens (%(default)s)"
    )
    parser.add_argument(
        "--max-calls",
        type=integer(1, 1_000_000),
        default=_MAX_CALLS,
        metavar="N",
        help="stop after N calls; one call is one layer of one chunk (%(default)s)",
    )
    parser.add_argument(
        "--chunk", type=integer(1), default=2048, metavar="ROWS", help="most rows computed in one forward (%(default)s)"
    )
    parser.add_argument("--layers", type=integer(1), default=4, metavar="N", help="layers per chunk (%(default)s)")
    parser.add_argument("--heads", type=integer(1, 65536), default=4, metavar="N", help="query heads, h_q (%(default)s)")
    parser.add_argument(
        "--topk", type=integer(1), default=32, metavar="N", help="tokens that a row attends to (%(default)s)"
    )
    parser.add_argument(
        "--hold", type=integer(0), default=0, metavar="N", help="keep the last N results alive (%(default)s)"
    )
    parser.add_argument("--device", default="cpu", metavar="NAME", help="cpu, cuda or cuda:N (%(default)s)")
    parser.add_argument(
        "--seed", type=integer(0, 2**63 - 1), default=0, metavar="N", help="of inputs and synthetic trace (%(default)s)"
    )
    parser.add_argument("--json", action="store_true", help="one JSON object on stdout in place of the table")
    parser.add_argument(
        "--plot", type=png_file, metavar="FILE.png", help="draw mapped, needed and the baselines' bytes over calls"
    )


def run_job(args: argparse.Namespace) -> int:
    """Replay, check, measure, and show: 0 where every compared result was equal, else 1.

    Raises:
        UsageError: the trace, the device or the sizes cannot be had.
    """
    if args.plot:
        require_matplotlib()
    prompts = _prompts(args)
    device = open_device(args.device)
    calls = plan_calls(prompts, chunk=args.chunk, layers=args.layers, max_calls=args.max_calls)
    job = Job(calls, args.layers, args.heads, args.topk, args.hold, args.seed, device)
    _require_memory(job)
    # Off a terminal stderr shows the lines of progress; with --json stdout holds one object and nothing else.
    facts, curves = _measure(job)
    facts = {
        "bufpool": __version__,
        "torch": torch.__version__,
        "device": str(device),
        "device_name": torch.cuda.get_device_name(device) if device.type == "cuda" else device.type,
        "trace": args.trace or "synthetic",
        **facts,
        "chunk": args.chunk,
        "layers": args.layers,
        "heads": args.heads,
        "topk": args.topk,
        "hold": args.hold,
        "seed": args.seed,
    }
    if args.plot:
        _plot(args.plot, job, curves)
    if args.json:
        print(json.dumps(facts))
    else:
        _print_facts(facts)
    if facts["failed"]:
        print(f"bufpool run: expected equal results, got a difference in {facts['first_failure']}", file=sys.stderr)
    return 1 if facts["failed"] else 0


def _prompts(args: argparse.Namespace) -> list[int]:
    if args.trace is None:
        # Every prompt has a chunk at least, and every chunk as many calls as layers.
        return synthetic_trace(-(-args.max_calls // args.layers), args.seed)
    return trace_prompts(args.trace, args.column)


def _require_memory(job: Job) -> None:
    need = job_bytes(job)
    if job.device.type == "cuda":
        have = torch.cuda.get_device_properties(job.device).total_memory
    else:
        have = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if need > have:
        raise UsageError(
            f"{job.device}: expected a job of at most {have} bytes, got {need} bytes "
            "(fewer or smaller: --heads, --topk, --chunk, --hold)"
        )


def _measure(job: Job) -> tuple[dict[str, Any], dict[str, list[int]]]:
    curves: dict[str, list[int]] = {"mapped": [], "needed": []}
    with OutputPool() as pool, progress("bufpool run", len(job.calls)) as show:

        def on_call(done: int) -> None:
            stats = pool.stats()
            curves["mapped"].append(stats.mapped_bytes)
            curves["needed"].append(stats.needed_bytes)
            show(done)

        with _threads(job) as threads:
            start = time.monotonic()
            result = run_calls(job, pool, sparse_mla_prefill, on_call)
            seconds = time.monotonic() - start
        stats = pool.stats()
        rows = [call.rows for call in job.calls]
        us = _acquire_us(pool, rows, sparse_mla_spec(job.heads), job)
    facts = {
        "arena": stats.arena,
        "calls": len(job.calls),
        "requests": len({call.chunk.request for call in job.calls}),
        "chunks": len({call.chunk for call in job.calls}),
        "rows": {"min": min(rows), "median": statistics.median_low(rows), "max": max(rows)},
        "slots": stats.slots,
        "grows": stats.grows,
        "rotations": stats.rotations,
        "spills": stats.spills,
        "mapped_bytes": stats.mapped_bytes,
        "needed_bytes": stats.needed_bytes,
        "peak_mapped_bytes": stats.peak_mapped_bytes,
        "reserved_bytes": stats.reserved_bytes,
        "acquire_us": us,
        "verified": result.verified,
        "failed": result.failed,
        "first_failure": result.first_failure,
        "checksum": result.checksum if math.isfinite(result.checksum) else None,  # JSON knows no NaN
        "seconds": round(seconds, 3),
        "threads": threads,
    }
    return facts, curves


@contextmanager
def _threads(job: Job) -> Iterator[int]:
    """Compute small rows on one thread.

    A second one makes the default job 1.5 times as fast on two idle cores, and four times as slow where something else
    runs on them, since the threads wait for one another at each of many small operations.
    """
    before = torch.get_num_threads()
    if job.device.type == "cpu" and job.heads * job.topk < _SMALL_ROW:
        torch.set_num_threads(1)
    try:
        yield torch.get_num_threads()
    finally:
        torch.set_num_threads(before)


def _acquire_us(pool: OutputPool, rows: Sequence[int], spec: OutputSpec, job: Job) -> dict[str, float]:
    """Median host microseconds per acquire over the job's own row counts, without the operator."""
    like = torch.empty(1, device=job.device)
    contenders: Mapping[str, OutputAllocator] = {
        "pool": pool,
        "fresh": FreshAllocator(),
        "grow_only": GrowOnlyAllocator(),
    }
    loops = {name: acquire_loop(each, [spec], like, hold=job.hold) for name, each in contenders.items()}
    parts = batches(rows)
    parts = parts[:: -(-len(parts) // _MOST_BATCHES)]
    for loop in loops.values():
        for part in parts:
            loop(part)
    us = time_loops(loops, parts * -(-_LEAST_ROUNDS // len(parts)), job.device)
    return {name: round(value, 4) for name, value in median_us(us).items()}


def _plot(path: str, job: Job, curves: Mapping[str, Sequence[int]]) -> None:
    rows = [call.rows for call in job.calls]
    baselines, kind = baseline_bytes(Setting.of(held(rows, job.hold), job.heads, job.device))
    named = {
        "pool: mapped": curves["mapped"],
        "pool: needed": curves["needed"],
        f"torch.empty ({kind})": baselines["fresh"],
        f"grow-only cache ({kind})": baselines["grow_only"],
    }
    plot_bytes(path, named, f"{len(rows)} calls, {job.heads} heads, {job.hold} results held, {job.device}")


def _print_facts(facts: Mapping[str, Any]) -> None:
    rows = facts["rows"]
    us = facts["acquire_us"]
    mapped, needed = facts["mapped_bytes"], facts["needed_bytes"]
    ratio = f" = {mapped / needed:.3f}" if needed else ""
    checked = facts["verified"] + facts["failed"]
    print_table(
        f"bufpool run: {facts['trace']} trace on {facts['device_name']}, torch {facts['torch']}",
        [
            ("calls", f"{facts['calls']} ({facts['requests']} requests, {facts['chunks']} chunks)"),
            ("rows min / median / max", f"{rows['min']} / {rows['median']} / {rows['max']}"),
            ("slots", f"{facts['slots']} ({facts['rotations']} rotations, {facts['spills']} spills)"),
            ("grows", str(facts["grows"])),
            ("mapped / needed bytes", f"{bytes_text(mapped)} / {bytes_text(needed)}{ratio} ({facts['arena']} arena)"),
            ("host time per acquire, pool", f"{us['pool']:.2f} us"),
            ("  FreshAllocator", f"{us['fresh']:.2f} us (pool / fresh = {us['pool'] / us['fresh']:.2f})"),
            ("  grow-only cache", f"{us['grow_only']:.2f} us (pool / grow-only = {us['pool'] / us['grow_only']:.2f})"),
            ("operator time in all", f"{facts['seconds']:.1f} s"),
            ("results verified", f"{facts['verified']} of {checked}"),
        ],
    )

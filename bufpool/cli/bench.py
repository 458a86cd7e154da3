"""``bufpool bench``: allocators beside each other on every workload, and the kernels where a GPU runs them."""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from .. import __version__
from ..ops import sparse_mla_sm90
from ..pool import OutputPool
from ..workloads import PROMPT_COLUMN, RAMP_ROWS, RAMP_STEPS, STREAMS, Workload, suite
from .acquire_case import ALLOCATORS, WARM_ROUNDS, Setting, first_fault, make_case, time_cold, unsuited
from .footprint import baseline_bytes, pool_bytes
from .kernel_case import GEMM_SIZE, S_Q, SHAPES, Gemm, KernelCase, KernelShape, time_kernel
from .plot import plot_acquire, plot_kernels, plot_workload_bytes, require_matplotlib
from .progress import progress
from .table import Section, bytes_text, print_sections
from .timing import BATCH_CALLS, time_loops
from .usage import integer, make_folder, open_device, trace_prompts

__all__ = ["add_arguments", "bench_workloads", "run_bench"]

_HEADS = 128
_ROWS = {"cpu": 16}  # a small batch; on the host more rows only mean larger numbers
_CUDA_ROWS = 4096
_NAMES = {"fresh": "fresh", "grow_only": "grow-only", "pool": "pool"}


@dataclass(frozen=True)
class _Extent:
    """How much is measured."""

    rounds: int
    cold_rounds: int
    ramp_rows: int
    ramp_steps: int
    byte_calls: int
    shapes: tuple[KernelShape, ...]
    kernel_seconds: float


_FULL = _Extent(31, 5, RAMP_ROWS, RAMP_STEPS, 2000, SHAPES, 0.3)
_QUICK = _Extent(5, 2, 1024, 40, 200, (SHAPES[0], SHAPES[5]), 0.05)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``bufpool bench``."""
    parser.add_argument("--device", default="cpu", metavar="NAME", help="cpu, cuda or cuda:N (%(default)s)")
    parser.add_argument(
        "--trace",
        metavar="FILE.csv",
        help="prompt lengths from a CSV file with a header line (default: a synthetic conversation trace)",
    )
    parser.add_argument(
        "--column", default=PROMPT_COLUMN, metavar="NAME", help="its column of prompt lengths in tokens (%(default)s)"
    )
    parser.add_argument(
        "--hold", type=integer(1, 64), default=4, metavar="N", help="results alive in the held workload (%(default)s)"
    )
    parser.add_argument(
        "--streams",
        type=integer(2, 32),
        default=STREAMS,
        metavar="N",
        help="CUDA streams that take turns in the streams workload (%(default)s)",
    )
    parser.add_argument(
        "--seed", type=integer(0, 2**63 - 1), default=0, metavar="N", help="of inputs and synthetic trace (%(default)s)"
    )
    parser.add_argument("--quick", action="store_true", help="fewer rounds and shapes, a shorter ramp: a first look")
    parser.add_argument("--json", action="store_true", help="one JSON object on stdout in place of the table")
    parser.add_argument(
        "--plot", metavar="DIR", help="draw acquire.png, bytes.png and, where kernels ran, kernels.png into this folder"
    )


def run_bench(args: argparse.Namespace) -> int:
    """Measure and show: 0 where the pool, fresh memory and the kernels gave right results, else 1.

    Raises:
        UsageError: the trace, the device or the folder cannot be had.
    """
    if args.plot is not None:
        require_matplotlib()
    prompts = None if args.trace is None else trace_prompts(args.trace, args.column)
    device = open_device(args.device)
    if args.plot is not None:
        make_folder(args.plot, "--plot")
    start = time.monotonic()
    extent = _QUICK if args.quick else _FULL
    timed = bench_workloads(device, extent, args, prompts, is_timed=True)
    sized = bench_workloads(device, extent, args, prompts, is_timed=False)
    skipped = {name: reason for name, workload in timed.items() if (reason := unsuited(workload, device))}
    no_kernels = sparse_mla_sm90.unavailable_reason(device)
    shapes = () if no_kernels else extent.shapes
    if no_kernels:
        skipped["kernels"] = no_kernels
    suited = [name for name in timed if name not in skipped]
    total = sum(_rounds(timed[name], extent) for name in suited) + len(shapes)
    workloads: dict[str, dict[str, Any]] = {}
    curves: dict[str, dict[str, list[int]]] = {}
    with progress("bufpool bench", total, "rounds") as show:
        on_round = _counter(show)
        for name in suited:
            workloads[name] = _measure_acquire(timed[name], device, extent, on_round)
            facts, curves[name] = _measure_bytes(sized[name], device)
            workloads[name].update(facts)
        kernels = _measure_kernels(shapes, device, args.seed, extent, skipped, on_round)
    figures = {
        "bufpool": __version__,
        "torch": torch.__version__,
        "device": str(device),
        "device_name": torch.cuda.get_device_name(device) if device.type == "cuda" else device.type,
        "arena": next(iter(workloads.values()))["arena"],
        "trace": args.trace or "synthetic",
        "seed": args.seed,
        "quick": args.quick,
        "heads": _HEADS,
        "workloads": workloads,
        "kernels": kernels,
        "skipped": skipped,
        "seconds": round(time.monotonic() - start, 1),
    }
    if args.plot is not None:
        _plot(args.plot, figures, curves)
    if args.json:
        print(json.dumps(figures))
    else:
        print_sections(_title(figures), _sections(figures), _notes(figures))
    faults = _faults(figures)
    for fault in faults[:1]:
        print(f"bufpool bench: {fault}", file=sys.stderr)
    return 1 if faults else 0


def bench_workloads(
    device: torch.device, extent: _Extent, args: argparse.Namespace, prompts: Sequence[int] | None, *, is_timed: bool
) -> dict[str, Workload]:
    """The chosen workloads: for time, or for bytes, where one layer of each chunk is enough."""
    calls = BATCH_CALLS * (extent.rounds + WARM_ROUNDS) if is_timed else extent.byte_calls
    workloads = suite(
        _ROWS.get(device.type, _CUDA_ROWS),
        calls,
        prompts=prompts,
        seed=args.seed,
        holds=(args.hold,),
        streams=args.streams,
        ramp_rows=extent.ramp_rows,
        ramp_steps=extent.ramp_steps,
        **({} if is_timed else {"layers": 1}),
    )
    return {name: workloads[name] for name in ("constant", "ramp", "trace", f"held-{args.hold}", f"streams-{args.streams}")}


def _rounds(workload: Workload, extent: _Extent) -> int:
    return extent.cold_rounds if workload.is_cold else extent.rounds


def _counter(show: Callable[[int], None]) -> Callable[[], None]:
    done = 0

    def on_round() -> None:
        nonlocal done
        done += 1
        show(done)

    return on_round


# --- Host clock ---


def _measure_acquire(
    workload: Workload, device: torch.device, extent: _Extent, on_round: Callable[[], None]
) -> dict[str, Any]:
    setting = Setting.of(workload, _HEADS, device)
    allocators = {name: make() for name, make in ALLOCATORS.items()}
    pool = allocators["pool"]
    assert isinstance(pool, OutputPool)
    with pool:
        faults = {name: first_fault(each, setting) for name, each in allocators.items()}
        rounds = _rounds(workload, extent)
        if workload.is_cold:
            arena = pool.stats().arena
            allocators.clear()
            pool.close()
            us = time_cold(setting, ALLOCATORS, rounds, on_round)
        else:
            case = make_case(setting, {name: setting.loop(each) for name, each in allocators.items()})
            time_loops(case.loops, case.warm, device)
            batches = [case.timed[number % len(case.timed)] for number in range(rounds)]
            us = time_loops(case.loops, batches, device, on_round=on_round)
            arena = pool.stats().arena
            del case  # its loops hold results
    return {
        "arena": arena,
        "rows": {"min": min(workload.rows), "max": max(workload.rows)},
        "hold": workload.hold,
        "streams": workload.streams,
        "cold": workload.is_cold,
        "rounds": rounds,
        "acquire_us": {name: round(statistics.median(values), 4) for name, values in us.items()},
        "quartiles_us": {name: _quartiles(values) for name, values in us.items()},
        "correct": {name: fault is None for name, fault in faults.items()},
        "faults": {name: fault for name, fault in faults.items() if fault is not None},
    }


def _quartiles(values: Sequence[float]) -> list[float]:
    low, _, high = statistics.quantiles(values, n=4, method="inclusive")
    return [round(low, 4), round(high, 4)]


# --- Bytes ---


def _measure_bytes(workload: Workload, device: torch.device) -> tuple[dict[str, Any], dict[str, list[int]]]:
    setting = Setting.of(workload, _HEADS, device)
    pool = pool_bytes(setting)
    baselines, kind = baseline_bytes(setting)
    stats = pool.stats
    facts = {
        "calls": len(workload.rows),
        "slots": stats.slots,
        "grows": stats.grows,
        "spills": stats.spills,
        "mapped_bytes": stats.peak_mapped_bytes,
        "needed_bytes": stats.needed_bytes,
        "mapped_per_needed": round(stats.peak_mapped_bytes / stats.needed_bytes, 4),
        "baseline_bytes": {name: max(values) for name, values in baselines.items()},
        "baseline_kind": kind,
    }
    curves = {
        "pool: mapped": pool.mapped,
        "pool: needed": pool.needed,
        f"fresh ({kind})": baselines["fresh"],
        f"grow-only ({kind})": baselines["grow_only"],
    }
    return facts, curves


# --- Device clock ---


def _measure_kernels(
    shapes: Sequence[KernelShape],
    device: torch.device,
    seed: int,
    extent: _Extent,
    skipped: dict[str, str],
    on_shape: Callable[[], None],
) -> list[dict[str, Any]]:
    if not shapes:
        return []
    try:
        gemm = Gemm(device, seed)
    except (RuntimeError, AttributeError, NotImplementedError) as e:
        gemm = None
        skipped["gemm"] = f"expected torch to multiply e4m3 matrices, got {' '.join(str(e).split())[:300]}"
    kernels = []
    for shape in shapes:
        case = KernelCase(shape, S_Q, device, seed)
        try:
            error, fault = case.error()
            times = time_kernel(case, gemm, device, extent.kernel_seconds)
            kernels.append(_kernel_facts(case, error, fault, times.ms, times.launches, gemm, times.gemm_ms))
        finally:
            case.close()
        on_shape()
    return kernels


def _kernel_facts(
    case: KernelCase,
    error: float,
    fault: str | None,
    ms: float,
    launches: int,
    gemm: Gemm | None,
    gemm_ms: float | None,
) -> dict[str, Any]:
    shape = case.shape
    tflops = shape.flops(case.s_q) / ms / 1e9
    gemm_tflops = None if gemm is None or gemm_ms is None else gemm.flops / gemm_ms / 1e9
    return {
        "d_qk": shape.d_qk,
        "h_q": shape.h_q,
        "topk": shape.topk,
        "s_kv": shape.s_kv,
        "s_q": case.s_q,
        "ms": round(ms, 4),
        "tflops": round(tflops, 1),
        "gemm_tflops": None if gemm_tflops is None else round(gemm_tflops, 1),
        "of_gemm": None if gemm_tflops is None else round(tflops / gemm_tflops, 4),
        "launches": launches,
        "input_sets": case.sets,
        "out_error": error,
        "fault": fault,
    }


# --- What it says ---


def _faults(figures: Mapping[str, Any]) -> list[str]:
    """Results that were wrong. The grow-only cache is expected to overwrite what is held: that is shown, not a failure."""
    found = [
        f"{name}: {allocator}: {fault}"
        for name, facts in figures["workloads"].items()
        for allocator, fault in facts["faults"].items()
        if allocator != "grow_only"
    ]
    return found + [f"{_shape_name(facts)}: {facts['fault']}" for facts in figures["kernels"] if facts["fault"] is not None]


def _shape_name(facts: Mapping[str, Any]) -> str:
    return ", ".join(str(facts[letter]) for letter in ("d_qk", "h_q", "topk", "s_kv"))


def _title(figures: Mapping[str, Any]) -> str:
    return (
        f"bufpool bench: {figures['device_name']}, torch {figures['torch']}, h_q {figures['heads']}, "
        f"{figures['trace']} trace, {figures['arena']} arena"
    )


def _sections(figures: Mapping[str, Any]) -> list[Section]:
    workloads = figures["workloads"]
    time_rows, byte_rows = [], []
    for name, facts in workloads.items():
        us = facts["acquire_us"]
        marks = {allocator: "" if is_right else " *" for allocator, is_right in facts["correct"].items()}
        time_rows.append(
            [
                f"{name}, cold" if facts["cold"] else name,
                *(f"{us[allocator]:.2f}{marks[allocator]}" for allocator in _NAMES),
                f"{us['pool'] / us['fresh']:.2f}",
                f"{us['pool'] / us['grow_only']:.2f}",
            ]
        )
        held = facts["baseline_bytes"]
        byte_rows.append(
            [
                name,
                bytes_text(held["fresh"]),
                bytes_text(held["grow_only"]) + marks["grow_only"],
                bytes_text(facts["mapped_bytes"]),
                bytes_text(facts["needed_bytes"]),
                f"{facts['mapped_per_needed']:.3f}",
            ]
        )
    sections: list[Section] = [
        (("host us per acquire", *_NAMES.values(), "pool / fresh", "pool / grow-only"), time_rows),
        (("most bytes", *list(_NAMES.values())[:2], "pool, mapped", "needed", "mapped / needed"), byte_rows),
    ]
    if figures["kernels"]:
        rows = [
            [
                _shape_name(facts),
                f"{facts['ms']:.3f}",
                f"{facts['tflops']:.0f}",
                "-" if facts["gemm_tflops"] is None else f"{facts['gemm_tflops']:.0f}",
                "-" if facts["of_gemm"] is None else f"{facts['of_gemm']:.2f}",
                f"{facts['out_error']:.1e}",
            ]
            for facts in figures["kernels"]
        ]
        heads = ("d_qk, h_q, topk, s_kv", "device ms", "TFLOP/s", f"FP8 GEMM {GEMM_SIZE}^3", "of GEMM", "error of out")
        sections.append((heads, rows))
    return sections


def _notes(figures: Mapping[str, Any]) -> list[str]:
    notes = [f"not measured: {name}: {reason}" for name, reason in figures["skipped"].items()]
    if any(not facts["correct"]["grow_only"] for facts in figures["workloads"].values()):
        notes.insert(0, "* overwrites results that are still held or in use on another stream")
    return notes


def _plot(folder: str, figures: Mapping[str, Any], curves: Mapping[str, Mapping[str, Sequence[int]]]) -> None:
    workloads = figures["workloads"]
    where = f"{figures['device_name']}, torch {figures['torch']}, h_q {figures['heads']}"
    plot_acquire(
        os.path.join(folder, "acquire.png"),
        {
            f"{name}, cold" if facts["cold"] else name: {
                _NAMES[each]: (us, *facts["quartiles_us"][each]) for each, us in facts["acquire_us"].items()
            }
            for name, facts in workloads.items()
        },
        f"host time per acquire, {where}",
    )
    plot_workload_bytes(os.path.join(folder, "bytes.png"), curves, f"bytes over calls, {where}")
    if figures["kernels"]:
        plot_kernels(
            os.path.join(folder, "kernels.png"),
            {_shape_name(facts): (facts["tflops"], facts["gemm_tflops"]) for facts in figures["kernels"]},
            f"sparse MLA prefill, s_q {S_Q}, {where}",
        )

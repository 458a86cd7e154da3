"""What does it cost the host to get the three outputs of one attention call?

Asked: host microseconds per call of three literal ``torch.empty``, `FreshAllocator`, a grow-only cache, three literal
slices of buffers that are large enough, and `OutputPool`; with results dropped at once and held, one row count and ever
new ones. All contenders run the same row counts in the same process, batch by batch in turn; figures are medians over
the rounds, ratios are of medians.

Not measured: kernels, first-touch page faults, the growth of the pool (bench_growth.py), memory, several threads.
Inputs are made outside the clock. A result is dropped before the next call begins, as ``out = None`` does.

    python benchmarks/bench_acquire.py --device cuda         # ratios and thresholds; exit code 1 if one is missed
    pytest benchmarks/bench_acquire.py --benchmark-enable    # the same cases under pytest-benchmark, not interleaved
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import sys
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import pytest
import torch

from bufpool.allocator import FreshAllocator
from bufpool.cli.baselines import GrowOnlyAllocator
from bufpool.cli.timing import BATCH_CALLS, Loop, acquire_loop, batches, median_us, time_loops
from bufpool.ops.sparse_mla import sparse_mla_spec
from bufpool.pool import OutputPool
from bufpool.spec import OutputSpec
from bufpool.workloads import (
    Workload,
    constant,
    held,
    layered_trace,
    read_trace,
    synthetic_trace,
    two_lanes,
    unseen,
)

HEADS = 128
D_V = 512
ROWS = {"cpu": 16, "cuda": 4096}
MAX_ROWS = 8192  # of the pool before the clock starts, so that growth is outside it
CHUNK = 8192
LAYERS = 61
HOLDS = (1, 4)  # held-1 is `out = acquire(...)` in a loop: the last result is alive while the next is acquired
ROUNDS = 31
WARM_ROUNDS = 2

EMPTY = "torch.empty x3"
SLICES = "slices x3"
CONTENDERS = (EMPTY, SLICES, "fresh", "grow_only", "pool")

# device: (workload, against, must reach, aim)
THRESHOLDS: dict[str, list[tuple[str, str, float, float | None]]] = {
    "cuda": [
        ("constant", EMPTY, 0.45, 0.25),
        ("unseen", EMPTY, 0.75, 0.35),
        ("trace", EMPTY, 0.45, 0.25),
        ("constant", SLICES, 0.95, 0.5),
    ],
    "cpu": [("constant", EMPTY, 0.9, None)],
}


@dataclass(frozen=True)
class Case:
    """One workload on one device, ready to be timed."""

    workload: Workload
    loops: dict[str, Loop]
    warm: list[Sequence[int]]
    timed: list[Sequence[int]]


def make_workloads(rows: int, prompts: Sequence[int] | None = None, rounds: int = ROUNDS) -> list[Workload]:
    """The workloads by name: constant, unseen, trace, two-lanes, held-1, held-4; enough calls for all rounds."""
    calls = BATCH_CALLS * (rounds + WARM_ROUNDS)
    return [
        constant(rows, calls),
        unseen(MAX_ROWS, min(calls, MAX_ROWS)),
        layered_trace(prompts or synthetic_trace(calls), CHUNK, LAYERS, calls),
        two_lanes(rows, calls),
        *(held((rows,) * calls, hold) for hold in HOLDS),
    ]


def make_case(workload: Workload, device: torch.device, pool: OutputPool, heads: int = HEADS) -> Case:
    """Loops of all contenders, each warmed by the largest row count of the workload."""
    like = torch.empty(1, device=device)
    lane_heads = [heads, max(heads // 2, 1)][: workload.lanes]
    specs = [sparse_mla_spec(count) for count in lane_heads]
    loops = {EMPTY: empty_loop(lane_heads, device, workload.hold)}
    if workload.lanes == 1 and workload.hold == 0:
        loops[SLICES] = slice_loop(heads, max(workload.rows) + 1, device)
    for name, allocator in {"fresh": FreshAllocator(), "grow_only": GrowOnlyAllocator(), "pool": pool}.items():
        loops[name] = acquire_loop(allocator, specs, like, hold=workload.hold)
    largest = max(workload.rows) + 1  # a row count that the workload does not hold, so that new ones stay new
    check_results(pool, specs, largest, like, workload.hold)
    parts = batches(workload.rows)
    for loop in loops.values():
        loop([largest] * workload.lanes * (workload.hold + 1))
    return Case(workload, loops, parts[:WARM_ROUNDS], parts[WARM_ROUNDS:])


def empty_loop(heads: Sequence[int], device: torch.device, hold: int) -> Loop:
    """Three literal ``torch.empty``, the device known beforehand."""
    empty = torch.empty
    h_q = heads[0]
    kept: deque[object] = deque(maxlen=hold)

    def drop(rows: Sequence[int]) -> None:
        for s_q in rows:
            out = empty((s_q, h_q, D_V), dtype=torch.bfloat16, device=device)
            max_logits = empty((s_q, h_q), dtype=torch.float32, device=device)
            lse = empty((s_q, h_q), dtype=torch.float32, device=device)
            out = max_logits = lse = None  # noqa: F841

    def drop_lanes(rows: Sequence[int]) -> None:
        for lane_heads, s_q in zip(itertools.cycle(heads), rows, strict=False):
            out = empty((s_q, lane_heads, D_V), dtype=torch.bfloat16, device=device)
            max_logits = empty((s_q, lane_heads), dtype=torch.float32, device=device)
            lse = empty((s_q, lane_heads), dtype=torch.float32, device=device)
            out = max_logits = lse = None  # noqa: F841

    def keep(rows: Sequence[int]) -> None:
        for s_q in rows:
            kept.append(
                (
                    empty((s_q, h_q, D_V), dtype=torch.bfloat16, device=device),
                    empty((s_q, h_q), dtype=torch.float32, device=device),
                    empty((s_q, h_q), dtype=torch.float32, device=device),
                )
            )

    if hold:
        return keep
    return drop if len(heads) == 1 else drop_lanes


def slice_loop(h_q: int, max_rows: int, device: torch.device) -> Loop:
    """Three literal slices: the least that any hand-written cache does."""
    out_buffer = torch.empty((max_rows, h_q, D_V), dtype=torch.bfloat16, device=device)
    max_logits_buffer = torch.empty((max_rows, h_q), dtype=torch.float32, device=device)
    lse_buffer = torch.empty((max_rows, h_q), dtype=torch.float32, device=device)

    def drop(rows: Sequence[int]) -> None:
        for s_q in rows:
            out = out_buffer[:s_q]
            max_logits = max_logits_buffer[:s_q]
            lse = lse_buffer[:s_q]
            out = max_logits = lse = None  # noqa: F841

    return drop


def check_results(pool: OutputPool, specs: Sequence[OutputSpec], rows: int, like: torch.Tensor, hold: int) -> None:
    """Results held together share no byte: the last row of each keeps what was written to it."""
    results = [pool.acquire(spec, rows=rows, like=like) for spec in specs for _ in range(hold + 1)]
    tensors = [tensor for result in results for tensor in result]
    for number, tensor in enumerate(tensors):
        tensor[-1].fill_(number)
    for number, tensor in enumerate(tensors):
        if not bool((tensor[-1] == number).all()):
            raise AssertionError(f"expected {number} in tensor {number}, got {tensor[-1].flatten()[0].item()}")


def run(device: torch.device, workloads: Sequence[Workload], heads: int = HEADS) -> dict[str, dict[str, float]]:
    """Median microseconds per call, by workload and contender."""
    figures = {}
    for workload in workloads:
        with OutputPool() as pool:
            case = make_case(workload, device, pool, heads)
            time_loops(case.loops, case.warm, device)
            figures[workload.name] = median_us(time_loops(case.loops, case.timed, device))
            del case
    return figures


def judge(figures: dict[str, dict[str, float]], device: torch.device) -> list[dict[str, object]]:
    """Each threshold with the ratio reached."""
    judged = []
    for workload, against, must, aim in THRESHOLDS.get(device.type, []):
        ratio = figures[workload]["pool"] / figures[workload][against]
        measure = f"{workload}: pool / {against}"
        judged.append({"measure": measure, "ratio": round(ratio, 3), "must": must, "aim": aim, "ok": ratio <= must})
    return judged


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Host time per acquire, beside three torch.empty.")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--heads", type=int, default=HEADS)
    parser.add_argument("--rows", type=int, help="of constant, two-lanes and held (16 on the CPU, 4096 on CUDA)")
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--trace", default=os.environ.get("BUFPOOL_TRACE"), help="CSV of the trace workload")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args(argv)
    device = torch.empty(0, device=args.device).device
    prompts = read_trace(args.trace) if args.trace else None
    rows = args.rows or ROWS.get(device.type, 4096)
    figures = run(device, make_workloads(rows, prompts, args.rounds), args.heads)
    judged = judge(figures, device)
    if args.json:
        print(
            json.dumps(
                {
                    "device": str(device),
                    "device_name": torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
                    "torch": torch.__version__,
                    "heads": args.heads,
                    "rows": rows,
                    "acquire_us": figures,
                    "thresholds": judged,
                }
            )
        )
    else:
        print_figures(figures, judged, f"{device}, h_q {args.heads}, {rows} rows, torch {torch.__version__}")
    return 0 if all(threshold["ok"] for threshold in judged) else 1


def print_figures(figures: dict[str, dict[str, float]], judged: Sequence[dict[str, object]], title: str) -> None:
    print(f"us per call (ratio to {EMPTY}) on {title}")
    print(f"{'':12}" + "".join(f"{name:>18}" for name in CONTENDERS))
    for workload, us in figures.items():
        cells = [f"{us[name]:.2f} ({us[name] / us[EMPTY]:.2f})" if name in us else "-" for name in CONTENDERS]
        print(f"{workload:12}" + "".join(f"{cell:>18}" for cell in cells))
    for threshold in judged:
        verdict = "ok" if threshold["ok"] else "MISSED"
        aim = "" if threshold["aim"] is None else f", aim {threshold['aim']}"
        print(f"{threshold['measure']} = {threshold['ratio']}: must reach {threshold['must']}{aim}: {verdict}")


@pytest.mark.parametrize("contender", CONTENDERS)
@pytest.mark.parametrize("name", ["constant", "unseen", "trace", "two-lanes", "held-1", "held-4"])
def test_acquire(benchmark, device, name, contender):
    rows = ROWS.get(device.type, 4096)
    workload = next(each for each in make_workloads(rows) if each.name == name)
    with OutputPool() as pool:
        case = make_case(workload, device, pool)
        if contender not in case.loops:
            pytest.skip(f"{contender}: not comparable when results are held or lanes take turns")
        parts = iter(case.warm + case.timed)
        benchmark.group = f"{name}, {device}, {BATCH_CALLS} calls a round"
        benchmark.extra_info["calls_per_round"] = BATCH_CALLS
        benchmark.pedantic(
            case.loops[contender],
            setup=lambda: ((next(parts),), {}),
            rounds=len(case.timed),
            warmup_rounds=len(case.warm),
        )
        del case


if __name__ == "__main__":
    sys.exit(main())

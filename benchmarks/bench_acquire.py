"""What does it cost the host to get the three outputs of one attention call?

Asked: host microseconds per call of three literal ``torch.empty``, `FreshAllocator`, a grow-only cache, three literal
slices of buffers that are large enough, and `OutputPool`; with results dropped at once and held, one row count and ever
new ones. All contenders run the same row counts in the same process, batch by batch in turn; figures are medians over
the rounds, ratios are of medians.

Workloads, checks and the clock are those of ``bufpool bench``, which has no literal contenders and no thresholds.

Not measured: kernels, first-touch page faults, the growth of the pool (bench_growth.py), memory, several threads.
Inputs are made outside the clock. A result is dropped before the next call begins, as ``out = None`` does.

    python benchmarks/bench_acquire.py --device cuda         # ratios and thresholds; exit code 1 if one is missed
    pytest benchmarks/bench_acquire.py --benchmark-enable    # the same cases under pytest-benchmark, not interleaved
"""

from __future__ import annotations

import itertools
import json
import os
import sys
from collections import deque
from collections.abc import Sequence

import pytest
import torch

from bufpool.allocator import FreshAllocator
from bufpool.cli.acquire_case import WARM_ROUNDS, Case, Setting, first_fault, lane_heads, make_case
from bufpool.cli.baselines import GrowOnlyAllocator
from bufpool.cli.timing import BATCH_CALLS, Loop, median_us, time_loops
from bufpool.cli.usage import Parser, UsageError, integer, open_device, trace_prompts
from bufpool.pool import OutputPool
from bufpool.workloads import PROMPT_COLUMN, Workload, suite

HEADS = 128
D_V = 512
ROWS = {"cpu": 16, "cuda": 4096}
ROUNDS = 31
WORKLOADS = ("constant", "unseen", "trace", "two-lanes", "held-1", "held-4")  # held-1 is `out = acquire(...)` in a loop

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


def make_workloads(rows: int, prompts: Sequence[int] | None = None, rounds: int = ROUNDS) -> list[Workload]:
    """Those of the suite that are asked here, in this order; enough calls for all rounds."""
    workloads = suite(rows, BATCH_CALLS * (rounds + WARM_ROUNDS), prompts=prompts)
    return [workloads[name] for name in WORKLOADS]


def acquire_case(workload: Workload, device: torch.device, pool: OutputPool, heads: int = HEADS) -> Case:
    """All contenders, warm, after a check that the pool's results share no byte."""
    setting = Setting.of(workload, heads, device)
    if fault := first_fault(pool, setting):
        raise AssertionError(fault)
    loops = {EMPTY: empty_loop(lane_heads(workload, heads), device, workload.hold)}
    if workload.lanes == 1 and workload.hold == 0:
        loops[SLICES] = slice_loop(heads, setting.largest_rows, device)
    for name, allocator in {"fresh": FreshAllocator(), "grow_only": GrowOnlyAllocator(), "pool": pool}.items():
        loops[name] = setting.loop(allocator)
    return make_case(setting, loops)


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
        for count, s_q in zip(itertools.cycle(heads), rows, strict=False):
            out = empty((s_q, count, D_V), dtype=torch.bfloat16, device=device)
            max_logits = empty((s_q, count), dtype=torch.float32, device=device)
            lse = empty((s_q, count), dtype=torch.float32, device=device)
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


def run(device: torch.device, workloads: Sequence[Workload], heads: int = HEADS) -> dict[str, dict[str, float]]:
    """Median microseconds per call, by workload and contender."""
    figures = {}
    for workload in workloads:
        with OutputPool() as pool:
            case = acquire_case(workload, device, pool, heads)
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
    parser = Parser(description="Host time per acquire, beside three torch.empty.")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--heads", type=integer(1), default=HEADS)
    parser.add_argument("--rows", type=integer(1), help="of constant, two-lanes and held (16 on the CPU, 4096 on CUDA)")
    parser.add_argument("--rounds", type=integer(1), default=ROUNDS)
    parser.add_argument("--trace", default=os.environ.get("BUFPOOL_TRACE"), help="CSV of the trace workload")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args(argv)
    try:
        device = open_device(args.device)
        prompts = trace_prompts(args.trace, PROMPT_COLUMN) if args.trace else None
    except UsageError as e:
        parser.error(str(e))
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
@pytest.mark.parametrize("name", WORKLOADS)
def test_acquire(time_contender, device, name, contender):
    rows = ROWS.get(device.type, 4096)
    workload = next(each for each in make_workloads(rows) if each.name == name)
    with OutputPool() as pool:
        case = acquire_case(workload, device, pool)
        if contender not in case.loops:
            pytest.skip(f"{contender}: not comparable when results are held or lanes take turns")
        time_contender(case, name, contender)
        del case


if __name__ == "__main__":
    sys.exit(main())

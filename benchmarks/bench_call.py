"""What does a whole call of the operator cost the host?

Asked: host microseconds of one ``sparse_mla_prefill``, three outputs included, with the outputs of a pool, of
``torch.empty``, and brought by the caller; with the options that add tensors; beside the bare launch of the kernel and
three literal ``torch.empty``. All of them run the same calls in the same process, batch by batch in turn; figures are
medians over the rounds. Rows are few and short, so that the device keeps up and only the host is timed.

Not measured: device time (bench_sparse_mla.py), the first call's compilation, several threads.

    python benchmarks/bench_call.py [--rounds 31] [--json]   # exit code 1 if a threshold is missed
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Sequence

import torch

from bufpool.allocator import FreshAllocator, OutputAllocator
from bufpool.cli.timing import BATCH_CALLS, Loop, median_us, time_loops
from bufpool.ops import sparse_mla_sm90
from bufpool.ops.sparse_mla import sparse_mla_prefill, sparse_mla_spec
from bufpool.pool import OutputPool

ROWS, HEADS, D_QK, TOPK, S_KV = 1, 128, 576, 128, 8192
ROUNDS = 31
WARM_ROUNDS = 3

LAUNCH, CALL = "bare launch", "call, pool"
# The limits were set where a bare launch takes 8 us. Hosts differ by a factor of two, so the ratio within a run is judged.
LIMIT_LAUNCH_US = 8.0
CALL_US, CALL_AIM_US = 20.0, 14.0


def repeat(call: Callable[[], object]) -> Loop:
    """A loop that makes the call once for each row count of a batch."""

    def loop(rows: Sequence[int]) -> None:
        for _ in rows:
            call()

    return loop


def make_loops(device: torch.device, pool: OutputAllocator) -> dict[str, Loop]:
    """The contenders, on the same inputs."""
    source = torch.Generator(device).manual_seed(0)
    q = torch.randn(ROWS, HEADS, D_QK, generator=source, device=device).to(torch.float8_e4m3fn)
    kv = torch.randn(S_KV, D_QK, generator=source, device=device).to(torch.float8_e4m3fn)
    indices = torch.randint(S_KV, (ROWS, TOPK), generator=source, device=device, dtype=torch.int32)
    one = torch.ones(1, device=device)
    sink = torch.zeros(HEADS, device=device)
    length = torch.full((ROWS,), TOPK, device=device, dtype=torch.int32)
    fresh = FreshAllocator()
    out, max_logits, lse = fresh.acquire(sparse_mla_spec(HEADS), ROWS, q)
    scale = D_QK**-0.5
    launch = sparse_mla_sm90.launch
    empty = torch.empty

    def three_empty() -> None:
        empty((ROWS, HEADS, 512), dtype=torch.bfloat16, device=device)
        empty((ROWS, HEADS), dtype=torch.float32, device=device)
        empty((ROWS, HEADS), dtype=torch.float32, device=device)

    calls: dict[str, Callable[[], object]] = {
        "torch.empty x3": three_empty,
        LAUNCH: lambda: launch(q, kv, indices, scale, 1.0, 1.0, None, None, out, max_logits, lse),
        CALL: lambda: sparse_mla_prefill(q, kv, indices, scale, 1.0, 1.0, allocator=pool),
        "call, pool, scales in memory": lambda: sparse_mla_prefill(q, kv, indices, scale, one, one, allocator=pool),
        "call, pool, sinks and lengths": lambda: sparse_mla_prefill(
            q, kv, indices, scale, 1.0, 1.0, attn_sink=sink, topk_length=length, allocator=pool
        ),
        "call, outputs given": lambda: sparse_mla_prefill(
            q, kv, indices, scale, 1.0, 1.0, out=out, max_logits=max_logits, lse=lse
        ),
        "call, FreshAllocator": lambda: sparse_mla_prefill(q, kv, indices, scale, 1.0, 1.0, allocator=fresh),
    }
    return {name: repeat(call) for name, call in calls.items()}


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Host time of a whole call of sparse_mla_prefill.")
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args(argv)
    if not torch.cuda.is_available() or not sparse_mla_sm90.is_available(torch.device("cuda")):
        print("bench_call: expected a device of compute capability 9.0 with cuda.core, got none", file=sys.stderr)
        return 2
    device = torch.empty(0, device="cuda").device
    batch = [ROWS] * BATCH_CALLS
    with OutputPool() as pool:
        loops = make_loops(device, pool)
        time_loops(loops, [batch] * WARM_ROUNDS, device)
        us = median_us(time_loops(loops, [batch] * args.rounds, device))
        del loops
    ratio, must, aim = us[CALL] / us[LAUNCH], CALL_US / LIMIT_LAUNCH_US, CALL_AIM_US / LIMIT_LAUNCH_US
    is_met = ratio <= must
    if args.json:
        facts = {"device_name": torch.cuda.get_device_name(device), "torch": torch.__version__, "cuda": torch.version.cuda}
        print(json.dumps({**facts, "us": us, "ratio": ratio, "must": must, "aim": aim, "ok": is_met}))
    else:
        print(f"us per call on {torch.cuda.get_device_name(device)}, torch {torch.__version__}, CUDA {torch.version.cuda}")
        for name, value in us.items():
            print(f"{name:<30}{value:8.2f}")
        verdict = "ok" if is_met else "MISSED"
        print(f"{CALL} / {LAUNCH} = {ratio:.2f}: must reach {must:g}, aim {aim:g}: {verdict}")
        print(f"({CALL_US:g} and {CALL_AIM_US:g} us where a bare launch takes {LIMIT_LAUNCH_US:g})")
    return 0 if is_met else 1


if __name__ == "__main__":
    sys.exit(main())

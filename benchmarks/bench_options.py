"""What does the rest of the kernel's contract cost, beside the plain call?

Asked: device time of the SM90 kernel with padded rows of q and kv, with one head and with one place less than whole
tiles, over that of the plain call: the same items, blocks and bytes, so a ratio above 1 is the price of the branches. With
sinks, lengths and scales in memory it reads more, which is shown and has no threshold. All of them run in turn, on inputs
that are out of L2; figures are medians, ratios are of medians. Few heads in a tile of 64 are timed beside a full tile.

Not measured: host time (bench_call.py), the shapes of large models one by one (bench_sparse_mla.py).

    python benchmarks/bench_options.py [--seconds 0.6]    # exit code 1 if a threshold is missed
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Callable, Sequence

import torch

from bufpool.cli.device_clock import Launch, input_sets, time_launches
from bufpool.cli.kernel_case import S_Q, KernelShape
from bufpool.ops import sparse_mla_sm90
from bufpool.ops.sparse_mla import sparse_mla_prefill
from bufpool.pool import OutputPool

SHAPES = (KernelShape(576, 128, 2048, 8192), KernelShape(512, 128, 1024, 8192))
FEW_HEADS = (16, 32)
PAD_BYTES = 128  # keeps each row's place within the lines of L2
MOST = 1.01
UNJUDGED = ("plain", "sinks", "lengths", "scales in memory", "sinks, lengths, scales in memory")
E4M3 = torch.float8_e4m3fn

Inputs = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def pad(rows: torch.Tensor) -> torch.Tensor:
    """The same values, each row followed by bytes that nobody reads."""
    wide = torch.zeros(*rows.shape[:-1], rows.shape[-1] + PAD_BYTES, dtype=torch.uint8, device=rows.device)
    wide[..., : rows.shape[-1]] = rows.view(torch.uint8)
    return wide.view(E4M3)[..., : rows.shape[-1]]


def make_inputs(shape: KernelShape, device: torch.device, source: torch.Generator) -> Inputs:
    q = torch.randn(S_Q, shape.h_q, shape.d_qk, generator=source, device=device).to(E4M3)
    kv = torch.randn(shape.s_kv, shape.d_qk, generator=source, device=device).to(E4M3)
    indices = torch.randint(shape.s_kv, (S_Q, shape.topk), generator=source, device=device, dtype=torch.int32)
    return q, kv, indices


def make_launches(shape: KernelShape, device: torch.device, pool: OutputPool) -> dict[str, Launch]:
    """The contenders, plain first."""
    source = torch.Generator(device).manual_seed(0)
    sets = input_sets(S_Q * (shape.h_q * shape.d_qk + shape.topk * 4) + shape.s_kv * shape.d_qk, device)
    plain = [make_inputs(shape, device, source) for _ in range(sets)]
    edits: dict[str, Callable[[Inputs], Inputs]] = {
        "padded rows": lambda x: (pad(x[0]), pad(x[1]), x[2]),
        "a head less": lambda x: (x[0][:, :-1].contiguous(), x[1], x[2]),
        "a place less": lambda x: (x[0], x[1], x[2][:, :-1].contiguous()),
    }
    edits |= {
        f"h_q {heads} of 64": lambda x, heads=heads: (x[0][:, :heads].contiguous(), x[1], x[2])
        for heads in (*FEW_HEADS, 64)
    }
    scale = shape.d_qk**-0.5
    one = torch.ones(1, device=device)
    sink = torch.zeros(shape.h_q, device=device)
    lengths = torch.full((S_Q,), shape.topk, dtype=torch.int32, device=device)

    def launch_of(inputs: Sequence[Inputs], factor: float | torch.Tensor = 1.0, **options: torch.Tensor) -> Launch:
        def launch(number: int) -> object:
            q, kv, indices = inputs[number % sets]
            return sparse_mla_prefill(q, kv, indices, scale, factor, factor, allocator=pool, backend="sm90", **options)

        return launch

    launches = {"plain": launch_of(plain)}
    launches |= {name: launch_of([edit(x) for x in plain]) for name, edit in edits.items()}
    launches["sinks"] = launch_of(plain, attn_sink=sink)
    launches["lengths"] = launch_of(plain, topk_length=lengths)
    launches["scales in memory"] = launch_of(plain, one)
    launches["sinks, lengths, scales in memory"] = launch_of(plain, one, attn_sink=sink, topk_length=lengths)
    return launches


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Device time of the kernel's options over the plain call.")
    parser.add_argument("--seconds", type=float, default=0.6, help="launches per contender, in seconds of device time")
    args = parser.parse_args(argv)
    if not torch.cuda.is_available() or not sparse_mla_sm90.is_available(torch.device("cuda")):
        print("bench_options: expected a device of compute capability 9.0 with cuda.core, got none", file=sys.stderr)
        return 2
    device = torch.empty(0, device="cuda").device
    print(f"{torch.cuda.get_device_name(device)}, torch {torch.__version__}, CUDA {torch.version.cuda}, s_q {S_Q}")
    missed = 0
    for shape in SHAPES:
        print(f"d_qk {shape.d_qk}, h_q {shape.h_q}, topk {shape.topk}, s_kv {shape.s_kv}: ms, over")
        with OutputPool(max_slots=16) as pool:
            launches = make_launches(shape, device, pool)
            ms = {name: statistics.median(times) for name, times in time_launches(launches, device, args.seconds).items()}
            del launches
        for name, value in ms.items():
            base = "h_q 64 of 64" if name.startswith("h_q") else "plain"
            ratio = value / ms[base]
            is_judged = name not in UNJUDGED
            is_met = ratio <= MOST or not is_judged
            missed += not is_met
            verdict = "" if not is_judged else ": ok" if is_met else ": MISSED"
            print(f"  {name:<34}{value:8.3f}{ratio:8.3f} of {base}{verdict}", flush=True)
    print(f"judged ones must reach {MOST}: {'ok' if not missed else f'{missed} MISSED'}")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())

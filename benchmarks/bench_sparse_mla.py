"""How fast is the SM90 kernel, beside an FP8 matrix product of the same run?

Asked: device time of one launch, s_q 4096, random inputs, unique random indices; the error against float64 is checked
once per shape, outside the clock. FLOPs are 2 s_q h_q topk (d_qk + 512). Not measured: host time, allocation, the first
launch's compilation.

    python benchmarks/bench_sparse_mla.py [--s-q 4096] [--shapes 0,1] [--seconds 0.3]
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable

import torch

from bufpool.ops import sparse_mla_sm90

# d_qk, h_q, topk, s_kv
SHAPES = [
    (576, 128, 2048, 8192),
    (576, 128, 2048, 32768),
    (576, 128, 2048, 65536),
    (576, 128, 2048, 131072),
    (576, 64, 2048, 32768),
    (512, 64, 512, 8192),
    (512, 64, 512, 65536),
    (512, 128, 1024, 8192),
    (512, 128, 1024, 65536),
]
E4M3 = torch.float8_e4m3fn
GEMM_SIZE = 8192
CHECKED_ROWS = 16


def device_ms(launch: Callable[[], object], seconds: float) -> float:
    """Median device time of a launch in ms, over launches of about ``seconds`` in all. L2 is cleared between them."""
    scratch = torch.empty(256 * 2**20, dtype=torch.uint8, device="cuda")
    events = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
    times: list[float] = []
    for _ in range(3):
        launch()
    while sum(times) < 1000 * seconds or len(times) < 5:
        scratch.zero_()
        events[0].record()
        launch()
        events[1].record()
        events[1].synchronize()
        times.append(events[0].elapsed_time(events[1]))
    return statistics.median(times)


def gemm_tflops(seconds: float) -> float:
    """The machine's FP8 rate: torch._scaled_mm of 8192^3."""
    a, b = (torch.randn(GEMM_SIZE, GEMM_SIZE, device="cuda").to(E4M3) for _ in range(2))
    one = torch.ones((), device="cuda")

    def product() -> torch.Tensor:
        return torch._scaled_mm(a, b.t(), scale_a=one, scale_b=one, out_dtype=torch.bfloat16, use_fast_accum=True)

    return 2 * GEMM_SIZE**3 / device_ms(product, seconds) / 1e9


def unique_indices(s_q: int, s_kv: int, topk: int) -> torch.Tensor:
    rows = [torch.rand(min(256, s_q - i), s_kv, device="cuda").topk(topk, 1).indices for i in range(0, s_q, 256)]
    return torch.cat(rows).int()


def out_error(q: torch.Tensor, kv: torch.Tensor, indices: torch.Tensor, out: torch.Tensor) -> float:
    """Relative error of a few rows of out against float64."""
    rows = torch.linspace(0, q.shape[0] - 1, min(CHECKED_ROWS, q.shape[0]), device="cuda").long().unique()
    key = kv.view(torch.uint8)[indices[rows].long()].view(E4M3).double()
    query = q.view(torch.uint8)[rows].view(E4M3).double()
    weights = torch.softmax(torch.einsum("qhd,qkd->qhk", query, key) * q.shape[2] ** -0.5, -1)
    want = torch.einsum("qhk,qkd->qhd", weights, key[..., :512])
    return float((out[rows].double() - want).norm() / want.norm())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--s-q", type=int, default=4096, help="queries (default 4096)")
    parser.add_argument("--shapes", default="", help="which shapes, by number from 0 (default all)")
    parser.add_argument("--seconds", type=float, default=0.3, help="launches per shape, in seconds of device time")
    args = parser.parse_args()
    chosen = [int(number) for number in args.shapes.split(",")] if args.shapes else range(len(SHAPES))
    torch.manual_seed(0)
    gemm = gemm_tflops(args.seconds)
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, CUDA {torch.version.cuda}, s_q {args.s_q}")
    print(f"FP8 GEMM {GEMM_SIZE}^3: {gemm:.0f} TFLOP/s")
    print("d_qk  h_q  topk    s_kv        ms  TFLOP/s  of GEMM  gathered GB   TB/s     error")
    for number in chosen:
        d_qk, h_q, topk, s_kv = SHAPES[number]
        q = torch.randn(args.s_q, h_q, d_qk, device="cuda").to(E4M3)
        kv = torch.randn(s_kv, d_qk, device="cuda").to(E4M3)
        indices = unique_indices(args.s_q, s_kv, topk)
        out = torch.empty(args.s_q, h_q, 512, dtype=torch.bfloat16, device="cuda")
        max_logits, lse = (torch.empty(args.s_q, h_q, device="cuda") for _ in range(2))
        scale = torch.ones(1, device="cuda")

        def launch(
            call: tuple[object, ...] = (q, kv, indices, d_qk**-0.5, scale, scale, None, None, out, max_logits, lse),
        ) -> None:
            sparse_mla_sm90.launch(*call)  # type: ignore[arg-type]

        launch()
        error = out_error(q, kv, indices, out)
        ms = device_ms(launch, args.seconds)
        tflops = 2 * args.s_q * h_q * topk * (d_qk + 512) / ms / 1e9
        gathered = args.s_q * -(-h_q // 64) * topk * d_qk
        print(
            f"{d_qk:4d} {h_q:4d} {topk:5d} {s_kv:7d} {ms:9.3f} {tflops:8.0f} {tflops / gemm:8.2f} "
            f"{gathered / 1e9:12.2f} {gathered / ms / 1e9:6.2f} {error:9.2e}"
        )


if __name__ == "__main__":
    main()

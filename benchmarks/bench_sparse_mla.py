"""How fast is the SM90 kernel, beside an FP8 matrix product of the same run?

Asked: device time of one launch, s_q 4096, random inputs, unique random indices; the error against float64 is checked
once per shape, outside the clock. Kernel and matrix product take turns, each on inputs that are out of L2. FLOPs are
2 s_q h_q topk (d_qk + 512). Not measured: host time, allocation, the first launch's compilation. Shapes, checks and the
clock are those of ``bufpool bench``.

    python benchmarks/bench_sparse_mla.py [--s-q 4096] [--shapes 0,1] [--seconds 0.3]
"""

from __future__ import annotations

import argparse
import sys

import torch

from bufpool.cli.kernel_case import GEMM_SIZE, S_Q, SHAPES, Gemm, KernelCase, time_kernel


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--s-q", type=int, default=S_Q, help="queries (default 4096)")
    parser.add_argument("--shapes", default="", help="which shapes, by number from 0 (default all)")
    parser.add_argument("--seconds", type=float, default=0.3, help="launches per shape, in seconds of device time")
    args = parser.parse_args()
    chosen = [int(number) for number in args.shapes.split(",")] if args.shapes else range(len(SHAPES))
    device = torch.empty(0, device="cuda").device
    gemm = Gemm(device, seed=0)
    faults = []
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, CUDA {torch.version.cuda}, s_q {args.s_q}")
    print(f"FP8 GEMM {GEMM_SIZE}^3 beside each shape")
    print("d_qk  h_q  topk    s_kv        ms  TFLOP/s     GEMM  of GEMM  gathered GB   TB/s     error")
    for shape in (SHAPES[number] for number in chosen):
        case = KernelCase(shape, args.s_q, device, seed=0)
        error, fault = case.error()
        faults += [fault] if fault else []
        times = time_kernel(case, gemm, device, args.seconds)
        case.close()
        assert times.gemm_ms is not None
        tflops = shape.flops(args.s_q) / times.ms / 1e9
        gemm_tflops = gemm.flops / times.gemm_ms / 1e9
        gathered = args.s_q * -(-shape.h_q // 64) * shape.topk * shape.d_qk
        print(
            f"{shape.d_qk:4d} {shape.h_q:4d} {shape.topk:5d} {shape.s_kv:7d} {times.ms:9.3f} {tflops:8.0f} "
            f"{gemm_tflops:8.0f} {tflops / gemm_tflops:8.2f} {gathered / 1e9:12.2f} {gathered / times.ms / 1e9:6.2f} "
            f"{error:9.2e}"
        )
    for fault in faults:
        print(fault, file=sys.stderr)
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())

"""How fast is the SM90 kernel, beside an FP8 matrix product of the same run?

Asked: device time of one launch, s_q 4096, random inputs, unique random indices; the error against float64 is checked
once per shape, outside the clock. Kernel and matrix product take turns, each on inputs that are out of L2. FLOPs are
2 s_q h_q topk (d_qk + 512). Not measured: host time, allocation, the first launch's compilation. Shapes, checks and the
clock are those of ``bufpool bench``.

    python benchmarks/bench_sparse_mla.py [--device cuda] [--s-q 4096] [--shapes 0,1] [--seconds 0.3]
"""

from __future__ import annotations

import sys

import torch

from bufpool.cli.kernel_case import GEMM_SIZE, S_Q, SHAPES, Gemm, KernelCase, KernelShape, time_kernel
from bufpool.cli.usage import Parser, UsageError, integer, open_device
from bufpool.ops.sparse_mla_sm90 import unavailable_reason


def shapes_of(text: str) -> list[KernelShape]:
    """The shapes that an argument names by their numbers."""
    return [SHAPES[integer(0, len(SHAPES) - 1)(number)] for number in text.split(",")]


def main() -> int:
    parser = Parser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--s-q", type=integer(1), default=S_Q, help="queries (default 4096)")
    parser.add_argument("--shapes", type=shapes_of, default=SHAPES, help="which, by number from 0 (default all): 0,1")
    parser.add_argument("--seconds", type=float, default=0.3, help="launches per shape, in seconds of device time")
    args = parser.parse_args()
    try:
        device = open_device(args.device)
    except UsageError as e:
        parser.error(str(e))
    reason = unavailable_reason(device)
    if reason is not None:
        parser.error(reason)
    gemm = Gemm(device, seed=0)
    faults = []
    print(f"{torch.cuda.get_device_name(device)}, torch {torch.__version__}, CUDA {torch.version.cuda}, s_q {args.s_q}")
    print(f"FP8 GEMM {GEMM_SIZE}^3 beside each shape")
    print("d_qk  h_q  topk    s_kv        ms  TFLOP/s     GEMM  of GEMM  gathered GB   TB/s     error")
    for shape in args.shapes:
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

"""How an engine captures sparse MLA prefill for its chunk sizes, and serves chunks of any size by replays.

    python examples/chunked_prefill_graphs.py [--chunks N] [--seed N]

On a machine without CUDA the same code runs eagerly, on smaller shapes.
"""

from __future__ import annotations

import argparse
import functools
import random
import time

import torch

import bufpool
from bufpool.graphs import GraphRunner
from bufpool.ops import sparse_mla_prefill

E4M3 = torch.float8_e4m3fn


def chunk(rows: int, h_q: int, topk: int, s_kv: int, device: str) -> dict[str, torch.Tensor]:
    """The inputs of one chunk of a prompt, by name."""
    return {
        "q": torch.randn(rows, h_q, 576, device=device).to(E4M3),
        "indices": torch.randint(0, s_kv, (rows, topk), dtype=torch.int32, device=device),
        "topk_length": torch.randint(1, topk + 1, (rows,), dtype=torch.int32, device=device),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--chunks", type=int, default=200, help="how many chunks to serve")
    parser.add_argument("--seed", type=int, default=0, help="of the chunk sizes")
    options = parser.parse_args()

    has_cuda = torch.cuda.is_available()
    device = "cuda" if has_cuda else "cpu"
    h_q, topk, s_kv, largest = (64, 512, 32768, 1024) if has_cuda else (4, 32, 256, 16)
    if not has_cuda:
        print("no CUDA device: every call runs eagerly, on small shapes")

    # The kv cache is not an input by rows: it is bound to the call, and read where it lies at every replay.
    kv = torch.randn(s_kv, 576, device=device).to(E4M3)
    attend = functools.partial(sparse_mla_prefill, kv=kv, sm_scale=576**-0.5, q_scale=1.0, kv_scale=1.0)
    inputs = bufpool.OutputSpec(
        q=((h_q, 576), E4M3),
        indices=((topk,), torch.int32),
        topk_length=((), torch.int32),
    )
    buckets = [2**power for power in range(largest.bit_length())]  # 1, 2, 4 .. largest
    sizes = random.Random(options.seed).choices(range(1, largest + largest // 8), k=options.chunks)

    with (
        bufpool.OutputPool() as pool,
        # Rows behind the chunk have no valid place: they cost next to nothing and read nothing.
        GraphRunner(attend, inputs, buckets, pool=pool, pad={"indices": -1, "topk_length": 0}) as run,
    ):
        run.capture(device)  # at start-up; the first call would do it as well
        eager_us = 0.0
        for rows in sizes:
            given = chunk(rows, h_q, topk, s_kv, device)
            result = run(**given)  # valid until the next call; fresh=True makes it the caller's own
            start = time.perf_counter()
            expected = attend(**given, allocator=pool)
            eager_us += 1e6 * (time.perf_counter() - start)
            assert all(map(torch.equal, result, expected)), f"{rows} rows: the replay differs from the eager call"

        stats = run.stats()
        print(f"{stats.calls} chunks, bit-equal to eager calls: {stats.replays} replayed, {stats.eager_calls} run eagerly")
        for bucket in stats.buckets:
            if bucket.replays:
                padded_rows, host_us = bucket.padded_rows / bucket.replays, bucket.host_us / bucket.replays
                print(
                    f"  bucket {bucket.rows:5d}: {bucket.replays:4d} replays, {padded_rows:6.1f} padded rows and"
                    f" {host_us:6.1f} us of the host each, captured in {bucket.capture_us / 1e3:.1f} ms"
                )
        if has_cuda:
            print(f"an eager call takes {eager_us / options.chunks:.1f} us of the host")
        print(pool.report())


if __name__ == "__main__":
    main()

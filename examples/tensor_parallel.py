"""Sparse MLA prefill with the heads split over ranks: each rank's outputs from its own pool, `out` gathered.

    torchrun --standalone --nproc-per-node 2 examples/tensor_parallel.py

Every rank holds the whole kv cache and h_q / ranks of the query heads, as tensor-parallel engines do. It computes its heads
on its own device (NCCL on GPUs, gloo on the CPU), gathers `out` over the ranks and compares the bits with one rank that
computes all heads. Works for any number of ranks that divides the heads.

Collectives take results of a pool as they are. Buffers that are registered with NCCL are another matter: docs/limits.md.
"""

from __future__ import annotations

import os

import torch
import torch.distributed as dist

import bufpool
from bufpool.ops import sparse_mla_prefill

S_KV, H_Q, D_QK, TOPK = 512, 32, 576, 64
CHUNKS = (40, 7, 64, 1)  # rows of each prefill chunk


def device_of_rank() -> torch.device:
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
        return device
    return torch.device("cpu")


def inputs(s_q: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The same on every rank: q of all heads, kv, indices."""
    generator = torch.Generator().manual_seed(s_q)
    q = torch.randn(s_q, H_Q, D_QK, generator=generator).to(torch.float8_e4m3fn)
    kv = torch.randn(S_KV, D_QK, generator=generator).to(torch.float8_e4m3fn)
    indices = torch.randint(-1, S_KV, (s_q, TOPK), generator=generator, dtype=torch.int32)
    return q.to(device), kv.to(device), indices.to(device)


def main() -> None:
    device = device_of_rank()
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    if H_Q % ranks:
        raise SystemExit(f"ranks: expected a divisor of {H_Q} heads, got {ranks}")
    heads = H_Q // ranks
    equal = 0
    with bufpool.OutputPool() as pool:
        for s_q in CHUNKS:
            q, kv, indices = inputs(s_q, device)
            mine = q[:, rank * heads : (rank + 1) * heads]  # strided rows: nothing is copied
            out, _, _ = sparse_mla_prefill(mine, kv, indices, D_QK**-0.5, 1.0, 1.0, allocator=pool)
            parts = [torch.empty_like(out) for _ in range(ranks)]
            dist.all_gather(parts, out)
            gathered = torch.cat(parts, dim=1)
            whole, _, _ = sparse_mla_prefill(q, kv, indices, D_QK**-0.5, 1.0, 1.0, allocator=bufpool.FreshAllocator())
            equal += torch.equal(gathered, whole)
        stats = pool.stats()
        del out
    verdicts = [torch.zeros(1, dtype=torch.int64, device=device) for _ in range(ranks)]
    dist.all_gather(verdicts, torch.tensor([equal], device=device))
    if rank == 0:
        print(
            f"{ranks} ranks on {device.type}: {min(int(v) for v in verdicts)} of {len(CHUNKS)} chunks equal to one rank,"
            f" {stats.slots} slots and {stats.grows} growths on each"
        )
    dist.destroy_process_group()
    if equal != len(CHUNKS):
        raise SystemExit(1)


if __name__ == "__main__":
    main()

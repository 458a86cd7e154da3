"""The examples that need more than one process."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[1]


def torchrun(ranks, **environment):
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    return subprocess.run(
        [*command, "examples/tensor_parallel.py"],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", **environment},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 2])
def test_heads_split_over_ranks_give_the_bits_of_one_rank(ranks):
    done = torchrun(ranks, CUDA_VISIBLE_DEVICES="")
    assert done.returncode == 0, done.stderr
    assert f"{ranks} ranks on cpu: 4 of 4 chunks equal to one rank, 2 slots and 3 growths on each" in done.stdout


@pytest.mark.gpu
@pytest.mark.multi_gpu
def test_heads_split_over_gpus_give_the_bits_of_one_gpu():
    ranks = torch.cuda.device_count()
    done = torchrun(ranks if 32 % ranks == 0 else 2)
    assert done.returncode == 0, done.stderr
    assert "4 of 4 chunks equal to one rank" in done.stdout

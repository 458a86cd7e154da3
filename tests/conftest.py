"""Fixtures of all tests, and which marks need which hardware."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import torch

import bufpool

ROOT = Path(__file__).resolve().parent.parent


def _missing(mark: str) -> str | None:
    """What a marked test needs and this machine lacks; None if nothing."""
    if not torch.cuda.is_available():
        return "torch.cuda.is_available() is False: torch finds no CUDA device"
    if mark == "sm90":
        capability = torch.cuda.get_device_capability()
        if capability != (9, 0):
            return f"needs compute capability 9.0, device 0 has {capability[0]}.{capability[1]}"
    if mark == "multi_gpu" and torch.cuda.device_count() < 2:
        return f"needs 2 CUDA devices, torch finds {torch.cuda.device_count()}"
    return None


def pytest_collection_modifyitems(items):
    for mark in ("gpu", "sm90", "multi_gpu"):
        marked = [item for item in items if item.get_closest_marker(mark)]
        reason = _missing(mark) if marked else None
        if reason:
            for item in marked:
                item.add_marker(pytest.mark.skip(reason=reason))


@pytest.fixture
def spec():
    """The outputs of a small attention kernel: 1024 and 32 bytes a row."""
    return bufpool.OutputSpec(out=((8, 64), torch.bfloat16), lse=((8,), torch.float32))


@pytest.fixture
def make_pool():
    """Makes pools; those still open at the end of the test are closed."""
    pools = []

    def make(*args, **options):
        pools.append(bufpool.OutputPool(*args, **options))
        return pools[-1]

    yield make
    for pool in pools:
        pool.close()
    pools.clear()
    gc.collect()


@pytest.fixture
def pool(make_pool):
    return make_pool()


@pytest.fixture
def run_script():
    """Runs a script (text, or the path of a file) in another interpreter, from the root; returns the finished process."""

    def run(script, *args, timeout=120, options=(), **environment):
        source = [str(script)] if isinstance(script, Path) else ["-c", textwrap.dedent(script)]
        return subprocess.run(
            [sys.executable, *options, *source, *map(str, args)],
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": str(ROOT), **environment},
            capture_output=True,
            text=True,
            timeout=timeout,
            check=False,
        )

    return run

"""How much memory is there for how much need, and what does a growth cost?

Asked: mapped bytes over needed bytes of the pool on a ramp of row counts and on a request trace in chunks, beside what
a grow-only cache takes from the device for the same calls; host time of one growth by 2 GiB behind 2 GiB that are in
place (256 MiB on the CPU), and how many bytes exist twice meanwhile. Device memory is what the driver says
(``mem_get_info``), since torch does not count memory that it did not allocate.

Workloads, the clock and the count of bytes are those of ``bufpool bench``.

Not measured: time per acquire (bench_acquire.py), page faults at first touch, kernels, and peaks shorter than the
distance between two samples (the number of samples taken during growths is reported; one copy of 2 GiB lasts longer).

    python benchmarks/bench_growth.py --device cuda             # table and thresholds; exit code 1 if one is missed
    pytest benchmarks/bench_growth.py --benchmark-enable
"""

from __future__ import annotations

import gc
import json
import os
import re
import statistics
import sys
import threading
from collections.abc import Sequence
from pathlib import Path

import torch

from bufpool.cli.acquire_case import Setting
from bufpool.cli.footprint import baseline_bytes, pool_bytes
from bufpool.cli.timing import time_loops
from bufpool.cli.usage import Parser, UsageError, open_device, trace_prompts
from bufpool.ops.sparse_mla import sparse_mla_spec
from bufpool.pool import OutputPool
from bufpool.spec import OutputSpec
from bufpool.workloads import PROMPT_COLUMN, Workload, suite, synthetic_trace

HEADS = 128
REQUESTS = 20_000
GROWTH_BYTES = {"cpu": 2**28, "cuda": 2**31}
ROUNDS = 21
NOISE_BYTES = {"cpu": 8 * 2**20, "cuda": 2 * 2**20}
"""What the process or the driver may take for itself meanwhile: page tables, code, the interpreter's own objects."""

MOST_MAPPED_PER_NEEDED = 1.01
MOST_GROWTH_US = 1000.0


def fitting(workload: Workload, device: torch.device) -> dict[str, float]:
    """Bytes mapped and needed after the workload, and the most that the baselines hold from the device for it.

    On the CPU a growing cache holds its old and its new buffer.
    """
    setting = Setting.of(workload, HEADS, device)
    stats = pool_bytes(setting).stats
    baselines, _ = baseline_bytes(setting)
    figures: dict[str, float] = {
        "mapped_bytes": stats.mapped_bytes,
        "needed_bytes": stats.needed_bytes,
        "mapped_per_needed": stats.mapped_bytes / stats.needed_bytes,
        "grows": stats.grows,
    }
    for name, held in baselines.items():
        figures[f"{name}_bytes"] = max(held)
        figures[f"{name}_per_needed"] = max(held) / stats.needed_bytes
    return figures


class UseSampler(threading.Thread):
    """Reads how many bytes of the device are in use, as often as it can, and keeps the largest figure."""

    def __init__(self, device: torch.device) -> None:
        super().__init__(daemon=True)
        self._device = device
        self._done = threading.Event()
        self.peak_bytes = 0
        self.samples = 0

    def run(self) -> None:
        while not self._done.is_set():
            self.peak_bytes = max(self.peak_bytes, used_bytes(self._device))
            self.samples += 1

    def __enter__(self) -> UseSampler:  # noqa: PYI034
        self._interval = sys.getswitchinterval()
        sys.setswitchinterval(1e-5)
        self.start()
        while self.samples == 0:
            self._done.wait(1e-4)
        return self

    def __exit__(self, *error: object) -> None:
        self._done.set()
        self.join()
        sys.setswitchinterval(self._interval)
        self.peak_bytes = max(self.peak_bytes, used_bytes(self._device))


def used_bytes(device: torch.device) -> int:
    """Bytes of the device in use by everybody; on the CPU, resident bytes of this process."""
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        return total - free
    resident_pages = Path("/proc/self/statm").read_text().split()[1]
    return int(resident_pages) * os.sysconf("SC_PAGE_SIZE")


def growth(device: torch.device, rounds: int = ROUNDS) -> dict[str, float]:
    """One growth by ``GROWTH_BYTES`` behind as many bytes: median host time, and bytes that exist twice."""
    spec = sparse_mla_spec(HEADS)
    like = torch.empty(1, device=device)
    rows = GROWTH_BYTES[device.type] // spec.row_nbytes
    us = growth_us(spec, rows, like, rounds)
    twice = []
    samples = 0
    for _ in range(max(rounds // 4, 1)):
        gc.collect()
        with OutputPool() as pool:
            _fill(pool.acquire(spec, rows=rows, like=like))
            _wait(device)
            mapped_before = pool.stats().mapped_bytes
            used_before = used_bytes(device)
            with UseSampler(device) as sampler:
                pool.acquire(spec, rows=2 * rows, like=like)
                _wait(device)
            # A page of the host is there from its first touch on: a growth by itself adds none.
            grown = pool.stats().mapped_bytes - mapped_before if device.type == "cuda" else 0
        twice.append(max(sampler.peak_bytes - used_before - grown, 0))
        samples += sampler.samples
    return {
        "growth_bytes": spec.nbytes(rows),
        "median_us": statistics.median(us),
        "first_us": us[0],
        "max_us": max(us),
        "bytes_twice": max(twice),
        "samples": samples,
    }


def growth_us(spec: OutputSpec, rows: int, like: torch.Tensor, rounds: int) -> list[float]:
    """Host microseconds of a growth from ``rows`` to twice as many, each of another pool."""
    pools: list[OutputPool] = []

    def new_pool(_: str) -> None:
        while pools:
            pools.pop().close()
        pools.append(OutputPool())
        pools[0].acquire(spec, rows=rows, like=like)

    def grow(batch: Sequence[int]) -> None:
        pools[0].acquire(spec, rows=batch[0], like=like)

    us = time_loops({"pool": grow}, [[2 * rows]] * rounds, like.device, before=new_pool)["pool"]
    pools.pop().close()
    return us


def _fill(outputs: Sequence[torch.Tensor]) -> None:
    for tensor in outputs:
        tensor.fill_(1)


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def workload_named(name: str, path: str | None = None) -> Workload:
    """One of the suite; each chunk of the trace once, since more layers would ask for the same rows again."""
    prompts = trace_prompts(path, PROMPT_COLUMN) if path else synthetic_trace(REQUESTS)
    return suite(1, len(prompts), prompts=prompts, layers=1)[name]


def judge(figures: dict[str, dict[str, float]], device: torch.device) -> list[dict[str, object]]:
    """Each threshold with the figure reached."""
    limits = [
        ("ramp: mapped / needed", figures["ramp"]["mapped_per_needed"], MOST_MAPPED_PER_NEEDED),
        ("trace: mapped / needed", figures["trace"]["mapped_per_needed"], MOST_MAPPED_PER_NEEDED),
        ("growth: median us", figures["growth"]["median_us"], MOST_GROWTH_US),
        ("growth: bytes that exist twice", figures["growth"]["bytes_twice"], NOISE_BYTES[device.type]),
    ]
    return [
        {"measure": measure, "value": round(value, 5), "must": must, "ok": value <= must} for measure, value, must in limits
    ]


def main(argv: Sequence[str] | None = None) -> int:
    parser = Parser(description="Mapped bytes over needed bytes, and what a growth costs.")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--trace", default=os.environ.get("BUFPOOL_TRACE"), help="CSV of the trace workload")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args(argv)
    try:
        device = open_device(args.device)
        trace = workload_named("trace", args.trace)
    except UsageError as e:
        parser.error(str(e))
    figures = {
        "growth": growth(device),
        "ramp": fitting(workload_named("ramp"), device),
        "trace": fitting(trace, device),
    }
    judged = judge(figures, device)
    if args.json:
        print(json.dumps({"device": str(device), "torch": torch.__version__, **figures, "thresholds": judged}))
    else:
        print(f"{device}, h_q {HEADS}, torch {torch.__version__}")
        for name, values in figures.items():
            print(f"{name}: " + ", ".join(f"{key} {_number(value)}" for key, value in values.items()))
        for threshold in judged:
            verdict = "ok" if threshold["ok"] else "MISSED"
            print(f"{threshold['measure']} = {threshold['value']}: must not pass {threshold['must']}: {verdict}")
    return 0 if all(threshold["ok"] for threshold in judged) else 1


def _number(value: float) -> str:
    return re.sub(r"\.?0+$", "", f"{value:.4f}") if isinstance(value, float) else str(value)


def test_ramp(benchmark, device):
    figures = benchmark.pedantic(fitting, args=(workload_named("ramp"), device), rounds=1)
    benchmark.extra_info.update(figures)
    assert figures["mapped_per_needed"] <= MOST_MAPPED_PER_NEEDED


def test_trace(benchmark, device):
    figures = benchmark.pedantic(fitting, args=(workload_named("trace", os.environ.get("BUFPOOL_TRACE")), device), rounds=1)
    benchmark.extra_info.update(figures)
    assert figures["mapped_per_needed"] <= MOST_MAPPED_PER_NEEDED


def test_growth(benchmark, device):
    figures = benchmark.pedantic(growth, args=(device,), rounds=1)
    benchmark.extra_info.update(figures)
    assert figures["bytes_twice"] <= NOISE_BYTES[device.type]
    assert figures["median_us"] <= MOST_GROWTH_US


if __name__ == "__main__":
    sys.exit(main())

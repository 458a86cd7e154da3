"""What do sleep and wake cost, and is all of the memory back meanwhile?

Asked: host time of ``pool.sleep()`` and ``pool.wake()`` for one slot of 1, 4 and 16 GiB (64 to 256 MiB on the CPU), mapped
by one growth and by 64, and in a CUDA graph that is replayed and checked after each wake; beside what an engine does by
hand: drop a buffer, ``torch.cuda.empty_cache()``, allocate it again, at whatever address. In each round the memory was
written before, the device is idle when the clock starts, and it is checked that all mapped bytes are free while the pool
sleeps (``mem_get_info``; resident pages on the CPU) and that the result has its old address and right bits afterwards. One
round goes before those that count: what the process takes for itself at first use, such as torch's streams and the kernels
that are loaded then, is no memory of the pool.

Not measured: the time until queued work is done, for which ``sleep()`` waits; page faults at first touch on the CPU.

    python benchmarks/bench_sleep.py --device cuda        # a table; exit code 1 if memory was not back or a result is wrong
    pytest benchmarks/bench_sleep.py --benchmark-enable
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass

import pytest
import torch
from bench_growth import used_bytes

from bufpool.pool import OutputPool
from bufpool.spec import OutputSpec

GIB = 2**30
SIZES_BYTES = {"cpu": (2**26, 2**27, 2**28), "cuda": (GIB, 4 * GIB, 16 * GIB)}
MANY_GROWTHS = 64
ROUNDS = 11
NOISE_BYTES = {"cpu": 8 * 2**20, "cuda": 0}
"""What the process may take for itself meanwhile: the interpreter's own objects."""

ROW_BYTES = 2**18
CHUNK_ROWS = GIB // ROW_BYTES  # looked at together
BY_HAND = "by hand, torch"
SPEC = OutputSpec(block=((ROW_BYTES // 8,), torch.int64))


@dataclass(frozen=True)
class Case:
    """One slot, or torch's buffer of the same size."""

    name: str
    nbytes: int
    growths: int = 1
    is_captured: bool = False


@dataclass(frozen=True)
class Figures:
    """Host times in microseconds, medians and most over the rounds; ``back_bytes`` are the fewest that were free again."""

    case: str
    nbytes: int
    sleep_us: float
    wake_us: float
    most_sleep_us: float
    most_wake_us: float
    sleep_us_per_gib: float
    wake_us_per_gib: float
    back_bytes: int
    fault: str | None


def cases(device: torch.device) -> Iterator[Case]:
    for nbytes in SIZES_BYTES[device.type]:
        yield Case("one growth", nbytes)
        yield Case(f"{MANY_GROWTHS} growths", nbytes, growths=MANY_GROWTHS)
        if device.type == "cuda":
            yield Case("in a graph", nbytes, is_captured=True)
        yield Case(BY_HAND, nbytes)


def measure(case: Case, device: torch.device, rounds: int = ROUNDS) -> Figures:
    contender = ByHand(case, device) if case.name == BY_HAND else Pooled(case, device)
    fault = contender.use(rounds + 1)
    contender.sleep()
    contender.wake()
    sleep_us, wake_us, back_bytes = [], [], []
    for number in range(1, rounds + 1):
        fault = fault or contender.use(number)
        _wait(device)
        used = used_bytes(device)
        sleep_us.append(_timed(contender.sleep))
        back_bytes.append(used - used_bytes(device))
        wake_us.append(_timed(contender.wake))
    fault = fault or contender.use(0)
    contender.close()
    if fault is None and case.name != BY_HAND and min(back_bytes) < case.nbytes - NOISE_BYTES[device.type]:
        fault = f"expected {case.nbytes} bytes back, got {min(back_bytes)}"
    per_gib = GIB / case.nbytes
    sleep, wake = statistics.median(sleep_us), statistics.median(wake_us)
    return Figures(
        case.name,
        case.nbytes,
        sleep,
        wake,
        max(sleep_us),
        max(wake_us),
        sleep * per_gib,
        wake * per_gib,
        min(back_bytes),
        fault,
    )


class Pooled:
    """A slot of a pool; in a graph if the case says so."""

    def __init__(self, case: Case, device: torch.device) -> None:
        self._rows = case.nbytes // ROW_BYTES
        self._like = torch.zeros(1, device=device)
        self._value = torch.zeros(1, dtype=torch.int64, device=device)
        self._pool = OutputPool()
        for growth in range(1, case.growths + 1):
            self._pool.reserve(SPEC, self._rows * growth // case.growths, device)
        self._graph = None
        self._result: torch.Tensor | None = None
        if case.is_captured:
            self._graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(self._graph):
                self._result = self._pool.acquire(SPEC, self._rows, self._like).block
                self._result.copy_(self._value)
        self._address = self._pool._slots[0].addresses[0]
        assert (len(self._pool._slots), self._pool.stats().mapped_bytes) == (1, case.nbytes)

    def use(self, number: int) -> str | None:
        """Write all of the memory and look at it; what is wrong."""
        self._value.fill_(number)
        if self._graph is not None:
            self._graph.replay()
            block = self._result
        else:
            block = self._pool.acquire(SPEC, self._rows, self._like).block
            block.copy_(self._value)
        assert block is not None
        return _fault(block, number, self._address)

    def sleep(self) -> None:
        self._pool.sleep()

    def wake(self) -> None:
        self._pool.wake()

    def close(self) -> None:
        self._graph = self._result = None
        self._pool.close()
        time.sleep(0.05)  # the driver reports the end of a graph from a thread of its own
        OutputPool().close()  # any close takes back what closed pools have left


class ByHand:
    """A buffer of torch that is dropped and allocated again."""

    def __init__(self, case: Case, device: torch.device) -> None:
        self._case, self._device = case, device
        self._block: torch.Tensor | None = None
        self.wake()

    def use(self, number: int) -> str | None:
        assert self._block is not None
        return _fault(self._block.fill_(number), number, self._block.data_ptr())

    def sleep(self) -> None:
        self._block = None
        if self._device.type == "cuda":
            torch.cuda.empty_cache()

    def wake(self) -> None:
        self._block = torch.empty(self._case.nbytes // ROW_BYTES, ROW_BYTES // 8, dtype=torch.int64, device=self._device)

    def close(self) -> None:
        self.sleep()


def _fault(block: torch.Tensor, number: int, address: int) -> str | None:
    chunks = block.split(CHUNK_ROWS)
    least, most = min(int(chunk.amin()) for chunk in chunks), max(int(chunk.amax()) for chunk in chunks)
    if (least, most) != (number, number):
        return f"expected {number} everywhere, got {least} to {most}"
    return None if block.data_ptr() == address else f"expected address {address:#x}, got {block.data_ptr():#x}"


def _timed(call: Callable[[], None]) -> float:
    start = time.perf_counter_ns()
    call()
    return (time.perf_counter_ns() - start) / 1e3


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def fits(case: Case, device: torch.device) -> bool:
    """Whether the device has room for the case and a little more."""
    return device.type == "cpu" or torch.cuda.mem_get_info(device)[0] > case.nbytes + GIB


def table(figures: Sequence[Figures]) -> str:
    lines = [
        f"{'':<16}{'size':>9}{'sleep us':>11}{'wake us':>11}{'us per GiB':>22}{'most us':>20}{'back':>18}",
        f"{'':<16}{'':>9}{'':>11}{'':>11}{'sleep':>11}{'wake':>11}{'sleep':>10}{'wake':>10}{'bytes':>18}",
    ]
    for row in figures:
        size = f"{row.nbytes // GIB} GiB" if row.nbytes >= GIB else f"{row.nbytes // 2**20} MiB"
        lines.append(
            f"{row.case:<16}{size:>9}{row.sleep_us:>11.0f}{row.wake_us:>11.0f}{row.sleep_us_per_gib:>11.0f}"
            f"{row.wake_us_per_gib:>11.0f}{row.most_sleep_us:>10.0f}{row.most_wake_us:>10.0f}{row.back_bytes:>18}"
            + (f"  WRONG: {row.fault}" if row.fault else "")
        )
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args(argv)
    device = torch.empty(0, device=args.device).device
    every = list(cases(device))
    measured = [case for case in every if fits(case, device)]
    figures = [measure(case, device, args.rounds) for case in measured]
    skipped = [f"{case.name} of {case.nbytes} bytes: no room" for case in every if case not in measured]
    if args.json:
        rows = [asdict(row) for row in figures]
        print(json.dumps({"device": str(device), "torch": torch.__version__, "rounds": args.rounds, "cases": rows,
                          "skipped": skipped}))  # fmt: skip
    else:
        print(f"{device}, torch {torch.__version__}, medians of {args.rounds} rounds, host time")
        print("\n".join([table(figures), *skipped]))
    return 1 if any(row.fault for row in figures) else 0


@pytest.mark.parametrize("kind", ["one growth", f"{MANY_GROWTHS} growths", "in a graph", BY_HAND])
def test_sleep(benchmark, device, kind):
    found = [case for case in cases(device) if case.name == kind and fits(case, device)]
    if not found:
        pytest.skip(f"{kind}: needs a CUDA device with room")
    figures = benchmark.pedantic(measure, args=(found[0], device), rounds=1)
    benchmark.extra_info.update(asdict(figures))
    assert figures.fault is None


if __name__ == "__main__":
    sys.exit(main())

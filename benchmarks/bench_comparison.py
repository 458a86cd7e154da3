"""What do other ways to get memory cost, for the same three outputs of one attention call?

Asked of each, behind the allocator protocol: host microseconds per acquire (one row count, and ever new ones, results
dropped); whether a result that is held keeps what was written to it; on a ramp from 1 to 16384 rows the most bytes taken
from the device over the bytes needed, and at how many addresses ``out`` lay. Contenders are three literal
``torch.empty``, `FreshAllocator`, a grow-only cache, `OutputPool`, a ``torch.cuda.MemPool``, RMM's buffers from two of its
resources, and CuPy's arrays, as tensors by both public ways. All of them run the same row counts in the same process, batch
by batch in turn; figures are medians over the rounds.

What must be settled before torch allocates anything runs in a process of its own, with the pool beside it again: RMM
behind all of torch, and torch's expandable segments. So ratios are always of one process.

RMM and CuPy are measured where they are installed. A contender that is not measured has a line that says why. Bytes of
the device are what the driver says (``mem_get_info``), whoever took them; the caches of all others are empty meanwhile.

Not measured: several streams, results held while time is taken, kernels, page faults at first touch, the first call.

    python benchmarks/bench_comparison.py --device cuda         # a table; exit code 1 if a contender failed
    pytest benchmarks/bench_comparison.py --benchmark-enable    # the same cases under pytest-benchmark, not interleaved
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass, field
from importlib import import_module
from typing import Any

import pytest
import torch
from bench_acquire import EMPTY, HEADS, ROUNDS, ROWS, empty_loop

from bufpool.allocator import FreshAllocator, Like, OutputAllocator
from bufpool.cli.acquire_case import WARM_ROUNDS, Setting, first_fault, lane_heads, make_case
from bufpool.cli.baselines import GrowOnlyAllocator
from bufpool.cli.footprint import baseline_bytes, pool_bytes
from bufpool.cli.timing import BATCH_CALLS, Loop, median_us, time_loops
from bufpool.cli.usage import Parser, UsageError, integer, open_device
from bufpool.pool import OutputPool
from bufpool.spec import OutputSpec
from bufpool.workloads import RAMP_ROWS, RAMP_STEPS, Workload, held, suite

WORKLOADS = ("constant", "unseen")
RMM_FIRST_BYTES = 2**21
"""What RMM's pool begins with; left out, it takes half of the device's free memory at once."""
CHILD_SECONDS = 120


class MemPoolAllocator:
    """``torch.empty`` inside a MemPool that is entered at each call, since other allocations have no business in it."""

    def __init__(self) -> None:
        self.pool = torch.cuda.MemPool()
        self._fresh = FreshAllocator()

    def acquire(self, spec: OutputSpec, rows: int, like: Like) -> Any:
        with torch.cuda.use_mem_pool(self.pool):
            return self._fresh.acquire(spec, rows, like)


class RmmAllocator:
    """A ``DeviceBuffer`` for each output, and a tensor over it.

    Args:
        make_resource: makes the memory resource out of the module ``rmm``.
    """

    def __init__(self, make_resource: Callable[[Any], Any]) -> None:
        rmm = import_module("rmm")
        self._buffer = rmm.DeviceBuffer
        self._resource = make_resource(rmm)

    def acquire(self, spec: OutputSpec, rows: int, like: Like) -> Any:
        tensors = []
        for shape, dtype, row_bytes in zip(spec.row_shapes, spec.dtypes, spec.row_bytes, strict=True):
            buffer = self._buffer(size=rows * row_bytes, mr=self._resource)
            tensors.append(torch.as_tensor(buffer).view(dtype).view(rows, *shape))
        return spec.outputs_type(*tensors)


def rmm_pool(rmm: Any) -> Any:
    return rmm.mr.PoolMemoryResource(rmm.mr.CudaMemoryResource(), initial_pool_size=RMM_FIRST_BYTES)


def rmm_async(rmm: Any) -> Any:
    return rmm.mr.CudaAsyncMemoryResource()


# CuPy need not know bfloat16: an integer of as many bytes stands for it.
CUPY_NAMES = {torch.bfloat16: "int16", torch.float32: "float32"}


class CupyAllocator:
    """``cupy.empty`` for each output, from CuPy's default pool, and a tensor over it.

    Args:
        to_tensor: ``torch.as_tensor`` or ``torch.from_dlpack``.
    """

    def __init__(self, to_tensor: Callable[[Any], torch.Tensor]) -> None:
        self._empty = import_module("cupy").empty
        self._to_tensor = to_tensor

    def acquire(self, spec: OutputSpec, rows: int, like: Like) -> Any:
        tensors = []
        for shape, dtype in zip(spec.row_shapes, spec.dtypes, strict=True):
            tensor = self._to_tensor(self._empty((rows, *shape), dtype=CUPY_NAMES[dtype]))
            tensors.append(tensor if tensor.dtype is dtype else tensor.view(dtype))
        return spec.outputs_type(*tensors)


@dataclass(frozen=True)
class Contender:
    """One way to get the outputs.

    Attributes:
        make: an allocator of its own.
        module: what has to be importable, beside torch.
        needs_cuda: whether it serves nothing but CUDA devices.
        is_aliasing: it is known to overwrite what is held.
        same_memory: a contender before it that makes the same allocations: its ramp stands for this one's.
        loop: the timed loop, if it is not the plain one over ``acquire``.
    """

    make: Callable[[], OutputAllocator]
    module: str | None = None
    needs_cuda: bool = True
    is_aliasing: bool = False
    same_memory: str | None = None
    loop: Callable[[OutputAllocator, Setting], Loop] = field(default=lambda allocator, setting: setting.loop(allocator))


def literal_loop(allocator: OutputAllocator, setting: Setting) -> Loop:
    del allocator  # in the ramp, where an allocator has to be, the same calls come through FreshAllocator
    return empty_loop(lane_heads(setting.workload, HEADS), setting.like.device, hold=0)


def entered_loop(allocator: OutputAllocator, setting: Setting) -> Loop:
    """The MemPool entered once for a whole batch: what is left when a program allocates nothing else meanwhile."""
    assert isinstance(allocator, MemPoolAllocator)
    inner = setting.loop(FreshAllocator())

    def run(rows: Sequence[int]) -> None:
        with torch.cuda.use_mem_pool(allocator.pool):
            inner(rows)

    return run


MEASURED = "measured"
POOL = "pool"
CONTENDERS: dict[str, Contender] = {
    EMPTY: Contender(FreshAllocator, needs_cuda=False, loop=literal_loop),
    "fresh": Contender(FreshAllocator, needs_cuda=False, same_memory=EMPTY),
    "grow_only": Contender(GrowOnlyAllocator, needs_cuda=False, is_aliasing=True),
    POOL: Contender(OutputPool, needs_cuda=False),
    "MemPool": Contender(MemPoolAllocator),
    "MemPool, entered once": Contender(MemPoolAllocator, same_memory="MemPool", loop=entered_loop),
    "RMM pool": Contender(lambda: RmmAllocator(rmm_pool), "rmm"),
    "RMM async": Contender(lambda: RmmAllocator(rmm_async), "rmm"),
    "CuPy, as_tensor": Contender(lambda: CupyAllocator(torch.as_tensor), "cupy"),
    "CuPy, from_dlpack": Contender(lambda: CupyAllocator(torch.from_dlpack), "cupy", same_memory="CuPy, as_tensor"),
}

# Name of a process: (name of its contender, module it needs, what its environment says).
SEGMENTS = "expandable_segments:True"
CHILDREN: dict[str, tuple[str, str | None, dict[str, str]]] = {
    "rmm": ("RMM behind torch", "rmm", {}),
    "segments": (f"{EMPTY}, segments", None, {"PYTORCH_ALLOC_CONF": SEGMENTS, "PYTORCH_CUDA_ALLOC_CONF": SEGMENTS}),
}
NAMES = (*CONTENDERS, *(name for name, _, _ in CHILDREN.values()))


@dataclass
class Figures:
    """What was found out about one contender.

    Attributes:
        status: ``measured``, or why not.
        acquire_us: median host microseconds per call, by workload.
        pool_us: those of the pool in the same process.
        keeps_held: whether a held result kept what was written to it.
        ramp_bytes: most bytes taken from the device during the ramp.
        ramp_addresses: at how many addresses ``out`` lay.
        ramp_short_rows: the row count for which the device's memory was not enough; None if the ramp came to its end.
    """

    status: str = MEASURED
    acquire_us: dict[str, float] = field(default_factory=dict)
    pool_us: dict[str, float] = field(default_factory=dict)
    keeps_held: bool | None = None
    ramp_bytes: int | None = None
    ramp_addresses: int | None = None
    ramp_short_rows: int | None = None

    def take_ramp(self, other: Figures) -> None:
        self.ramp_bytes, self.ramp_addresses = other.ramp_bytes, other.ramp_addresses
        self.ramp_short_rows = other.ramp_short_rows


def missing(module: str | None, needs_cuda: bool, device: torch.device) -> str | None:
    """Why a contender cannot be measured here; None if it can be tried."""
    if needs_cuda and device.type != "cuda":
        return "needs CUDA"
    if module is not None:
        try:
            import_module(module)
        except ModuleNotFoundError as e:
            return f"not installed ({e})"
        except ImportError as e:
            return failure(e)
    return None


def failure(e: Exception) -> str:
    return f"failed: {type(e).__name__}: {' '.join(str(e).split())[:200]}"


def workloads_of(rows: int, rounds: int) -> list[Workload]:
    """Those of the suite that are timed here; enough calls for all rounds."""
    workloads = suite(rows, BATCH_CALLS * (rounds + WARM_ROUNDS))
    return [workloads[name] for name in WORKLOADS]


def ramp_of(rows: int, steps: int) -> Workload:
    return suite(1, 1, ramp_rows=rows, ramp_steps=steps)["ramp"]


def measure(
    contenders: dict[str, Contender], device: torch.device, timed: Sequence[Workload], ramp: Workload
) -> dict[str, Figures]:
    """Figures of all contenders. One that fails is left out of what follows, and the others go on."""
    found = {name: Figures(missing(each.module, each.needs_cuda, device) or MEASURED) for name, each in contenders.items()}
    with torch.cuda.device(device) if device.type == "cuda" else nullcontext():
        for name, each in contenders.items():
            attempt(found[name], lambda figures, each=each: check(figures, each, device))
        # The ramp comes first: a resource that is there once for a whole process has not grown before.
        for name, each in contenders.items():
            if each.same_memory in found and found[name].status == found[each.same_memory].status == MEASURED:
                found[name].take_ramp(found[each.same_memory])
            else:
                attempt(found[name], lambda figures, each=each: run_ramp(figures, each, ramp, device))
        for workload in timed:
            time_workload(contenders, found, workload, device)
            settle(device)
    for figures in found.values():
        figures.pool_us = found[POOL].acquire_us
    return found


def attempt(figures: Figures, work: Callable[[Figures], None]) -> None:
    """Do something for a contender that has not failed yet; what it raises, of whatever kind, becomes its status."""
    if figures.status != MEASURED:
        return
    try:
        work(figures)
    except Exception as e:
        figures.status = failure(e)


def check(figures: Figures, contender: Contender, device: torch.device) -> None:
    """Whether what is held is left alone; only a cache may fail that."""
    fault = first_fault(contender.make(), Setting.of(held((64,), 1), 2, device))
    figures.keeps_held = fault is None
    if fault is not None and not contender.is_aliasing:
        figures.status = f"failed: {fault}"


def time_workload(
    contenders: dict[str, Contender], found: dict[str, Figures], workload: Workload, device: torch.device
) -> None:
    """Median host time per call of all that have not failed."""
    setting = Setting.of(workload, HEADS, device)
    loops: dict[str, Loop] = {}
    for name, each in contenders.items():
        attempt(found[name], lambda _, name=name, each=each: loops.update({name: each.loop(each.make(), setting)}))
    case = make_case(setting, {name: forgiving(loop, found[name]) for name, loop in loops.items()})
    time_loops(case.loops, case.warm, device)
    for name, us in median_us(time_loops(case.loops, case.timed, device)).items():
        if found[name].status == MEASURED:
            found[name].acquire_us[workload.name] = us


def forgiving(loop: Loop, figures: Figures) -> Loop:
    """The loop, until it raises for the first time."""

    def run(rows: Sequence[int]) -> None:
        attempt(figures, lambda _: loop(rows))

    return run


def run_ramp(figures: Figures, contender: Contender, ramp: Workload, device: torch.device) -> None:
    """The ramp on a new allocator: most bytes taken from the device, and how often ``out`` moved."""
    setting = Setting.of(ramp, HEADS, device)
    (spec,) = setting.specs
    settle(device)
    before = used_bytes(device)
    allocator = contender.make()
    addresses, taken = set(), []
    for rows in ramp.rows:
        try:
            outputs = allocator.acquire(spec, rows, setting.like)
        except (torch.OutOfMemoryError, MemoryError):
            figures.ramp_short_rows = rows
            break
        addresses.add(outputs[0].data_ptr())
        taken.append(used_bytes(device) - before)
        del outputs
    figures.ramp_addresses = len(addresses)
    if isinstance(allocator, OutputPool):
        allocator.close()
    del allocator
    settle(device)
    figures.ramp_bytes = max(taken, default=0) if device.type == "cuda" else host_bytes(contender.make, setting)


def settle(device: torch.device) -> None:
    """Let all caches give back what nobody uses."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.empty_cache()
        if "cupy" in sys.modules:
            import_module("cupy").get_default_memory_pool().free_all_blocks()


def used_bytes(device: torch.device) -> int:
    """Bytes of the device in use by everybody; 0 on the host, where a page is there from its first touch on."""
    if device.type != "cuda":
        return 0
    free, total = torch.cuda.mem_get_info(device)
    return total - free


def host_bytes(make: Callable[[], OutputAllocator], setting: Setting) -> int:
    """What the pool maps on the host; of the others the buffers that exist during a call."""
    if make is OutputPool:
        return max(pool_bytes(setting).mapped)
    return max(baseline_bytes(setting)[0]["grow_only" if make is GrowOnlyAllocator else "fresh"])


# --- Processes of their own ---


def measure_in_child(name: str, args: argparse.Namespace, device: torch.device) -> Figures:
    """Figures of a contender that has to be there before torch allocates."""
    _, module, environment = CHILDREN[name]
    reason = missing(module, True, device)
    if reason:
        return Figures(reason)
    options = ["--in-child", name, "--device", str(device), "--rows", str(args.rows), "--rounds", str(args.rounds)]
    options += ["--ramp-rows", str(args.ramp_rows), "--ramp-steps", str(args.ramp_steps)]
    try:
        done = subprocess.run(
            [sys.executable, __file__, *options],
            env={**os.environ, **environment},
            capture_output=True,
            text=True,
            timeout=CHILD_SECONDS,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return Figures(f"failed: expected an end within {CHILD_SECONDS} s, got none")
    if done.returncode != 0:
        said = done.stderr.strip().splitlines() or ["nothing on stderr"]
        return Figures(f"failed: exit code {done.returncode}: {said[-1][:200]}")
    return Figures(**json.loads(done.stdout.splitlines()[-1]))


def be_child(name: str, args: argparse.Namespace) -> None:
    """Set torch up, measure one contender and the pool, and print the figures of the first as JSON."""
    contender, module, _ = CHILDREN[name]
    if module == "rmm":
        put_rmm_behind_torch(torch.device(args.device))
    device = open_device(args.device)
    both = {contender: CONTENDERS[EMPTY], POOL: CONTENDERS[POOL]}
    found = measure(both, device, workloads_of(args.rows, args.rounds), ramp_of(args.ramp_rows, args.ramp_steps))
    print(json.dumps(asdict(found[contender])))


def put_rmm_behind_torch(device: torch.device) -> None:
    rmm = import_module("rmm")
    allocator = import_module("rmm.allocators.torch").rmm_torch_allocator
    rmm.mr.set_per_device_resource(device.index or 0, rmm_pool(rmm))
    torch.cuda.memory.change_current_allocator(allocator)


# --- The command ---


def main(argv: Sequence[str] | None = None) -> int:
    parser = Parser(description="Other ways to get memory, beside the pool: host time, held results, bytes of a ramp.")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--rows", type=integer(1), help="of constant (16 on the CPU, 4096 on CUDA)")
    parser.add_argument("--rounds", type=integer(1), default=ROUNDS)
    parser.add_argument("--ramp-rows", type=integer(1), default=RAMP_ROWS)
    parser.add_argument("--ramp-steps", type=integer(1), default=RAMP_STEPS)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--in-child", choices=CHILDREN, help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    args.rows = args.rows or ROWS.get(args.device, 4096)
    try:
        if args.in_child:
            be_child(args.in_child, args)
            sys.stdout.flush()
            os._exit(0)  # the last tensors may outlive the resource that they came from
        device = open_device(args.device)
    except UsageError as e:
        parser.error(str(e))
    ramp = ramp_of(args.ramp_rows, args.ramp_steps)
    found = measure(CONTENDERS, device, workloads_of(args.rows, args.rounds), ramp)
    for name, (contender, _, _) in CHILDREN.items():
        found[contender] = measure_in_child(name, args, device)
    needed = Setting.of(ramp, HEADS, device).specs[0].nbytes(max(ramp.rows))
    facts = {
        "device": str(device),
        "device_name": torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
        "torch": torch.__version__,
        **{name: getattr(sys.modules.get(name), "__version__", None) for name in ("rmm", "cupy")},
        "heads": HEADS,
        "rows": args.rows,
        "ramp_needed_bytes": needed,
        "contenders": {name: asdict(figures) for name, figures in found.items()},
    }
    if args.json:
        print(json.dumps(facts))
    else:
        print_figures(facts, found)
    return 1 if any(figures.status.startswith("failed") for figures in found.values()) else 0


def print_figures(facts: dict[str, Any], found: dict[str, Figures]) -> None:
    """A table that is Markdown as well, and below it why something is not in it."""
    versions = ", ".join(f"{name} {facts[name]}" for name in ("torch", "rmm", "cupy") if facts[name])
    print(f"{facts['device_name']}, {versions}, h_q {facts['heads']}, {facts['rows']} rows")
    heads = ["", *(cell for name in WORKLOADS for cell in (f"{name}, us", "pool / it"))]
    heads += ["a held result", "ramp: GiB taken", "taken / needed", "addresses"]
    lines = [heads, *([name, *cells(figures, facts["ramp_needed_bytes"])] for name, figures in found.items())]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    lines.insert(1, ["-" * widths[0], *("-" * (width - 1) + ":" for width in widths[1:])])
    for first, *rest in lines:
        print(f"| {first:<{widths[0]}} |", *(f"{cell:>{width}} |" for cell, width in zip(rest, widths[1:], strict=True)))
    for name, figures in found.items():
        if figures.status != MEASURED:
            print(f"not measured: {name}: {figures.status}")


def cells(figures: Figures, needed: int) -> list[str]:
    """What stands behind the name."""
    if figures.status != MEASURED:
        return ["-"] * (2 * len(WORKLOADS) + 4)
    assert figures.ramp_bytes is not None
    times = [(figures.acquire_us[name], figures.pool_us.get(name)) for name in WORKLOADS]
    return [
        *(cell for us, pool_us in times for cell in (f"{us:.2f}", f"{pool_us / us:.2f}" if pool_us else "-")),
        "kept" if figures.keeps_held else "overwritten",
        f"{figures.ramp_bytes / 2**30:.2f}"
        + (f", none left at {short} rows" if (short := figures.ramp_short_rows) else ""),
        f"{figures.ramp_bytes / needed:.2f}",
        str(figures.ramp_addresses),
    ]


@pytest.mark.parametrize("contender", CONTENDERS)
@pytest.mark.parametrize("name", WORKLOADS)
def test_acquire(time_contender, device, name, contender):
    each = CONTENDERS[contender]
    reason = missing(each.module, each.needs_cuda, device)
    if reason:
        pytest.skip(f"{contender}: {reason}")
    (workload,) = (each for each in workloads_of(ROWS.get(device.type, 4096), ROUNDS) if each.name == name)
    setting = Setting.of(workload, HEADS, device)
    time_contender(make_case(setting, {contender: each.loop(each.make(), setting)}), name, contender)


if __name__ == "__main__":
    sys.exit(main())

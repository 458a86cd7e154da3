"""All of the pool at once, for minutes: does any mix of legal calls ever change a bit of a result?

Several host threads, each with streams of its own and one that all share, draw operations from a seeded generator: acquires
of random and sometimes very large rows; results held whole, in part, as a view, a storage or a DLPack capsule; readers on
other streams and in other threads; growth, ``reserve``, ``trim``, limits, spills; pools closed under their results;
private, shared and forked captures, replays, graphs that end and capture again, graph runners; ``sleep``, with torch on
the memory meanwhile.

Every kernel writes the pattern of its own seed. Before a result is dropped, each of its words is compared, on the device.
Delays in front of kernels let the host run ahead, so that memory handed out too early shows. Calls that must be refused are
made too, and their refusals counted. The same seed gives each thread the same draws; how threads meet is up to the machine.

    python tests/soak.py --seconds 180 --device cuda --seed 0 --threads 4
    python tests/soak.py --seconds 20 --json            # on the CPU, without what only CUDA has

Exit code 1 after a mismatch, an error that nothing calls for, or memory that does not come back. The report names seed,
thread, step and operation.

It wants the device for itself: what the pool gives back is read off the free bytes of the device, and now and then torch
takes nearly all of them, so that the pool cannot wake.

Kept apart, since no capture survives it:

* Two captures: torch allows one at a time.
* The beginning of a capture, and calls of the pool in other threads: some synchronise the device (``--no-gate`` lets them
  meet).
* A capture, and what other threads do on its stream. torch has 32 streams of each priority for a device and hands them out
  in turn, so the one that a runner captures on may be another thread's. Runners take theirs of priority 0; the threads have
  streams of priority -1, all made at the start.
* A capture, and the runner of all threads. A call waits for the stream of the call before it, whoever made that. So each
  thread captures on two streams of its own, and calls that runner on its third, or on the default one.
"""

from __future__ import annotations

import argparse
import contextlib
import faulthandler
import gc
import json
import logging
import math
import os
import random
import sys
import threading
import time
import traceback
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from bufpool import process
from bufpool.errors import BufpoolError, CaptureError, PoolLimitError
from bufpool.graphs import GraphRunner
from bufpool.pool import OutputPool
from bufpool.spec import OutputSpec

MIB = 2**20
GIB = 2**30

ATTENTION = OutputSpec(out=((8, 64), torch.bfloat16), max_logits=((8,), torch.float32), lse=((8,), torch.float32))
WIDE = OutputSpec(block=((4096,), torch.bfloat16))
ODD = OutputSpec(values=((96,), torch.float8_e4m3fn), mask=((3,), torch.uint8), lse=((), torch.float32))
SPECS = (ATTENTION, WIDE, ODD)
"""Three tensors, which have a quick hand-out of their own; one tensor of long rows; rows of 3 and 4 bytes, and a dtype that
not every torch takes through DLPack."""

MOST_ROWS = 2**20
TYPICAL_ROWS = 50
SPREAD = 1.5  # of the logarithm of rows
CHUNK_BYTES = 64 * MIB  # compared at a time: what the expected words take beside the results
RING = 64  # comparisons between two looks at the counters
LOOK_SECONDS = 0.5
MOST_HELD = 24  # results of one thread
MOST_GRAPHS = 6  # of one thread, private and shared
CAPTURED_ROWS = 2048
BUCKETS = (4, 16, 64, 256)
FILL_FROM_BYTES = 64 * MIB  # mapped, for the test of a device that has no memory left at wake()
KEPT_BYTES = GIB  # what driver and torch may keep for themselves at the end
CYCLES_PER_MS = 2_000_000  # of torch.cuda._sleep on an H200
STREAMS = 3  # of one thread, beside the default stream, which all share
CAPTURING_STREAMS = 2  # the first of these: the runner of all threads is called on the others
TORCH_STREAMS = 32  # of one priority
FILL_ATTEMPTS = 3  # to let wake() meet a device without memory: another process may give some back meanwhile


# ------------------------------------------------------------------------------------------------------------ device


class Cpu:
    """The host: one order of work, nothing to wait for, no graphs."""

    has_graphs = False
    main_bytes = 512 * MIB
    main_slots = 24  # all threads share one lane
    limited_bytes = 4 * MIB
    large_bytes = 16 * MIB

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def enter_thread(self) -> None:
        """Make the device current in this thread."""

    def streams(self) -> list[Any]:
        """The streams of one more thread, which nobody else has, and the default one, which all threads share."""
        return [None] * (STREAMS + 1)

    def on(self, stream: Any) -> contextlib.AbstractContextManager[Any]:
        """What is queued inside goes to this stream."""
        return contextlib.nullcontext()

    def delay(self, milliseconds: float) -> None:
        """Let the current stream be busy for a while."""

    def wait(self, waiter: Any, waited: Any) -> None:
        """Let one stream wait for all that is queued on another."""

    def mark(self, stream: Any) -> Any:
        """What is queued on a stream now, for ``wait_mark`` in another thread."""

    def wait_mark(self, waiter: Any, mark: Any) -> None:
        """Let a stream wait for a mark."""

    def settle(self, stream: Any) -> None:
        """Let the host wait for a stream."""

    def finish_all(self) -> None:
        """Let the host wait for the device; nothing captures."""

    def free_bytes(self) -> int:
        """Free memory of the device; 0 where it says nothing about the pool."""
        return 0

    def empty_cache(self) -> None:
        """Let torch give back what it does not use."""

    def record_stream(self, pool: Any, tensors: Sequence[torch.Tensor], stream: Any) -> None:
        """Declare a reader."""


class Cuda(Cpu):
    """A CUDA device."""

    has_graphs = True
    main_slots = 6
    limited_bytes = 64 * MIB
    large_bytes = GIB

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self.main_bytes = min(24 * GIB, torch.cuda.get_device_properties(device).total_memory // 4)
        self._taken: set[int] = set()

    def enter_thread(self) -> None:
        torch.cuda.set_device(self.device)

    def streams(self) -> list[Any]:
        own = [torch.cuda.Stream(self.device, priority=-1) for _ in range(STREAMS)]
        for stream in own:
            if stream.cuda_stream in self._taken:
                most = TORCH_STREAMS // STREAMS
                raise ValueError(f"threads: expected at most {most} with {STREAMS} of torch's streams each, got more")
            self._taken.add(stream.cuda_stream)
        return [*own, torch.cuda.default_stream(self.device)]

    def on(self, stream: Any) -> contextlib.AbstractContextManager[Any]:
        return torch.cuda.stream(stream)

    def delay(self, milliseconds: float) -> None:
        torch.cuda._sleep(int(CYCLES_PER_MS * milliseconds))

    def wait(self, waiter: Any, waited: Any) -> None:
        if waiter != waited:
            waiter.wait_stream(waited)

    def mark(self, stream: Any) -> Any:
        event = torch.cuda.Event()
        event.record(stream)
        return event

    def wait_mark(self, waiter: Any, mark: Any) -> None:
        waiter.wait_event(mark)

    def settle(self, stream: Any) -> None:
        stream.synchronize()

    def finish_all(self) -> None:
        torch.cuda.synchronize(self.device)

    def free_bytes(self) -> int:
        return int(torch.cuda.mem_get_info(self.device)[0])

    def empty_cache(self) -> None:
        torch.cuda.empty_cache()

    def fill(self, free_bytes: int) -> Any:
        """What leaves so many bytes of the device, as long as it lives; None if another process was quicker."""
        torch.cuda.empty_cache()
        with contextlib.suppress(torch.OutOfMemoryError):
            return torch.empty(max(self.free_bytes() - free_bytes, 0), dtype=torch.uint8, device=self.device)
        return None

    def record_stream(self, pool: Any, tensors: Sequence[torch.Tensor], stream: Any) -> None:
        pool.record_stream(tensors, stream)

    def graph(self) -> Any:
        return torch.cuda.CUDAGraph()

    def capture(self, graph: Any, stream: Any, mode: str) -> Any:
        """The context of a capture; other threads go on, so its mode watches this one at most."""
        return torch.cuda.graph(graph, stream=stream, capture_error_mode=mode)

    def over(self, address: int, nbytes: int) -> torch.Tensor:
        """Bytes at an address that somebody else keeps."""
        return torch.as_tensor(_Bytes(address, nbytes), device=self.device)


class _Bytes:
    def __init__(self, address: int, nbytes: int) -> None:
        self.__cuda_array_interface__ = {"shape": (nbytes,), "typestr": "|u1", "data": (address, False), "version": 2}


# ----------------------------------------------------------------------------------------------------------- pattern


@dataclass(frozen=True)
class Seeded:
    """What a kernel of this seed wrote: word [row, column] is ``columns[column] * seed + rows[row]``."""

    seed: int

    def expected(self, pattern: Pattern, start: int, stop: int) -> torch.Tensor:
        words = torch.mul(pattern.columns.expand(stop - start, -1), pattern.factor(self.seed))
        return words.add_(pattern.rows[start:stop])


@dataclass(frozen=True)
class FromInput:
    """What the kernel of the runners wrote for the input ``rows[offset:]``: ``columns[column] * input[row]``."""

    offset: int

    def expected(self, pattern: Pattern, start: int, stop: int) -> torch.Tensor:
        return pattern.columns * pattern.rows[self.offset + start : self.offset + stop]


Content = Seeded | FromInput


class Pattern:
    """The words of one tensor of a spec.

    Words are 32-bit integers that wrap around, or bytes where a row is no multiple of four. Columns are odd: the words of
    two seeds differ in every place. Rows are noise: a shifted result differs too.
    """

    def __init__(self, row_bytes: int, device: torch.device, noise: dict[torch.dtype, torch.Tensor]) -> None:
        self.word = torch.int32 if row_bytes % 4 == 0 else torch.uint8
        self.row_bytes = row_bytes
        self.rows = noise[self.word]
        count = row_bytes // self.word.itemsize
        self.columns = (2 * self.rows[:count] + 1).view(1, count)

    def words(self, tensor: torch.Tensor) -> torch.Tensor:
        """A tensor of whole rows as ``[rows, words]``."""
        return tensor.view(-1).view(self.word).view(tensor.shape[0], -1)

    def factor(self, seed: int) -> int:
        return seed if self.word is torch.int32 else seed & 255

    def write(self, tensor: torch.Tensor, factor: int | torch.Tensor) -> None:
        """Overwrite every word, without a temporary tensor: this runs in captures too."""
        words = self.words(tensor)
        torch.mul(self.columns.expand(words.shape), factor, out=words)
        words.add_(self.rows[: words.shape[0]])


class Patterns:
    """The patterns of all specs on one device."""

    def __init__(self, device: torch.device) -> None:
        generator = torch.Generator().manual_seed(1)
        self.noise = {
            dtype: torch.randint(*bounds, (MOST_ROWS, 1), dtype=dtype, generator=generator).to(device)
            for dtype, bounds in {torch.int32: (-(2**31), 2**31 - 1), torch.uint8: (0, 256)}.items()
        }
        self.of = {spec: [Pattern(row_bytes, device, self.noise) for row_bytes in spec.row_bytes] for spec in SPECS}

    def write(self, spec: OutputSpec, outputs: Sequence[torch.Tensor], seed: int | GraphSeed) -> None:
        for pattern, tensor in zip(self.of[spec], outputs, strict=True):
            pattern.write(tensor, seed.of[pattern.word] if isinstance(seed, GraphSeed) else pattern.factor(seed))


class GraphSeed:
    """A seed on the device: a graph reads it anew at every replay."""

    def __init__(self, device: torch.device) -> None:
        self.of = {word: torch.zeros(1, dtype=word, device=device) for word in (torch.int32, torch.uint8)}

    def fill(self, seed: int) -> None:
        self.of[torch.int32].fill_(seed)
        self.of[torch.uint8].fill_(seed & 255)


# ----------------------------------------------------------------------------------------------- results and graphs


@dataclass
class Part:
    """Something that keeps a tensor of a result alive: the tensor, a view of some rows, its storage, or a capsule."""

    place: int
    thing: Any
    kind: str
    start: int = 0

    def tensor(self, spec: OutputSpec, rows: int, device: torch.device) -> torch.Tensor:
        if self.kind == "capsule":
            self.thing, self.kind = torch.from_dlpack(self.thing), "tensor"
        if self.kind == "storage":
            empty = torch.empty(0, dtype=spec.dtypes[self.place], device=device)
            return empty.set_(self.thing, 0, (rows, *spec.row_shapes[self.place]))
        return self.thing


@dataclass
class Held:
    """A result, or what is left of it, and what it must contain."""

    parts: list[Part]
    spec: OutputSpec
    rows: int
    content: Content
    pool: Any  # None: gone
    stream: Any
    label: str
    due: float = 0.0


@dataclass
class GraphSet:
    """Graphs that write to the same slots, or a private one: the stream of their last replay, and what it left."""

    name: str | None = None
    stream: Any = None
    latest: Captured | None = None


@dataclass
class Captured:
    """A graph and where its results are."""

    graph: Any
    pool: Any
    generation: int
    spec: OutputSpec
    rows: int
    seed: GraphSeed
    among: GraphSet
    label: str
    outputs: Sequence[torch.Tensor]  # of a private capture, held; else made over the places of dropped ones
    is_private: bool
    kept: torch.Tensor  # words of the first tensor of a result that was dropped inside the capture
    content: Seeded | None = None


# ------------------------------------------------------------------------------------------------------------- world


class Gate:
    """Many threads inside calls of the pool, or one that begins a capture (see the head of this file)."""

    def __init__(self, is_open: bool) -> None:
        self._is_open = is_open
        self._changed = threading.Condition()
        self._inside = 0
        self._wants_alone = 0
        self._is_alone = False

    @contextlib.contextmanager
    def shared(self) -> Iterator[None]:
        if self._is_open:
            yield
            return
        with self._changed:
            self._changed.wait_for(lambda: not self._wants_alone and not self._is_alone)
            self._inside += 1
        try:
            yield
        finally:
            with self._changed:
                self._inside -= 1
                self._changed.notify_all()

    @contextlib.contextmanager
    def alone(self) -> Iterator[None]:
        if self._is_open:
            yield
            return
        with self._changed:
            self._wants_alone += 1
            self._changed.wait_for(lambda: not self._inside and not self._is_alone)
            self._wants_alone -= 1
            self._is_alone = True
        try:
            yield
        finally:
            with self._changed:
                self._is_alone = False
                self._changed.notify_all()


class Pause:
    """Lets one thread have the pool for itself while the others hold no eager result."""

    def __init__(self, threads: int) -> None:
        self._changed = threading.Condition()
        self._active = threads
        self._resting = 0
        self._is_wanted = False
        self._is_over = False

    @property
    def is_wanted(self) -> bool:
        return self._is_wanted

    def rest(self) -> None:
        """Wait until the one is done."""
        with self._changed:
            self._resting += 1
            self._changed.notify_all()
            self._changed.wait_for(lambda: not self._is_wanted or self._is_over)
            self._resting -= 1

    @contextlib.contextmanager
    def alone(self) -> Iterator[bool]:
        """Whether the others rest now; they do not if another thread was quicker, or all is over."""
        with self._changed:
            is_mine = not self._is_wanted
            if is_mine:
                self._is_wanted = True
                self._changed.wait_for(lambda: self._resting == self._active - 1 or self._is_over)
        try:
            yield is_mine and not self._is_over
        finally:
            if is_mine:
                with self._changed:
                    self._is_wanted = False
                    self._changed.notify_all()

    def leave(self) -> None:
        """A thread ends."""
        with self._changed:
            self._active -= 1
            self._changed.notify_all()

    def end(self) -> None:
        """Let nobody wait any longer."""
        with self._changed:
            self._is_over = True
            self._changed.notify_all()


@dataclass
class World:
    """What all threads share."""

    seed: int
    device: Cpu
    make_pool: Callable[..., Any]
    threads: int
    seconds: float
    gate: Gate
    pause: Pause
    deadline: float = 0.0
    started: float = 0.0
    stop: threading.Event = field(default_factory=threading.Event)
    capturing: Any = field(default_factory=threading.Lock)
    mailbox: deque[tuple[Held, Any]] = field(default_factory=deque)
    mismatches: list[dict[str, Any]] = field(default_factory=list)
    unexpected: list[dict[str, Any]] = field(default_factory=list)
    generations: dict[int, int] = field(default_factory=dict)  # by pool: how often it slept
    peak_bytes: int = 0
    slept_bytes: int = 0

    def __post_init__(self) -> None:
        self.patterns = Patterns(self.device.device)
        self.like = torch.zeros(1, device=self.device.device)
        self.main = self.make_pool(max_bytes=self.device.main_bytes, max_slots=self.device.main_slots)
        self.limited = self.make_pool(max_bytes=self.device.limited_bytes, max_slots=2)
        self.runner = self.new_runner(None)

    def new_runner(self, rng: random.Random | None) -> GraphRunner:
        """A runner of the attention outputs; sometimes with slots of its own for each bucket."""
        patterns = self.patterns.of[ATTENTION]

        def kernel(x: torch.Tensor, allocator: Any) -> Any:
            outputs = allocator.acquire(ATTENTION, x.shape[0], x)
            for pattern, tensor in zip(patterns, outputs, strict=True):
                words = pattern.words(tensor)
                torch.mul(pattern.columns.expand(words.shape), x.view(-1, 1), out=words)
            return outputs

        inputs = OutputSpec(x=((), torch.int32))
        return GraphRunner(kernel, inputs, BUCKETS, pool=self.main, private=rng is not None and rng.random() < 0.3)

    def start(self) -> None:
        self.started = time.monotonic()
        self.deadline = self.started + self.seconds

    @property
    def is_over(self) -> bool:
        return self.stop.is_set() or time.monotonic() >= self.deadline

    def generation(self, pool: Any) -> int:
        return self.generations.get(id(pool), 0)

    def fail(self, thread: int, step: int, operation: str, error: BaseException) -> None:
        """Note an error that nothing calls for, and end the run."""
        text = "".join(traceback.format_exception(error))
        print(f"soak: thread {thread}, step {step}, {operation}:\n{text}", file=sys.stderr, flush=True)  # torch may abort
        self.unexpected.append(
            {"seed": self.seed, "thread": thread, "step": step, "operation": operation, "error": text[-4000:]}
        )
        self.end()

    def end(self) -> None:
        self.stop.set()
        self.pause.end()


# ------------------------------------------------------------------------------------------------------------ ledger


class Ledger:
    """Counts wrong words on the device, a counter for each comparison, and looks at the counters now and then."""

    def __init__(self, world: World, thread: int, streams: Sequence[Any]) -> None:
        self._world = world
        self._thread = thread
        self._streams = streams
        with world.device.on(streams[0]):
            self._wrong = torch.zeros(RING, dtype=torch.int64, device=world.device.device)
            world.device.settle(streams[0])
        self._labels: list[tuple[int, str]] = []
        self._looked = time.monotonic()
        self.ended: list[Any] = []
        """Memory of torch that streams of this thread may still use; torch knows one of them only."""
        self.comparisons = 0
        self.compared_bytes = 0

    def compare(self, words: torch.Tensor, pattern: Pattern, content: Content, start: int, step: int, label: str) -> None:
        """Queue the comparison of ``words``, rows ``start`` and following, on the current stream."""
        if len(self._labels) == RING:
            self.look()
        counter = self._wrong[len(self._labels)]
        rows = words.shape[0]
        chunk = max(CHUNK_BYTES // pattern.row_bytes, 1)
        for first in range(0, rows, chunk):
            last = min(first + chunk, rows)
            counter.add_((words[first:last] != content.expected(pattern, start + first, start + last)).sum())
        self._labels.append((step, label))
        self.comparisons += 1
        self.compared_bytes += rows * pattern.row_bytes

    def look(self) -> None:
        """Wait for the streams of this thread, and note what was wrong."""
        device, (first, *others) = self._world.device, self._streams
        with device.on(first):
            for other in others:
                device.wait(first, other)
            counts = self._wrong.tolist()
            self._wrong.zero_()
            device.settle(first)  # the next comparison may be on another stream
        for count, (step, label) in zip(counts, self._labels, strict=False):
            if count:
                self._world.mismatches.append(
                    {
                        "seed": self._world.seed,
                        "thread": self._thread,
                        "step": step,
                        "operation": label,
                        "wrong_words": count,
                    }
                )
                self._world.end()
        self._labels.clear()
        self.ended.clear()
        self._looked = time.monotonic()

    def look_if_due(self) -> None:
        if self._labels and time.monotonic() - self._looked > LOOK_SECONDS:
            self.look()


# ------------------------------------------------------------------------------------------------------------ worker


class Worker:
    """One host thread: draws operations and makes them."""

    def __init__(self, world: World, number: int) -> None:
        self.world = world
        self.number = number
        self.rng = random.Random(f"{world.seed} {number}")
        self.done: Counter[str] = Counter()
        self.refusals: Counter[str] = Counter()
        self.step = 0
        self.operation = ""
        self.held: list[Held] = []
        self.graphs: list[Captured] = []
        self.sets = {name: GraphSet(name) for name in (f"set {number}", f"other set {number}")}
        self.spare_graphs: list[Any] = []
        self.runner: GraphRunner | None = None
        self.streams = world.device.streams()

    # One after another

    def run(self) -> None:
        world = self.world
        try:
            world.device.enter_thread()
            self.ledger = Ledger(world, self.number, self.streams)
            weights = {name: weight for name, (weight, needs_graphs) in OPERATIONS.items()
                       if world.device.has_graphs or not needs_graphs}  # fmt: skip
            names = list(weights)
            while not world.is_over:
                if world.pause.is_wanted:
                    self.drop_all()
                    world.pause.rest()
                    continue
                self.step += 1
                (self.operation,) = self.rng.choices(names, list(weights.values()))
                getattr(self, self.operation)()
                self.done[self.operation] += 1
                self.drop_due()
                self.ledger.look_if_due()
            self.operation = "end"
            if world.stop.is_set():  # the pool may be in any state
                self.ledger.look()
            else:
                self.finish()
        except BaseException as error:
            world.fail(self.number, self.step, self.operation, error)
        finally:
            world.pause.leave()

    def finish(self) -> None:
        """Compare and drop all that is left."""
        self.drop_all()
        while self.graphs:
            self.drop_graph()
        self.drop_all()
        if self.runner is not None:
            with self.world.capturing:
                self.runner.close()
        self.ledger.look()

    # Draws

    def draw_spec(self) -> OutputSpec:
        return self.rng.choice(SPECS)

    def draw_rows(self, most: int = MOST_ROWS) -> int:
        return min(max(int(TYPICAL_ROWS * math.exp(self.rng.gauss(0, SPREAD))), 1), most)

    def draw_stream(self) -> Any:
        return self.rng.choice(self.streams)

    def draw_seed(self) -> int:
        return self.rng.randrange(1, 2**31)

    def delay(self) -> None:
        """Sometimes let the device fall behind the host."""
        draw = self.rng.random()
        if draw < 0.02:
            self.world.device.delay(self.rng.uniform(5, 15))
        elif draw < 0.3:
            self.world.device.delay(self.rng.uniform(0, 2))

    # Calls that may be refused

    @contextlib.contextmanager
    def may_refuse(self, call: str, kind: type[BufpoolError], text: str) -> Iterator[None]:
        """The call may raise this error; it is counted then."""
        try:
            yield
        except kind as error:
            if type(error) is not kind or text not in str(error):
                raise
            self.refusals[f"{call}: {kind.__name__}"] += 1

    @contextlib.contextmanager
    def must_refuse(self, call: str, kind: type[BufpoolError], text: str) -> Iterator[None]:
        """The call has to raise this error."""
        before = self.refusals.total()
        with self.may_refuse(call, kind, text):
            yield
        if self.refusals.total() == before:
            raise AssertionError(f"{call}: expected {kind.__name__} ({text}), got no error")

    def limited(self, call: str, error: PoolLimitError) -> None:
        """A limit was reached; its figures must say so."""
        if error.have + error.need <= error.limit:
            raise AssertionError(f"{call}: expected figures above the limit, got {error}") from error
        self.refusals[f"{call}: PoolLimitError"] += 1

    def acquire(self, pool: Any, spec: OutputSpec, rows: int, seed: int) -> Any:
        """A result with the pattern of a seed on the current stream; None if it does not fit."""
        try:
            with self.world.gate.shared():
                outputs = pool.acquire(spec, rows, self.world.like)
        except PoolLimitError as error:
            self.limited("acquire", error)
            return None
        self.delay()
        self.world.patterns.write(spec, outputs, seed)
        return outputs

    # Holding and dropping

    def held_of(
        self, outputs: Sequence[torch.Tensor], spec: OutputSpec, content: Content, pool: Any, stream: Any, kind: str
    ) -> Held:
        """What is left of a result when only some of it is held."""
        rows = outputs[0].shape[0]
        place = self.rng.randrange(len(outputs))
        tensor = outputs[place]
        if kind == "all":
            parts = [Part(place, tensor, "tensor") for place, tensor in enumerate(outputs)]
        elif kind == "view":
            start = self.rng.randrange(rows)
            parts = [Part(place, tensor[start : self.rng.randint(start + 1, rows)], "tensor", start)]
        elif kind == "storage":
            parts = [Part(place, tensor.untyped_storage(), "storage")]
        elif kind == "capsule" and tensor.dtype is not torch.float8_e4m3fn:  # which not every torch exports
            parts = [Part(place, torch.utils.dlpack.to_dlpack(tensor), "capsule")]
        else:
            parts = [Part(place, tensor.detach() if kind == "alias" else tensor, "tensor")]
        names = ", ".join(spec.names)
        memory = "a gone pool's" if pool is None else "the pool's" if self.is_pooled(pool, tensor) else "torch's"
        what = f"{kind} of {rows} rows of ({names}), {memory} memory"
        label = f"{what}, {self.operation} at step {self.step} of thread {self.number}"
        return Held(parts, spec, rows, content, pool, stream, label)

    def hold(self, held: Held) -> None:
        held.due = self.step + math.exp(self.rng.gauss(2, 1))
        self.held.append(held)
        if len(self.held) > MOST_HELD:
            self.drop(self.held.pop(0))

    def compare(self, held: Held) -> None:
        """Compare what is held, on the current stream."""
        for part in held.parts:
            tensor = part.tensor(held.spec, held.rows, self.world.device.device)
            pattern = self.world.patterns.of[held.spec][part.place]
            self.ledger.compare(pattern.words(tensor), pattern, held.content, part.start, self.step, held.label)

    def drop(self, held: Held) -> None:
        """Compare and drop; sometimes on another stream than it was written on."""
        device = self.world.device
        reader = self.draw_stream() if held.pool is not None and self.rng.random() < 0.2 else held.stream
        device.wait(reader, held.stream)
        with device.on(reader):
            if reader is not held.stream:
                self.read_here(held, reader)
            self.compare(held)
        held.parts.clear()

    def read_here(self, held: Held, reader: Any) -> None:
        """Declare this stream as a reader, and let it be late."""
        tensors = [part.tensor(held.spec, held.rows, self.world.device.device) for part in held.parts]
        self.world.device.record_stream(held.pool, tensors, reader)
        if self.rng.random() < 0.5:
            self.world.device.delay(self.rng.uniform(0.5, 5))

    def drop_due(self) -> None:
        due = [held for held in self.held if held.due <= self.step]
        self.held = [held for held in self.held if held.due > self.step]
        while due:
            self.drop(due.pop())

    def drop_all(self) -> None:
        while self.held:
            self.drop(self.held.pop())
        while self.take():
            pass

    # Operations

    def acquire_and_drop(self) -> None:
        spec, rows, seed, stream = self.draw_spec(), self.draw_rows(), self.draw_seed(), self.draw_stream()
        with self.world.device.on(stream):
            outputs = self.acquire(self.world.main, spec, rows, seed)
        if outputs is not None:
            self.drop(self.held_of(outputs, spec, Seeded(seed), self.world.main, stream, "all"))

    def acquire_and_hold(self) -> None:
        self.acquire_some(self.world.main, self.draw_rows())

    def acquire_large(self) -> None:
        spec = self.draw_spec()
        most = min(self.world.device.large_bytes // spec.row_nbytes, MOST_ROWS)
        self.acquire_some(self.world.main, self.rng.randint(most // 8, most), spec)

    def acquire_limited(self) -> None:
        """From the pool with a small limit and two slots a lane: refusals, evictions and spills."""
        self.acquire_some(self.world.limited, self.draw_rows() * self.rng.choice((1, 1, 10)))

    def acquire_some(self, pool: Any, rows: int, spec: OutputSpec | None = None) -> None:
        spec = spec or self.draw_spec()
        seed, stream = self.draw_seed(), self.draw_stream()
        with self.world.device.on(stream):
            outputs = self.acquire(pool, spec, rows, seed)
        if outputs is not None:
            kind = self.rng.choice(("all", "one", "view", "storage", "capsule", "alias"))
            self.hold(self.held_of(outputs, spec, Seeded(seed), pool, stream, kind))

    def look_at_held(self) -> None:
        """Compare something that stays held."""
        if self.held:
            held = self.rng.choice(self.held)
            with self.world.device.on(held.stream):
                self.compare(held)

    def read_on_another_stream(self) -> None:
        """A late reader on another stream; the writer's stream goes on at once with the same rows."""
        device, spec, rows = self.world.device, self.draw_spec(), self.draw_rows()
        writer, reader = self.rng.sample(self.streams, 2)
        for _ in range(2):
            seed = self.draw_seed()
            with device.on(writer):
                outputs = self.acquire(self.world.main, spec, rows, seed)
            if outputs is None:
                return
            held = self.held_of(outputs, spec, Seeded(seed), self.world.main, writer, "all")
            del outputs
            device.wait(reader, writer)
            with device.on(reader):
                device.delay(self.rng.uniform(0.5, 3))
                self.compare(held)
                self.world.device.record_stream(self.world.main, [part.thing for part in held.parts], reader)
            held.parts.clear()

    def give(self) -> None:
        """Let another thread have a result."""
        own = [held for held in self.held if held.pool is not None]
        if own and len(self.world.mailbox) < 16:
            held = self.rng.choice(own)
            self.held = [other for other in self.held if other is not held]
            self.world.mailbox.append((held, self.world.device.mark(held.stream)))

    def take(self) -> bool:
        """Compare and drop what another thread gave; whether there was something."""
        try:
            held, mark = self.world.mailbox.popleft()
        except IndexError:
            return False
        stream = self.draw_stream()
        self.world.device.wait_mark(stream, mark)
        with self.world.device.on(stream):
            self.read_here(held, stream)
            self.compare(held)
        held.parts.clear()
        return True

    def reserve(self) -> None:
        pool = self.rng.choice((self.world.main, self.world.main, self.world.limited))
        with self.world.device.on(self.draw_stream()):
            try:
                with self.world.gate.shared():
                    pool.reserve(self.draw_spec(), self.draw_rows() * self.rng.choice((1, 8)), self.world.like)
            except PoolLimitError as error:
                self.limited("reserve", error)

    def trim(self) -> None:
        pool = self.rng.choice((self.world.main, self.world.limited))
        with self.may_refuse("trim", CaptureError, "expected no graph capture"), self.world.gate.shared():
            pool.trim()

    def ask(self) -> None:
        """The figures of a pool must fit together."""
        pool, most = self.rng.choice(
            ((self.world.main, self.world.device.main_bytes), (self.world.limited, self.world.device.limited_bytes))
        )
        stats = pool.stats()
        if not stats.in_use_bytes <= stats.mapped_bytes <= most:
            raise AssertionError(
                f"stats: expected bytes in use <= mapped <= {most}, got {stats.in_use_bytes} and {stats.mapped_bytes}"
            )
        if pool is self.world.main:
            self.world.peak_bytes = max(self.world.peak_bytes, stats.peak_mapped_bytes)
            if self.rng.random() < 0.2:
                pool.reset_peak_stats()

    def close_with_results(self) -> None:
        """A pool of its own, closed or collected while its results are held; some graph of it may live on."""
        pool = self.world.make_pool(max_slots=2)
        stream = self.draw_stream()
        for _ in range(self.rng.randint(1, 4)):
            spec, rows, seed = self.draw_spec(), self.draw_rows(), self.draw_seed()
            with self.world.device.on(stream):
                outputs = self.acquire(pool, spec, rows, seed)
            if outputs is None:
                continue
            self.hold(self.held_of(outputs, spec, Seeded(seed), None, stream, self.rng.choice(("all", "view"))))
            del outputs
        if self.world.device.has_graphs and self.rng.random() < 0.3:
            self.capture(pool, None)
        if self.rng.random() < 0.5:
            with self.world.gate.shared():
                pool.close()
            with self.must_refuse("closed", BufpoolError, "expected an open pool"):
                pool.acquire(ATTENTION, 1, self.world.like)

    def run_runner(self) -> None:
        """The runner of this thread, whose results last until its next call."""
        if self.runner is None or self.rng.random() < 0.01:
            with self.world.capturing, self.world.gate.alone():
                if self.runner is not None:
                    self.runner.close()
                self.runner = self.world.new_runner(self.rng)
                try:
                    self.runner.capture(self.world.like)
                except PoolLimitError as error:
                    self.limited("runner", error)
                    self.runner = None
                    return
        self.call_runner(self.runner, self.draw_stream(), is_fresh=self.rng.random() < 0.3)

    def run_shared_runner(self) -> None:
        """The runner of all threads: each needs a copy. Not on a stream that captures: others wait for it."""
        self.call_runner(self.world.runner, self.rng.choice(self.streams[CAPTURING_STREAMS:]), is_fresh=True)

    def call_runner(self, runner: GraphRunner, stream: Any, is_fresh: bool) -> None:
        rows = self.rng.randint(1, BUCKETS[-1] + 40)
        offset = self.rng.randrange(MOST_ROWS - rows)
        x = self.world.patterns.noise[torch.int32][offset : offset + rows, 0]
        with self.world.device.on(stream):
            self.delay()
            try:
                with self.world.gate.shared():
                    outputs = runner(x=x, fresh=is_fresh)
            except PoolLimitError as error:
                self.limited("runner", error)
                return
            held = self.held_of(outputs, ATTENTION, FromInput(offset), self.world.main, stream, "all")
            del outputs
            is_own = is_fresh or rows > BUCKETS[-1] or not self.world.device.has_graphs
            if not is_own:
                self.compare(held)
                held.parts.clear()
        if is_own:
            self.hold(held)

    # Sleep

    def sleep_with_results(self) -> None:
        """Must be refused while this thread holds a result."""
        spec, seed, stream = self.draw_spec(), self.draw_seed(), self.draw_stream()
        with self.world.device.on(stream):
            outputs = self.acquire(self.world.main, spec, self.draw_rows(), seed)
        if outputs is None:
            return
        held = self.held_of(outputs, spec, Seeded(seed), self.world.main, stream, "one")
        del outputs
        if self.is_pooled(self.world.main, held.parts[0].thing):
            before = self.refusals.total()
            with (
                self.world.gate.shared(),
                self.may_refuse("sleep: captures", CaptureError, "expected no graph capture"),
                self.may_refuse("sleep: held", BufpoolError, "expected no live result"),
            ):
                self.world.main.sleep()
            if self.refusals.total() == before:
                raise AssertionError("sleep: expected a refusal while a result is held, got none")
        self.drop(held)

    def is_pooled(self, pool: Any, tensor: torch.Tensor) -> bool:
        """Whether the memory is the pool's and not torch's own."""
        address = tensor.untyped_storage().data_ptr()
        return any(slot.has_address(address) for slot in list(pool._slots))

    def sleep_and_wake(self) -> None:
        """All threads drop their eager results, the pool sleeps, torch uses the memory, the pool wakes."""
        self.drop_all()
        with self.world.pause.alone() as is_alone:
            if not is_alone:
                return
            self.drop_all()
            self.sleep_alone()

    def sleep_alone(self) -> None:
        world, pool, device = self.world, self.world.main, self.world.device
        device.finish_all()
        mapped, free = pool.stats().mapped_bytes, device.free_bytes()
        pool.sleep()
        world.generations[id(pool)] = world.generation(pool) + 1
        world.slept_bytes += mapped
        assert pool.stats().mapped_bytes == 0, pool.report()
        given_back = device.free_bytes() - free
        if device.has_graphs and given_back < mapped:
            raise AssertionError(f"sleep: expected {mapped} bytes back, got {given_back}")
        for call, act in {
            "acquire asleep": lambda: pool.acquire(ATTENTION, 5, world.like),
            "reserve asleep": lambda: pool.reserve(ATTENTION, 5, world.like),
            "sleep asleep": pool.sleep,
            "runner asleep": lambda: world.runner(x=world.patterns.noise[torch.int32][:5, 0]),
        }.items():
            with self.must_refuse(call, BufpoolError, "expected a pool that is awake"):
                act()
        assert pool.trim() == 0
        with device.on(self.streams[0]):
            guest = torch.full((max(min(mapped, 2 * GIB), MIB),), 171, dtype=torch.uint8, device=device.device)
            if device.has_graphs and mapped > FILL_FROM_BYTES and self.rng.random() < 0.3:
                self.wake_without_memory(mapped)
            is_staying = self.rng.random() < 0.5
            if not is_staying:
                del guest
            pool.wake()
            assert pool.stats().mapped_bytes == mapped, pool.report()
        self.acquire_and_drop()
        with device.on(self.streams[0]):
            if is_staying and not bool((guest == 171).all()):
                raise AssertionError("sleep: expected torch's memory as torch left it, got other bytes after wake")

    def wake_without_memory(self, mapped: int) -> None:
        """Torch has nearly all of the device: the pool cannot wake, and says so."""
        pool, device = self.world.main, self.world.device
        for _ in range(FILL_ATTEMPTS):
            filler = device.fill(mapped // 2)
            before = device.free_bytes()
            if filler is None or before >= mapped:
                return
            try:
                pool.wake()
            except PoolLimitError as error:
                assert error.need == mapped, error
                assert pool.is_asleep
                if device.free_bytes() < mapped:
                    self.refusals["wake: PoolLimitError"] += 1
                return
            pool.sleep()
            del filler
        raise AssertionError(f"wake: expected a refusal with {before} bytes free for {mapped}, got none")

    # Graphs

    def capture_private(self) -> None:
        self.capture(self.world.main, None)

    def capture_shared(self) -> None:
        self.capture(self.world.main, self.rng.choice(list(self.sets)))

    def capture(self, pool: Any, name: str | None) -> None:
        """Capture a few layers whose results are dropped, and a last one; sometimes a branch on another stream."""
        if len(self.graphs) >= MOST_GRAPHS:
            self.drop_graph()
        world, device = self.world, self.world.device
        spec, rows = self.draw_spec(), self.draw_rows(CAPTURED_ROWS)
        layers = [self.draw_rows(CAPTURED_ROWS) for _ in range(self.rng.randint(1, 3))]
        side, stream = self.rng.sample(self.streams[:CAPTURING_STREAMS], 2)
        is_forked = self.rng.random() < 0.3
        pattern = world.patterns.of[spec][0]
        with device.on(stream):
            seed = GraphSeed(device.device)
            kept = torch.zeros(layers[-1], pattern.columns.shape[1], dtype=pattern.word, device=device.device)

        def body() -> Any:
            seed.of[torch.uint8].add_(0)  # a capture that a limit ends is not empty
            for number, layer in enumerate(layers, 1):
                outputs = pool.acquire(spec, layer, world.like)
                world.patterns.write(spec, outputs, seed)
                if number == len(layers):
                    kept.copy_(pattern.words(outputs[0]))
                del outputs
            with self.forked(stream, side) if is_forked else contextlib.nullcontext():
                if is_forked:
                    with device.on(side):
                        device.delay(0.2)
                        world.patterns.write(spec, pool.acquire(spec, layers[0], world.like), seed)
                outputs = pool.acquire(spec, rows, world.like)
                world.patterns.write(spec, outputs, seed)
            time.sleep(self.rng.uniform(0, 0.003))  # other threads meet a capture under way
            return outputs

        with world.capturing:
            graph = self.spare_graphs.pop() if self.spare_graphs else device.graph()
            shared = contextlib.nullcontext() if name is None else pool.shared_capture(name)
            mode = self.rng.choice(("thread_local", "relaxed"))
            with shared, self.captured(device.capture(graph, stream, mode)):
                try:
                    outputs = body()
                except PoolLimitError as error:
                    self.limited("capture", error)
                    outputs = None
            if outputs is None:
                graph.reset()
                self.ledger.ended.append((seed, kept))
                return
        among = GraphSet(stream=stream) if name is None else self.sets[name]
        if among.stream is None:
            among.stream = stream
        label = f"graph of {rows} rows of ({', '.join(spec.names)}), {name or 'private'}, captured at step {self.step}"
        if name is not None:
            outputs = [self.over(tensor) for tensor in outputs]  # results of a shared set are not held
        self.graphs.append(
            Captured(
                graph, pool if pool is world.main else None, world.generation(pool), spec, rows, seed, among, label,
                list(outputs), name is None, kept,
            )
        )  # fmt: skip
        del outputs
        self.replay_graph(self.graphs[-1], stream)

    @contextlib.contextmanager
    def forked(self, stream: Any, side: Any) -> Iterator[None]:
        """A branch of a capture; it is joined whatever happens, or the capture would be broken."""
        self.world.device.wait(side, stream)
        try:
            yield
        finally:
            self.world.device.wait(stream, side)

    @contextlib.contextmanager
    def captured(self, scope: Any) -> Iterator[None]:
        """Begin the capture when no other thread is inside the pool; let them in while it runs."""
        with self.world.gate.alone():
            scope.__enter__()
        try:
            yield
        except BaseException:
            scope.__exit__(*sys.exc_info())
            raise
        scope.__exit__(None, None, None)

    def over(self, tensor: torch.Tensor) -> torch.Tensor:
        """A tensor over the same memory that keeps nothing."""
        nbytes = tensor.numel() * tensor.itemsize
        return self.world.device.over(tensor.data_ptr(), nbytes).view(tensor.dtype).view(tensor.shape)

    def replay(self) -> None:
        if self.graphs:
            self.replay_graph(self.rng.choice(self.graphs), self.draw_stream())

    def replay_graph(self, captured: Captured, stream: Any) -> None:
        """Replay with another seed behind the last replay of the same set, and compare."""
        device, among = self.world.device, captured.among
        device.wait(stream, among.stream)
        content = Seeded(self.draw_seed())
        with device.on(stream):
            captured.seed.fill(content.seed)
            self.delay()
            captured.graph.replay()
            captured.content, captured.generation = content, self.world.generation(captured.pool)
            among.stream, among.latest = stream, captured
            pattern = self.world.patterns.of[captured.spec][0]
            label = f"inside the {captured.label}"
            self.ledger.compare(captured.kept, pattern, content, 0, self.step, label)
        self.compare_graph(captured)

    def compare_graph(self, captured: Captured) -> None:
        """The results of the last replay are still there."""
        with self.world.device.on(captured.among.stream):
            for pattern, tensor in zip(self.world.patterns.of[captured.spec], captured.outputs, strict=True):
                assert captured.content is not None
                self.ledger.compare(
                    pattern.words(tensor), pattern, captured.content, 0, self.step, f"results of the {captured.label}"
                )

    def is_defined(self, captured: Captured) -> bool:
        """Whether the last replay of its set was its own, and its pool has not slept since."""
        return (
            captured.content is not None
            and captured.among.latest is captured
            and captured.generation == self.world.generation(captured.pool)
        )

    def look_at_graph(self) -> None:
        """Eager calls meanwhile have not touched what a graph left."""
        defined = [captured for captured in self.graphs if self.is_defined(captured)]
        if defined:
            self.compare_graph(self.rng.choice(defined))

    def drop_graph(self) -> None:
        """End a graph, perhaps with replays under way; its results may be held longer."""
        if not self.graphs:
            return
        captured = self.graphs.pop(self.rng.randrange(len(self.graphs)))
        is_defined = self.is_defined(captured)
        if is_defined:
            self.compare_graph(captured)
        if captured.is_private and is_defined and captured.pool is not None and self.rng.random() < 0.5:
            assert captured.content is not None
            self.hold(
                self.held_of(
                    captured.outputs, captured.spec, captured.content, captured.pool,
                    captured.among.stream, self.rng.choice(("all", "one", "view", "storage")),
                )
            )  # fmt: skip
        captured.outputs = ()
        self.ledger.ended.append((captured.seed, captured.kept))
        if captured.among.latest is captured:
            captured.among.latest = None
        # Not while another thread captures: what torch does then is not asked here.
        with self.world.capturing:
            if self.rng.random() < 0.5:
                captured.graph.reset()
                self.spare_graphs.append(captured.graph)
            captured.graph = None
        if self.rng.random() < 0.5:
            self.acquire_and_drop()


# Weight, and whether it needs graphs.
OPERATIONS: dict[str, tuple[float, bool]] = {
    "acquire_and_drop": (20, False),
    "acquire_and_hold": (24, False),
    "acquire_large": (0.4, False),
    "acquire_limited": (8, False),
    "look_at_held": (4, False),
    "read_on_another_stream": (5, True),
    "give": (4, False),
    "take": (4, False),
    "reserve": (2, False),
    "trim": (1.5, False),
    "ask": (1.5, False),
    "close_with_results": (0.7, False),
    "run_runner": (5, False),
    "run_shared_runner": (3, False),
    "sleep_with_results": (0.7, False),
    "sleep_and_wake": (0.15, False),
    "capture_private": (0.3, True),
    "capture_shared": (0.45, True),
    "replay": (14, True),
    "look_at_graph": (4, True),
    "drop_graph": (0.3, True),
}


# --------------------------------------------------------------------------------------------------------------- run


def soak(world: World) -> dict[str, Any]:
    """Run all threads to the end; the figures."""
    workers = [Worker(world, number) for number in range(world.threads)]
    warm_up(world, workers[0].streams[0])
    gc.collect()
    gc.freeze()  # captures collect garbage; they need not walk through all of torch
    world.device.finish_all()
    free_before = world.device.free_bytes()
    world.start()
    threads = [threading.Thread(target=worker.run, name=f"soak {worker.number}", daemon=True) for worker in workers]
    for thread in threads:
        thread.start()
    last_note = world.started
    for thread in threads:
        while thread.is_alive():
            thread.join(0.2)
            if time.monotonic() - last_note > 15:
                last_note = time.monotonic()
                count = sum(worker.done.total() for worker in workers)
                print(f"soak: {last_note - world.started:.0f} s, {count} operations", file=sys.stderr, flush=True)
    seconds = time.monotonic() - world.started
    figures = {
        "device": str(world.device.device),
        "torch": torch.__version__,
        "seed": world.seed,
        "threads": world.threads,
        "seconds": round(seconds, 1),
        "operations": {name: sum(worker.done[name] for worker in workers) for name in OPERATIONS},
        "refusals": dict(sorted(sum((worker.refusals for worker in workers), Counter()).items())),
        "comparisons": sum(worker.ledger.comparisons for worker in workers if hasattr(worker, "ledger")),
        "compared_bytes": sum(worker.ledger.compared_bytes for worker in workers if hasattr(worker, "ledger")),
    }
    figures.update(pool_figures(world))
    if not world.mismatches and not world.unexpected:
        try:
            figures["kept_bytes"] = give_all_back(world, workers, free_before)
        except (AssertionError, BufpoolError, RuntimeError) as error:
            world.fail(-1, 0, "end", error)
    figures["mismatches"] = len(world.mismatches)
    figures["unexpected_errors"] = len(world.unexpected)
    figures["failures"] = [*world.mismatches[:10], *world.unexpected[:10]]
    return figures


def warm_up(world: World, stream: Any) -> None:
    """Load every kernel once, so that none is loaded inside a capture, and capture the runner of all threads."""
    with world.device.on(stream):
        for spec in SPECS:
            outputs = spec.outputs_type(
                *(torch.empty((3, *shape), dtype=dtype, device=world.device.device) for _, shape, dtype in spec)
            )
            seed = GraphSeed(world.device.device)
            seed.fill(5)
            for factor in (5, seed):
                world.patterns.write(spec, outputs, factor)
                for pattern, tensor in zip(world.patterns.of[spec], outputs, strict=True):
                    for content in (Seeded(5), FromInput(7)):
                        wrong = (pattern.words(tensor) != content.expected(pattern, 0, 3)).sum()
                        assert int(wrong) == (0 if content == Seeded(5) else int(wrong)), "the pattern is not what it says"
        world.device.delay(0.1)
    world.runner.capture(world.like)
    for rows in (3, BUCKETS[-1] + 1):
        world.runner(x=world.patterns.noise[torch.int32][:rows, 0], fresh=True)


def pool_figures(world: World) -> dict[str, Any]:
    try:
        stats = world.main.stats()
    except BufpoolError as error:
        return {"stats": str(error)}
    return {
        "mapped_bytes": stats.mapped_bytes,
        "peak_mapped_bytes": max(world.peak_bytes, stats.peak_mapped_bytes),
        "slept_bytes": world.slept_bytes,
        "acquires": stats.acquires,
        "hits": stats.hits,
        "grows": stats.grows,
        "rotations": stats.rotations,
        "spills": stats.spills + world.limited.stats().spills,
        "slots": stats.slots,
    }


def give_all_back(world: World, workers: list[Worker], free_before: int) -> int:
    """Nobody holds anything: all memory must come back. Returns bytes that the device has less than before."""
    assert not world.mailbox
    world.runner.close()
    for worker in workers:
        worker.spare_graphs.clear()
    world.device.finish_all()
    gc.collect()
    pools = (world.main, world.limited)
    end = time.monotonic() + 10  # the driver reports the end of a graph from a thread of its own
    while time.monotonic() < end:
        OutputPool().close()  # any close takes back what closed pools have left
        if not process.retired and not any(pool.stats().pinned_slots for pool in pools):
            break
        time.sleep(0.02)
    for pool in pools:
        pool.trim()
        stats = pool.stats()
        assert (stats.live_slots, stats.pinned_slots, stats.mapped_bytes) == (0, 0, 0), stats.report()
        pool.close()
    assert not process.retired, f"closed pools: expected no slot left, got {len(process.retired)}"
    world.device.empty_cache()
    kept = max(free_before - world.device.free_bytes(), 0)
    assert kept <= KEPT_BYTES, f"device: expected all but {KEPT_BYTES} bytes back, got {kept} bytes less"
    return kept


def main(argv: Sequence[str] | None = None, make_pool: Callable[..., Any] = OutputPool) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=180)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=4)
    parser.add_argument("--no-gate", action="store_true", help="captures may begin while another thread is inside the pool")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args(argv)
    # A deadlock must not outlast whoever waits for this.
    faulthandler.dump_traceback_later(args.seconds + 120, exit=True)
    device = torch.empty(0, device=args.device).device
    if device.type == "cpu":
        torch.set_num_threads(1)
    sys.setswitchinterval(1e-4)
    logging.getLogger("bufpool").setLevel(logging.ERROR)  # spills are counted
    world = World(
        args.seed,
        Cuda(device) if device.type == "cuda" else Cpu(device),
        make_pool,
        args.threads,
        args.seconds,
        Gate(is_open=args.no_gate),
        Pause(args.threads),
    )
    figures = soak(world)
    print(json.dumps(figures) if args.json else table(figures))
    faulthandler.cancel_dump_traceback_later()
    return 1 if figures["failures"] else 0


def table(figures: dict[str, Any]) -> str:
    lines = []
    for key, value in figures.items():
        if isinstance(value, dict):
            lines += [f"{key}:", *(f"  {name:<32}{count:>12}" for name, count in value.items())]
        elif isinstance(value, list):
            lines += [f"{key}: {len(value)}", *(f"  {name}: {item}" for entry in value for name, item in entry.items())]
        else:
            lines.append(f"{key:<34}{value:>12}")
    return "\n".join(lines)


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    if code:
        os._exit(code)  # after an error of CUDA the interpreter could not end in order
    sys.exit(code)

"""Replays of a kernel wrapper captured at a few row counts, for calls of any row count.

Note [Results of a replay]
    Rationale: a graph writes where it wrote when it was captured. The graphs of all buckets shall share one set of slots,
    so no bucket may hold its results while the next one is captured: held results are never shared away.
    Approach: after a capture only the places of its results are kept (address, shape, strides), and the tensors are
    dropped. What a call returns are views of tensors made over those places; the storage of each keeps the graph, and
    with it the memory.
    Facts relied on: a slot stays pinned, mapped and at its address as long as a graph contains it; memory of a graph's
    private pool in torch stays as long as the graph; ``torch.as_tensor`` keeps the object that showed it memory.

Concurrency:
    A runner may be called from any thread and on any stream: one call at a time, and a call on another stream than the
    last one waits on the device for all that was queued there. Replays of all runners of one pool and name come one behind
    the other in the same way. Since the next call overwrites the results of the last one, threads that share a runner use
    ``fresh=True``. Do not call a runner from a finalizer. The first call of a runner captures, and torch captures one graph
    at a time: first calls take turns, bucket by bucket, and hold their runner's lock while they wait. So ``fn`` must not
    wait for a thread that makes one, nor for a lock that such a thread holds.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from . import driver, process
from .allocator import FreshAllocator, Like, home_device
from .device import present_device
from .errors import BufpoolError, CaptureError, DeviceMismatchError, OutputMismatchError
from .pool import OutputPool, default_pool
from .spec import OutputSpec, row_count
from .torch_state import (
    PER_THREAD_STREAM,
    has_no_memory,
    is_capturing_on,
    is_tracing,
    normal_mode,
    raw_stream,
    tracing_mode,
)

__all__ = ["BucketStats", "GraphRunner", "RunnerStats"]

_logger = logging.getLogger("bufpool")
_fresh = FreshAllocator()
_numbers = itertools.count(1)
_RESERVED_NAMES = ("allocator", "fresh")


@dataclass(frozen=True)
class BucketStats:
    """One bucket. Times are host times in microseconds.

    Attributes:
        rows: rows of its graph.
        replays: calls that it served.
        active_rows: rows of those calls, in sum.
        padded_rows: rows computed for nobody, in sum.
        capture_us: warm-up and capture.
        host_us: its calls, in sum: checks, copies of the inputs, launch.
    """

    rows: int
    replays: int
    active_rows: int
    padded_rows: int
    capture_us: float
    host_us: float


@dataclass(frozen=True)
class RunnerStats:
    """What a runner did.

    Attributes:
        calls: calls that returned.
        replays: those served by a graph.
        eager_calls: those that ran ``fn`` itself: no rows, more rows than the largest bucket, or no CUDA.
        copies: replays whose results were copied for ``fresh=True``.
        eager_us: host time of the eager calls, in microseconds, in sum.
        buckets: one entry for each captured bucket, smallest first.
    """

    calls: int
    replays: int
    eager_calls: int
    copies: int
    eager_us: float
    buckets: tuple[BucketStats, ...] = field(default=())


class GraphRunner:
    """Calls ``fn`` by replaying a CUDA graph of the smallest bucket that fits.

    ``fn(**inputs, allocator=pool)`` is captured once for each bucket, largest first, in one shared capture of the pool: all
    buckets write into the same slots, which are as large as the largest bucket needs. A call copies its rows into static
    inputs, replays, and returns the active rows of the results. Calls with more rows than the largest bucket run ``fn``
    eagerly, and so do all calls on a device without CUDA graphs, such as the CPU; a call that torch.compile traces, or one
    on fake or meta tensors, is ``fn`` itself.

    What ``fn`` must be:

    * A function of its inputs row by row: result row i may depend on row i of each input only. Rows behind the active
      ones are computed and dropped; ``fn`` must tolerate what stands there (see ``pad``).
    * Made of work on the device alone: no reads on the host, no synchronisation, no branches on values.
    * Everything that is not an input by rows (weights, kv, scales) is bound to it, with ``functools.partial`` or a closure.
      Such a tensor is read at its address at every replay: update it in place, and keep it alive as long as the runner.

    Args:
        fn: the kernel wrapper. It returns a tensor or a (named) tuple of tensors, rows first.
        inputs: the inputs by rows: names, row shapes and dtypes.
        buckets: numbers of rows to capture, in any order.
        pool: whose memory the results live in; None means ``bufpool.default_pool()``.
        pad: what rows behind the active ones hold, for some inputs by name: a number, such as -1 for indices. The rows
            of inputs without an entry hold zeros at first, then what earlier calls left there.
        name: name of the shared capture. Runners of one pool with the same name share their slots: then the next call of
            any of them overwrites a result. None gives each runner a set of its own.
        private: capture each bucket into slots of its own, not into a shared set. A result then lasts until the next call
            of its bucket; the memory of all buckets adds up.
        warmups: how often ``fn`` runs at a bucket's size before its capture, on a side stream and on memory of torch.

    Raises:
        TypeError, ValueError: an argument of the wrong kind.

    Example:
        >>> import torch, bufpool
        >>> from bufpool.graphs import GraphRunner
        >>> spec = bufpool.OutputSpec(y=((4,), torch.float32))
        >>> def double(x, allocator):
        ...     y, = allocator.acquire(spec, x.shape[0], x)
        ...     return torch.mul(x, 2, out=y)
        >>> with GraphRunner(double, bufpool.OutputSpec(x=((4,), torch.float32)), [1, 2, 4, 8]) as run:
        ...     tuple(run(x=torch.ones(3, 4)).shape)  # on CUDA: a replay of the graph of 4 rows
        (3, 4)
    """

    def __init__(
        self,
        fn: Callable[..., Any],
        inputs: OutputSpec,
        buckets: Iterable[int],
        *,
        pool: OutputPool | None = None,
        pad: Mapping[str, float] | None = None,
        name: str | None = None,
        private: bool = False,
        warmups: int = 1,
    ) -> None:
        if not callable(fn):
            raise TypeError(f"fn: expected a function fn(**inputs, allocator=...), got {fn!r}")
        if not isinstance(inputs, OutputSpec):
            raise TypeError(f"inputs: expected an OutputSpec, got {inputs!r}")
        for reserved in _RESERVED_NAMES:
            if reserved in inputs.names:
                raise ValueError(f"inputs: expected names other than {', '.join(_RESERVED_NAMES)}, got {reserved}")
        if pool is not None and not isinstance(pool, OutputPool):
            raise TypeError(f"pool: expected an OutputPool, got {pool!r}")
        if name is not None and not isinstance(name, str):
            raise TypeError(f"name: expected a string, got {name!r}")
        self._fn = fn
        self._inputs = inputs
        self._sizes = _bucket_sizes(buckets)
        self._pool = default_pool() if pool is None else pool
        self._pad = _pad_values(inputs, pad or {})
        self._name = None if private else name or f"graph runner {next(_numbers)}"
        self._warmups = row_count(warmups)
        self._set = _slot_set(self._pool, self._name)
        self._lock = threading.RLock()
        self._is_busy = False
        self._is_closed = False
        self._home: torch.device | None = None
        self._static: dict[str, torch.Tensor] = {}
        self._buckets: list[_Bucket] = []  # smallest first; empty until captured
        self._dirty_rows = 0  # static rows from here on hold the pad values
        self._stream: Any = None  # of this runner's last call
        self._replays_copied = 0
        self._eager_calls = 0
        self._eager_us = 0.0

    @property
    def buckets(self) -> tuple[int, ...]:
        """Numbers of rows that are, or will be, captured, smallest first."""
        return self._sizes

    def capture(self, like: Like | torch.device | str) -> None:
        """Capture all buckets now, largest first; the first call does it otherwise. Does nothing the second time.

        The device is synchronised, so no other capture may be under way in the process. Runners take turns.

        Args:
            like: where the inputs will live: a tensor, several, or a device. Without CUDA nothing is captured.

        Raises:
            DeviceMismatchError: the runner serves another device already.
            CaptureError: the current stream captures.
            PoolLimitError: no memory. Nothing stays captured after an error, whichever it is.
            OutputMismatchError, TypeError: ``fn`` returned something else than tensors with the rows of its inputs.
            ValueError: ``like`` is a device that is not here.
        """
        device = present_device("like", like) if isinstance(like, (str, torch.device)) else home_device(like)
        self._refuse_capture(device)
        with self._entered(), torch.no_grad():
            self._settle(device, "like")

    def __call__(self, /, *, fresh: bool = False, **inputs: torch.Tensor) -> Any:
        """Run ``fn`` on the inputs, by a replay where a bucket is large enough.

        Args:
            fresh: copy the results into slots of the pool that are the caller's own. Otherwise they are valid until
                the next call of this runner (and of all others with its ``name``).
            **inputs: all inputs by name, ``[rows, *row_shape]``, any strides, on one device. They are copied: they may be
                changed right after.

        Returns:
            What ``fn`` returns, cut to the rows of the inputs. The memory stays mapped as long as a result is held, also
            after ``close()``. No gradient flows.

        Raises:
            TypeError: an input is missing, unknown, or not a tensor.
            OutputMismatchError: the wrong dtype or shape, or not as many rows as the first input.
            DeviceMismatchError: on another device than the first input, or than the runner's calls before.
            CaptureError: the current stream captures, or by now the stream of the runner's last call.
            BufpoolError: the runner is closed, calls itself, or its pool sleeps.
        """
        if is_tracing():  # the compiler owns memory, and sees fn itself
            return self._fn(**inputs, allocator=self._pool)
        start = time.perf_counter()
        rows, device = self._check(inputs)
        if tracing_mode() or has_no_memory(inputs):
            return self._fn(**inputs, allocator=self._pool)
        self._refuse_capture(device)
        with self._entered(), torch.no_grad():
            self._settle(device, self._inputs.names[0])
            bucket = next((bucket for bucket in self._buckets if bucket.rows >= rows), None) if rows else None
            if bucket is None:
                result = self._fn(**inputs, allocator=self._pool)
                self._eager_calls += 1
                self._eager_us += 1e6 * (time.perf_counter() - start)
                return result
            with self._set.lock, self._pool._kept_awake("runner"):
                self._order()
                self._fill(inputs, rows)
                bucket.graph.replay()
                views = [tensor[:rows] for tensor in bucket.results]
                if fresh:
                    views = self._copied(bucket, views, rows)
            result = bucket.rebuild(views)
            bucket.replays += 1
            bucket.active_rows += rows
            bucket.host_us += 1e6 * (time.perf_counter() - start)
            return result

    def stats(self) -> RunnerStats:
        """What the runner did so far."""
        with self._lock:
            buckets = tuple(bucket.stats() for bucket in self._buckets)
            replays = sum(bucket.replays for bucket in buckets)
            return RunnerStats(
                calls=replays + self._eager_calls,
                replays=replays,
                eager_calls=self._eager_calls,
                copies=self._replays_copied,
                eager_us=self._eager_us,
                buckets=buckets,
            )

    def close(self) -> None:
        """Drop the graphs and the static inputs; calls raise from now on. Closing twice is allowed.

        The slots are free for others when the last result that somebody holds is gone.
        """
        with self._entered():
            self._is_closed = True
            self._buckets = []
            self._static = {}
            self._stream = None

    def __enter__(self) -> GraphRunner:  # noqa: PYI034
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    # One call

    @staticmethod
    def _refuse_capture(device: torch.device) -> None:
        """Without the runner's lock: its holder may wait for the capture to end (``process.capture_turn``)."""
        if _can_capture(device) and is_capturing_on(device):
            raise CaptureError(f"runner: expected no graph capture on {device}, got one under way")

    @contextlib.contextmanager
    def _entered(self) -> Iterator[None]:
        with self._lock:
            if self._is_busy:
                raise BufpoolError("runner: expected no call from inside another one, got one")
            self._is_busy = True
            try:
                yield
            finally:
                self._is_busy = False

    def _check(self, inputs: Mapping[str, Any]) -> tuple[int, torch.device]:
        """Rows and device of the inputs, if they are what the runner was made for."""
        spec = self._inputs
        if len(inputs) != len(spec) or any(name not in inputs for name in spec.names):
            missing = [name for name in spec.names if name not in inputs]
            unknown = [name for name in inputs if name not in spec.names]
            got = " and ".join(
                [
                    *(["no " + ", ".join(missing)] if missing else []),
                    *(["unknown " + ", ".join(unknown)] if unknown else []),
                ]
            )
            raise TypeError(f"inputs: expected {', '.join(spec.names)}, got {got}")
        rows = -1
        device = None
        first = spec.names[0]
        for name, shape, dtype in spec:
            tensor = inputs[name]
            if not isinstance(tensor, torch.Tensor):
                raise TypeError(f"{name}: expected a tensor, got {type(tensor).__name__}")
            if tensor.dtype is not dtype:
                raise OutputMismatchError(f"{name}: expected dtype {dtype}, got {tensor.dtype}")
            if tensor.layout is not torch.strided:
                raise OutputMismatchError(f"{name}: expected a dense tensor, got layout {tensor.layout}")
            if tensor.dim() != 1 + len(shape) or tuple(tensor.shape[1:]) != shape:
                sizes = ", ".join(map(str, ("rows" if rows < 0 else rows, *shape)))
                raise OutputMismatchError(f"{name}: expected shape [{sizes}], got {list(tensor.shape)}")
            if device is None:
                rows, device = tensor.shape[0], tensor.device
            elif tensor.shape[0] != rows:
                raise OutputMismatchError(f"{name}: expected {rows} rows as in {first}, got {tensor.shape[0]}")
            if tensor.device != device:
                raise DeviceMismatchError(
                    f"{name} must be on device {device}, got {tensor.device} ({first} is on {device})"
                )
        assert device is not None
        return rows, device

    def _settle(self, device: torch.device, name: str) -> None:
        """Make sure that a call on this device may run now, and that its graphs are there."""
        if self._is_closed:
            raise BufpoolError("runner: expected an open runner, got a closed one")
        if self._home is not None and device != self._home:
            raise DeviceMismatchError(f"{name} must be on device {self._home}, got {device} (of the calls before)")
        if _can_capture(device):
            if self._pool.is_asleep:
                raise BufpoolError("runner: expected a pool that is awake, got one that sleeps; call wake()")
            if not self._buckets:
                self._capture_all(device)
        elif self._home is None:
            _logger.info("graph runner: %s has no CUDA graphs: every call runs eagerly", device)
        self._home = device

    def _order(self) -> None:
        """Let the current stream wait for the last call and what was queued behind it, if that was another stream."""
        assert self._home is not None
        if self._home.type != "cuda":
            return
        handle = raw_stream(self._home.index)
        if handle == PER_THREAD_STREAM:
            raise BufpoolError("runner: expected a stream that is the same in all threads, got the per-thread default one")
        last = self._set.streams.get(self._home.index)
        if last is None or last.cuda_stream != handle:
            current = torch.cuda.current_stream(self._home)
            if last is not None:
                if _is_stream_capturing(last):
                    raise CaptureError(
                        "runner: expected no graph capture on the stream of its last call, got one under way"
                    )
                current.wait_stream(last)
            self._set.streams[self._home.index] = current
        if self._stream is None or self._stream.cuda_stream != handle:
            current = torch.cuda.current_stream(self._home)
            for static in self._static.values():
                static.record_stream(current)  # memory of torch: after close() it is reused only behind this stream's work
            self._stream = current

    def _fill(self, inputs: Mapping[str, torch.Tensor], rows: int) -> None:
        """Copy the active rows into the static inputs; behind them, put the pad values where other rows stood."""
        dirty_rows, self._dirty_rows = self._dirty_rows, max(self._dirty_rows, rows)
        for name, static in self._static.items():
            static[:rows].copy_(inputs[name])
        if rows < dirty_rows:
            for name, number in self._pad.items():
                self._static[name][rows:dirty_rows].fill_(number)
            self._dirty_rows = rows

    def _copied(self, bucket: _Bucket, views: list[torch.Tensor], rows: int) -> list[torch.Tensor]:
        if bucket.spec is None:
            bucket.spec = OutputSpec(
                **{f"result_{place}": (tuple(view.shape[1:]), view.dtype) for place, view in enumerate(views)}
            )
        copies = list(self._pool.acquire(bucket.spec, rows, views[0]))
        for copy, view in zip(copies, views, strict=True):
            copy.copy_(view)
        self._replays_copied += 1
        return copies

    # Captures

    def _capture_all(self, device: torch.device) -> None:
        """Capture every bucket, largest first; all or nothing."""
        largest = self._sizes[-1]
        with normal_mode(False):
            static = {
                name: torch.full((largest, *shape), 0, dtype=dtype, device=device) for name, shape, dtype in self._inputs
            }
            for name, number in self._pad.items():
                static[name].fill_(number)
            memory, stream = _memory_handle(), _capture_stream(device)
            buckets: list[_Bucket] = []
            for rows in reversed(self._sizes):
                start = time.perf_counter()
                views = {name: tensor[:rows] for name, tensor in static.items()}

                def body(allocator: Any, views: dict[str, torch.Tensor] = views) -> Any:
                    return self._fn(**views, allocator=allocator)

                scope = contextlib.nullcontext() if self._name is None else self._pool.shared_capture(self._name)
                _warm_up(body, device, self._warmups, stream)
                with process.capture_turn, scope:
                    graph, result = _capture(body, device, self._pool, memory, stream)
                layout = _layout(result, rows, device)
                # Dropped before the next capture (Note [Results of a replay]).
                del result
                keeper = (graph, static, self._set)
                bucket = _Bucket(rows, graph, layout.rebuild, [_over(place, device, keeper) for place in layout.places])
                bucket.capture_us = 1e6 * (time.perf_counter() - start)
                buckets.append(bucket)
        self._static = static
        self._dirty_rows = 0
        self._buckets = buckets[::-1]
        _logger.info(
            "graph runner: captured %d buckets up to %d rows on %s in %.1f ms",
            len(buckets),
            largest,
            device,
            sum(bucket.capture_us for bucket in buckets) / 1e3,
        )


class _SlotSet:
    """What the runners that share a set of slots have in common: one replay at a time, behind the last one."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.streams: dict[int, Any] = {}
        """By device: the stream of the last call."""


_sets: weakref.WeakKeyDictionary[OutputPool, weakref.WeakValueDictionary[str, _SlotSet]] = weakref.WeakKeyDictionary()


def _slot_set(pool: OutputPool, name: str | None) -> _SlotSet:
    """The set of runners of this name; it lasts as long as one of them, or a result. Without a name a new one."""
    if name is None:
        return _SlotSet()
    with process.lock:
        return _sets.setdefault(pool, weakref.WeakValueDictionary()).setdefault(name, _SlotSet())


class _Bucket:
    """The graph of one number of rows, and tensors over what it writes."""

    def __init__(
        self, rows: int, graph: Any, rebuild: Callable[[list[torch.Tensor]], Any], results: list[torch.Tensor]
    ) -> None:
        self.rows = rows
        self.graph = graph
        self.rebuild = rebuild
        self.results = results
        self.spec: OutputSpec | None = None
        """Of copies of the results."""
        self.replays = 0
        self.active_rows = 0
        self.capture_us = 0.0
        self.host_us = 0.0

    def stats(self) -> BucketStats:
        padded_rows = self.replays * self.rows - self.active_rows
        return BucketStats(self.rows, self.replays, self.active_rows, padded_rows, self.capture_us, self.host_us)


@dataclass(frozen=True)
class _Place:
    """Where a tensor lies."""

    address: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        """From the first byte to the last, as the strides reach; 0 without elements."""
        if 0 in self.shape:
            return 0
        last = sum((size - 1) * stride for size, stride in zip(self.shape, self.strides, strict=True))
        return (last + 1) * self.dtype.itemsize


@dataclass(frozen=True)
class _Layout:
    """The places of what ``fn`` returned, and how to make the same kind of thing from other tensors."""

    places: tuple[_Place, ...]
    rebuild: Callable[[list[torch.Tensor]], Any]


def _layout(result: Any, rows: int, device: torch.device) -> _Layout:
    rebuild: Callable[[list[torch.Tensor]], Any]
    if isinstance(result, torch.Tensor):
        tensors, rebuild = [result], _only
    elif isinstance(result, tuple) and result:
        tensors = list(result)
        rebuild = getattr(type(result), "_make", tuple)
    else:
        raise TypeError(f"fn: expected it to return a tensor or a tuple of tensors, got {type(result).__name__}")
    places = []
    for number, tensor in enumerate(tensors):
        if not isinstance(tensor, torch.Tensor):
            raise TypeError(f"fn: expected a tensor as result {number}, got {type(tensor).__name__}")
        if tensor.device != device:
            raise DeviceMismatchError(f"result {number} of fn must be on device {device}, got {tensor.device}")
        if tensor.layout is not torch.strided or tensor.dim() == 0 or tensor.shape[0] != rows:
            raise OutputMismatchError(f"fn: expected result {number} with {rows} rows first, got {list(tensor.shape)}")
        places.append(_Place(tensor.data_ptr(), tuple(tensor.shape), tensor.stride(), tensor.dtype))
    return _Layout(tuple(places), rebuild)


def _only(tensors: list[torch.Tensor]) -> torch.Tensor:
    return tensors[0]


class _Memory:
    """Bytes of a CUDA device, and who keeps them alive."""

    def __init__(self, address: int, nbytes: int, keeper: object) -> None:
        self.keeper = keeper
        self.__cuda_array_interface__ = {"shape": (nbytes,), "typestr": "|u1", "data": (address, False), "version": 2}


def _over(place: _Place, device: torch.device, keeper: object) -> torch.Tensor:
    """A tensor over a place; its storage keeps ``keeper``."""
    tensor = torch.empty(0, dtype=place.dtype, device=device)
    if place.nbytes == 0:
        return tensor.new_empty(place.shape)
    storage = torch.as_tensor(_Memory(place.address, place.nbytes, keeper), device=device).untyped_storage()
    return tensor.set_(storage, 0, place.shape, place.strides)


# What only CUDA can do


def _can_capture(device: torch.device) -> bool:
    return device.type == "cuda"


def _is_stream_capturing(stream: Any) -> bool:
    """Whether a stream captures, from whatever thread: to wait for it would break the capture, or join it."""
    return stream.cuda_stream != 0 and driver.is_available() and driver.is_capturing(stream.cuda_stream)


def _memory_handle() -> Any:
    """What the graphs of one runner share for memory that ``fn`` takes from torch."""
    return torch.cuda.graph_pool_handle()


def _capture_stream(device: torch.device) -> Any:
    """One stream for all captures of a runner: torch has only 32 of a priority, which others use too."""
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]


def _warm_up(body: Callable[[Any], Any], device: torch.device, warmups: int, stream: Any) -> None:
    """Run ``body`` on memory of torch, on ``stream``, and wait until it is done.

    Threads may meet in here, each with the share of its device in a collective: nobody waits, in his turn to capture, for
    what another one is still to launch. A stream is waited for and not the device, which would break captures.
    """
    with torch.cuda.device(device):
        former = torch.cuda.current_stream(device)
        stream.wait_stream(former)
        with torch.cuda.stream(stream):
            for _ in range(warmups):
                body(_fresh)
        former.wait_stream(stream)
        stream.synchronize()


def _capture(
    body: Callable[[Any], Any], device: torch.device, pool: OutputPool, memory: Any, stream: Any
) -> tuple[Any, Any]:
    """A graph of ``body(pool)``, captured on ``stream``, and what it returned."""
    with torch.cuda.device(device):
        former = torch.cuda.current_stream(device)
        graph = torch.cuda.CUDAGraph()
        try:
            # Other threads may go on calling CUDA: this mode only watches the calls of this one.
            with torch.cuda.graph(graph, pool=memory, stream=stream, capture_error_mode="thread_local"):
                result = body(pool)
        finally:
            torch.cuda.set_stream(former)  # torch leaves the side stream current if the capture breaks
        return graph, result


# Arguments


def _bucket_sizes(buckets: Any) -> tuple[int, ...]:
    try:
        sizes = list(buckets)
    except TypeError:
        raise TypeError(f"buckets: expected several integers >= 1, got {buckets!r}") from None
    for size in sizes:
        if isinstance(size, (bool, torch.Tensor)) or not hasattr(size, "__index__"):
            raise TypeError(f"buckets: expected integers >= 1, got {size!r}")
        if size < 1:
            raise ValueError(f"buckets: expected integers >= 1, got {size}")
    if not sizes:
        raise ValueError("buckets: expected at least one integer >= 1, got none")
    return tuple(sorted({int(size) for size in sizes}))


def _pad_values(inputs: OutputSpec, pad: Any) -> dict[str, float]:
    if not isinstance(pad, Mapping):
        raise TypeError(f"pad: expected a number for some of the inputs by name, got {pad!r}")
    for name, number in pad.items():
        if name not in inputs.names:
            raise ValueError(f"pad: expected names among {', '.join(inputs.names)}, got {name}")
        if not isinstance(number, (bool, int, float)):
            raise TypeError(f"pad: expected a number for {name}, got {number!r}")
    return dict(pad)

"""A stand-in for vLLM's workspace manager, on the pool.

Note [What stays valid]
    Rationale: there, all views are of one buffer, so a call overwrites what an earlier one handed out, and a buffer that
    grows is another buffer: graphs and callers with the old address write to freed memory. Hence its lock.
    Approach: a workspace is a result of the pool: one uint8 tensor with a row for every 256 bytes. Each (ubatch, lane) has
    a spec of its own, so two of them never share memory, whatever their streams. Then the pool's promises hold:

    * Views stay valid as long as anybody holds one of them: at least until the next call on the same (ubatch, lane), and
      longer if they are kept.
    * While nobody holds views of an earlier call, a (ubatch, lane) has the same address on a stream at every call, also
      when it grows: more memory is mapped behind it, nothing is copied or freed.
    * A graph keeps the workspace it was captured with, mapped and at its address, as long as it lives. The graphs of one
      manager share it, as graphs that are replayed in turn may: contents do not outlive a replay. Eager calls never use it.

    So growth is legal at any time, also after ``lock()`` and inside a capture.
    Limits: with an arena of kind ``torch`` (``stats()`` says so) growth moves, and is refused inside a capture. If another
    stream still reads when the last view is dropped, say so with ``pool.record_stream``.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from math import prod
from typing import Any

import torch

from ..device import parse_device
from ..errors import BufpoolError, CaptureError, OutputMismatchError
from ..pool import OutputPool, default_pool
from ..spec import OutputSpec
from ..torch_state import is_capturing_on

__all__ = ["WorkspaceManager", "use_workspace_lane"]

_logger = logging.getLogger("bufpool")

_ROW_BYTES = 256
"""One row of a workspace; views start at multiples."""

_managers = itertools.count()

_lane: ContextVar[int] = ContextVar("bufpool_workspace_lane", default=0)

ShapeAndDtype = tuple[tuple[int, ...], torch.dtype]


@contextlib.contextmanager
def use_workspace_lane(lane: int) -> Iterator[None]:
    """Let calls inside, in this context, use workspaces of their own.

    Args:
        lane: number of vLLM's lane, from 0 to below ``num_lanes`` of the manager; 0 outside. Not a lane of the pool.

    Raises:
        ValueError: below 0.
    """
    if lane < 0:
        raise ValueError(f"lane: expected an integer >= 0, got {lane}")
    token = _lane.set(lane)
    try:
        yield
    finally:
        _lane.reset(token)


class WorkspaceManager:
    """Scratch memory for each (ubatch, lane).

    Args:
        device: where; ``cuda`` without an index means the current device at the first call.
        num_ubatches: how many microbatches run at the same time; None means 1.
        num_lanes: independent workspaces of each.
        alloc_context: makes the context in which persistent buffers are allocated.
        pool: gives the workspaces; None means ``bufpool.default_pool()``.
        current_ubatch: says which microbatch calls (``dbo_current_ubatch_id`` there); None means always the first.

    Raises:
        ValueError: a number below 1.

    Concurrency:
        As there: calls of one (ubatch, lane) come one after the other. Others may come at the same time.
    """

    def __init__(
        self,
        device: torch.device | str,
        num_ubatches: int | None = None,
        num_lanes: int = 1,
        alloc_context: Callable[[], contextlib.AbstractContextManager[Any]] = contextlib.nullcontext,
        *,
        pool: OutputPool | None = None,
        current_ubatch: Callable[[], int] | None = None,
    ) -> None:
        num_ubatches = 1 if num_ubatches is None else num_ubatches
        for name, number in (("num_ubatches", num_ubatches), ("num_lanes", num_lanes)):
            if number < 1:
                raise ValueError(f"{name}: expected an integer >= 1, got {number}")
        self._device = parse_device("device", device)
        self._num_ubatches = num_ubatches
        self._num_lanes = num_lanes
        self._alloc_context = alloc_context
        self._pool = pool
        self._current_ubatch = current_ubatch
        self._is_locked = False
        self._shared = f"bufpool.adapters.vllm {next(_managers)}"
        self._like: torch.Tensor | None = None
        self._specs = {
            (ubatch, lane): OutputSpec(**{f"workspace_{ubatch}_{lane}": ((_ROW_BYTES,), torch.uint8)})
            for ubatch in range(num_ubatches)
            for lane in range(num_lanes)
        }
        self._rows = dict.fromkeys(self._specs, 0)  # most that were asked for
        self._persistent: dict[tuple[int, int, str], torch.Tensor] = {}

    def get_simultaneous(self, *shapes_and_dtypes: ShapeAndDtype) -> list[torch.Tensor]:
        """Scratch tensors with undefined contents, which do not overlap one another.

        Args:
            *shapes_and_dtypes: ``(shape, dtype)`` of each.

        Returns:
            Contiguous tensors, each starting at a multiple of 256 bytes; how long they are valid: Note [What stays valid].

        Raises:
            BufpoolError: the current ubatch or lane is not one of this manager's.
            PoolLimitError: no memory.
        """
        place = self._place()
        rows = [_rows(shape, dtype) for shape, dtype in shapes_and_dtypes]
        total = sum(rows)
        memory = self._acquire(place, total).view(-1)
        if total > self._rows[place]:
            self._note_growth(place, total)
        views: list[torch.Tensor] = []
        start = 0
        for (shape, dtype), count in zip(shapes_and_dtypes, rows, strict=True):
            views.append(memory[start : start + prod(shape) * dtype.itemsize].view(dtype).view(shape))
            start += count * _ROW_BYTES
        return views

    def reserve_all(self, *shapes_and_dtypes: ShapeAndDtype) -> None:
        """Map memory for these in every (ubatch, lane), before the engine measures what is left for its kv cache.

        Raises:
            PoolLimitError: no memory.
        """
        total = sum(_rows(shape, dtype) for shape, dtype in shapes_and_dtypes)
        for place, spec in self._specs.items():
            self._the_pool().reserve(spec, total, self._the_like())
            self._rows[place] = max(self._rows[place], total)

    def get_persistent(
        self, key: str, shape: tuple[int, ...], dtype: torch.dtype, *, zero_init: bool = False
    ) -> torch.Tensor:
        """The same tensor at every call with ``key`` on the same (ubatch, lane); it keeps its contents.

        What keeps its contents is not pool memory: it comes from torch, inside ``alloc_context()``, and stays as long as
        the manager. It does not grow, since whoever knows its address would not learn of it.

        Args:
            key: names it.
            shape, dtype: the same at every call.
            zero_init: whether the first call fills it with zeros.

        Raises:
            OutputMismatchError: an earlier call with this key had another shape or dtype.
            CaptureError: it would have to be allocated inside a capture.
            BufpoolError: the current ubatch or lane is not one of this manager's.
        """
        place = self._place()
        buffer = self._persistent.get((*place, key))
        if buffer is None:
            if self._is_capturing():
                raise CaptureError(f"{key}: expected its first call before the capture, got it inside")
            make = torch.zeros if zero_init else torch.empty
            with self._alloc_context():
                buffer = make(tuple(shape), dtype=dtype, device=self._the_like().device)
            buffer = self._persistent.setdefault((*place, key), buffer)
        if buffer.dtype is not dtype or buffer.shape != tuple(shape):
            raise OutputMismatchError(
                f"{key}: expected {buffer.dtype} {list(buffer.shape)} as at the first call, got {dtype} {list(shape)}"
            )
        return buffer

    def lock(self) -> None:
        """Note that the engine has measured its memory: growth from now on is legal, and logged as a warning."""
        self._is_locked = True

    def unlock(self) -> None:
        """Undo ``lock``."""
        self._is_locked = False

    def is_locked(self) -> bool:
        """Whether ``lock`` is in force."""
        return self._is_locked

    def _place(self) -> tuple[int, int]:
        place = (0 if self._current_ubatch is None else self._current_ubatch()), _lane.get()
        if place not in self._specs:
            raise BufpoolError(
                f"workspace: expected a ubatch below {self._num_ubatches} and a lane below {self._num_lanes},"
                f" got ubatch {place[0]}, lane {place[1]}"
            )
        return place

    def _note_growth(self, place: tuple[int, int], rows: int) -> None:
        if self._is_locked:
            _logger.warning(
                "%s: workspace of ubatch %d, lane %d grew from %d to %d bytes after lock(); its address stays, and the"
                " memory was not there when the engine measured",
                self._device,
                *place,
                self._rows[place] * _ROW_BYTES,
                rows * _ROW_BYTES,
            )
        self._rows[place] = rows

    def _acquire(self, place: tuple[int, int], rows: int) -> torch.Tensor:
        pool, like = self._the_pool(), self._the_like()
        if like.is_cuda:
            with pool.shared_capture(self._shared):  # of no effect outside captures
                (memory,) = pool.acquire(self._specs[place], rows, like)
        else:
            (memory,) = pool.acquire(self._specs[place], rows, like)
        return memory  # type: ignore[no-any-return]

    def _the_pool(self) -> OutputPool:
        return default_pool() if self._pool is None else self._pool

    def _the_like(self) -> torch.Tensor:
        if self._like is None:
            self._like = torch.empty(0, device=self._device)
        return self._like

    def _is_capturing(self) -> bool:
        like = self._the_like()
        return like.is_cuda and is_capturing_on(like.device)


def _rows(shape: tuple[int, ...], dtype: torch.dtype) -> int:
    return -(-prod(shape) * dtype.itemsize // _ROW_BYTES)

"""Pins: what keeps a slot with a CUDA graph, for exactly as long as the graph lives.

The graph itself tells. A user object that it retains posts into a record when the graph and everything made from it are
gone. The post is ``sem_post``: it runs on a thread of the driver, which may call neither Python nor CUDA.
"""

from __future__ import annotations

import ctypes
from typing import Any

from . import host_memory
from .driver import retain_in_graph
from .errors import DriverError

__all__ = ["Pin"]


class Pin:
    """One graph that contains the addresses of a slot."""

    __slots__ = ("_count", "_record", "capture_id")

    def __init__(self, capture_id: int, graph: Any) -> None:
        self.capture_id = capture_id
        self._record = 0
        self._count: ctypes.c_uint32 | None = None
        post = host_memory.post_address()
        if post is None:
            return
        record = host_memory.allocate(32)  # bytes; a semaphore whose count is 0
        try:
            retain_in_graph(graph, record, post)
        except DriverError:
            return  # the record stays: the driver may still post into it
        self._record = record
        self._count = ctypes.c_uint32.from_address(record)

    @property
    def is_tracked(self) -> bool:
        """Whether the end of the graph will be seen; if not, the pin lasts until the pool is closed."""
        return self._count is not None

    def has_ended(self) -> bool:
        """Whether the graph and everything made from it are gone."""
        return self._count is not None and self._count.value != 0

    def release(self) -> None:
        """End the record of a pin that has ended."""
        if self._record:
            self._count = None
            host_memory.free(self._record)
            self._record = 0

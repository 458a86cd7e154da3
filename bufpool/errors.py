"""Errors, by what the caller can do about them.

Every message has the form ``<argument or device>: expected <rule>, got <value>``; every memory error holds
its figures in bytes. A call that raises one of these has changed nothing that anybody holds; looking for memory in vain, it
may have unmapped idle slots, dropped idle lanes and emptied torch's cache.
"""

from __future__ import annotations

__all__ = [
    "BufpoolError",
    "CaptureError",
    "CompileError",
    "DeviceMismatchError",
    "DriverError",
    "OutputMismatchError",
    "PoolLimitError",
    "WriteContractError",
]


class BufpoolError(Exception):
    """Root of everything that bufpool raises on purpose."""


class OutputMismatchError(BufpoolError, ValueError):
    """A tensor has another shape, dtype, device or layout than the call needs, or shares memory. Pass the right one."""


class DeviceMismatchError(OutputMismatchError):
    """Two tensors of one call live on different devices. Move one of them.

    The text holds ``<name> must be on device <device>, got <other device>``.
    """


class PoolLimitError(BufpoolError, MemoryError):
    """The request does not fit. Drop results, ask for fewer rows, or raise the limit.

    Attributes:
        need: bytes that the call would add.
        have: bytes that are taken already.
        limit: bytes that are allowed in all.
    """

    def __init__(self, what: str, *, need: int, have: int, limit: int) -> None:
        super().__init__(f"{what}: expected at most {limit} bytes, got {have} bytes and a need of {need} more")
        self.what = what
        self.need = need
        self.have = have
        self.limit = limit

    def __reduce__(self) -> tuple[object, ...]:
        return _limit_error, (self.what, self.need, self.have, self.limit)


def _limit_error(what: str, need: int, have: int, limit: int) -> PoolLimitError:
    return PoolLimitError(what, need=need, have=have, limit=limit)


class CaptureError(BufpoolError, RuntimeError):
    """The operation is not possible while a CUDA graph is being captured. Do it before the capture."""


class DriverError(BufpoolError, RuntimeError):
    """A CUDA driver or operating-system call failed; the text names the call, its code and its meaning."""


class CompileError(BufpoolError, RuntimeError):
    """A kernel did not compile; the text ends with the compiler's log."""


class WriteContractError(BufpoolError, AssertionError):
    """A function did not write its outputs as it promised; the text names the first tensor, row and column."""

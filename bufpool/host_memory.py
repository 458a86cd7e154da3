"""Memory of the host that nothing ends by surprise. The only module that calls libc.

Ranges come from libc directly and not from Python's ``mmap`` objects, because such an object unmaps its range when it is
collected, also under a tensor that still reads it; records likewise, because a ctypes object frees its bytes while C code
may still write to them. What is made here lives until ``release`` or ``free`` is called.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import sys
from functools import cache
from typing import Any

from .errors import DriverError

__all__ = [
    "PAGE_BYTES",
    "allocate",
    "free",
    "give_back",
    "is_available",
    "physical_bytes",
    "post_address",
    "release",
    "reserve",
]

PAGE_BYTES = mmap.PAGESIZE

_MAP_NORESERVE = 0x4000  # Linux; Python's mmap module names it from 3.12 on
_MAP_FAILED = ctypes.c_void_p(-1).value


def is_available() -> bool:
    """Whether ranges can be reserved lazily here: Linux on a 64-bit machine."""
    return sys.platform == "linux" and ctypes.sizeof(ctypes.c_void_p) == 8


def physical_bytes() -> int:
    """Bytes of physical memory of this machine."""
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


@cache
def _libc() -> Any:
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = [
        ctypes.c_void_p,
        ctypes.c_size_t,
        ctypes.c_int,
        ctypes.c_int,
        ctypes.c_int,
        ctypes.c_int64,
    ]
    libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
    libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    libc.calloc.restype = ctypes.c_void_p
    libc.calloc.argtypes = [ctypes.c_size_t, ctypes.c_size_t]
    libc.free.argtypes = [ctypes.c_void_p]
    return libc


def reserve(nbytes: int) -> int | None:
    """Address of a new anonymous private range of ``nbytes``, committed page by page at first touch.

    Returns:
        The address, or None where the system has no room for such a range (``ulimit -v``, strict overcommit).

    Raises:
        DriverError: any other failure.
    """
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE
    address = _libc().mmap(None, nbytes, mmap.PROT_READ | mmap.PROT_WRITE, flags, -1, 0)
    if address == _MAP_FAILED:
        code = ctypes.get_errno()
        if code in (errno.ENOMEM, errno.EAGAIN):
            return None
        raise DriverError(f"mmap of {nbytes} bytes: {os.strerror(code)}")
    return int(address)


def give_back(address: int, nbytes: int) -> None:
    """Return the pages of a part of a range to the system; the part stays usable and reads as zero."""
    if _libc().madvise(address, nbytes, mmap.MADV_DONTNEED) != 0:
        raise DriverError(f"madvise of {nbytes} bytes: {os.strerror(ctypes.get_errno())}")


def release(address: int, nbytes: int) -> None:
    """End a range. Nothing may use it any more."""
    if _libc().munmap(address, nbytes) != 0:
        raise DriverError(f"munmap of {nbytes} bytes: {os.strerror(ctypes.get_errno())}")


def allocate(nbytes: int) -> int:
    """Address of a zeroed record of ``nbytes``."""
    address = _libc().calloc(1, nbytes)
    if not address:
        raise MemoryError(f"calloc: expected {nbytes} bytes, got none")
    return int(address)


def free(address: int) -> None:
    """End a record that ``allocate`` made."""
    _libc().free(address)


@cache
def post_address() -> int | None:
    """Address of ``sem_post``, a C function ``int (*)(void *)`` that adds 1 to the 32-bit count its argument starts with.

    With no waiters (the next 32 bits 0) it is one atomic addition: no lock, no system call, no Python. Only glibc is known
    to lay a semaphore out like that; None elsewhere.
    """
    if not sys.platform.startswith("linux") or not hasattr(_libc(), "gnu_get_libc_version"):
        return None
    return ctypes.cast(_libc().sem_post, ctypes.c_void_p).value

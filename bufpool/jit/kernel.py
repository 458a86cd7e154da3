"""A compiled kernel in the driver: loaded once a process, made ready once a device.

The driver is called through ctypes, since cuda.core's launch takes no struct by value; a kernel that comes from the
cache is thereby launched without importing cuda.core (0.2 s).

*Concurrency*: loading is under one lock; what is loaded is never unloaded, as captured graphs may hold it.
"""

from __future__ import annotations

import ctypes
import functools
import threading
from typing import Any

from ..errors import DriverError
from .compiler import Binary, Source, compile_source

__all__ = ["Kernel", "bind_context", "check", "driver", "load_kernel"]

_MAX_DYNAMIC_SHARED_SIZE_BYTES = 8  # CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES

_kernels: dict[tuple[Source, str], Kernel] = {}
_lock = threading.Lock()


@functools.cache
def driver() -> Any:
    """The driver's library, as a ctypes library.

    Raises:
        DriverError: there is none.
    """
    try:
        return ctypes.CDLL("libcuda.so.1")
    except OSError as e:
        raise DriverError(f"libcuda.so.1: expected the CUDA driver, got {e}") from e


def check(code: int, call: str) -> None:
    """Raise ``DriverError`` with name and meaning of ``code`` unless it is 0."""
    if code == 0:
        return
    name, meaning = ctypes.c_char_p(), ctypes.c_char_p()
    driver().cuGetErrorName(code, ctypes.byref(name))
    driver().cuGetErrorString(code, ctypes.byref(meaning))
    text = f"{(name.value or b'unknown').decode()} ({(meaning.value or b'no description').decode()})"
    raise DriverError(f"{call}: expected CUDA_SUCCESS, got {code} {text}")


def bind_context(device_index: int) -> None:
    """Make the device's own context current in this thread, as a thread's first call of the CUDA runtime does.

    Raises:
        DriverError: the driver refused.
    """
    device, context = ctypes.c_int(), ctypes.c_void_p()
    check(driver().cuDeviceGet(ctypes.byref(device), device_index), "cuDeviceGet")
    check(driver().cuDevicePrimaryCtxRetain(ctypes.byref(context), device), "cuDevicePrimaryCtxRetain")
    try:
        check(driver().cuCtxSetCurrent(context), "cuCtxSetCurrent")
    finally:
        check(driver().cuDevicePrimaryCtxRelease_v2(device), "cuDevicePrimaryCtxRelease")  # torch keeps it


class Kernel:
    """A kernel in the driver.

    Attributes:
        binary: what was loaded.
        handle: ``CUkernel``, valid on every device of the binary's architecture.
    """

    def __init__(self, binary: Binary) -> None:
        library = ctypes.c_void_p()
        check(
            driver().cuLibraryLoadData(ctypes.byref(library), binary.image, None, None, 0, None, None, 0),
            "cuLibraryLoadData",
        )
        handle = ctypes.c_void_p()
        entry = binary.source.entry.encode()
        check(driver().cuLibraryGetKernel(ctypes.byref(handle), library, entry), "cuLibraryGetKernel")
        self.binary = binary
        self.handle = handle
        self._ready: set[int] = set()

    def make_ready(self, device_index: int) -> None:
        """Allow the kernel its shared memory on a device. The first time only does anything.

        Raises:
            DriverError: the device has less.
        """
        if device_index in self._ready:
            return
        device = ctypes.c_int()
        check(driver().cuDeviceGet(ctypes.byref(device), device_index), "cuDeviceGet")
        shared_bytes = self.binary.source.shared_bytes
        check(
            driver().cuKernelSetAttribute(_MAX_DYNAMIC_SHARED_SIZE_BYTES, shared_bytes, self.handle, device),
            f"cuKernelSetAttribute({shared_bytes} bytes of shared memory)",
        )
        self._ready.add(device_index)


def load_kernel(source: Source, arch: str = "sm_90a") -> Kernel:
    """The kernel of a variant: compiled or read from the cache, and loaded, the first time it is asked for.

    Raises:
        CompileError: see ``compile_source``.
        DriverError: the driver cannot load it.
    """
    kernel = _kernels.get((source, arch))
    if kernel is None:
        with _lock:
            kernel = _kernels.get((source, arch))
            if kernel is None:
                kernel = _kernels[source, arch] = Kernel(compile_source(source, arch))
    return kernel

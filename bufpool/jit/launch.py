"""A prepared launch: everything but the values that change from call to call is set up once.

The kernel takes one struct by value. ``Launch`` owns the driver's launch configuration and the struct's bytes; a call
writes the changed fields and the stream, and calls ``cuLaunchKernelEx``.

*Concurrency*: the driver copies the struct before the call returns, but a ``Launch`` is one buffer: use it in one call at
a time, finalizers counted.
"""

from __future__ import annotations

import ctypes
from typing import Any

from .kernel import Kernel, bind_context, check, driver

__all__ = ["Launch"]

_INVALID_CONTEXT = 201  # CUDA_ERROR_INVALID_CONTEXT


class _LaunchConfig(ctypes.Structure):
    """``CUlaunchConfig``."""

    _fields_ = (
        ("grid_x", ctypes.c_uint),
        ("grid_y", ctypes.c_uint),
        ("grid_z", ctypes.c_uint),
        ("block_x", ctypes.c_uint),
        ("block_y", ctypes.c_uint),
        ("block_z", ctypes.c_uint),
        ("shared_bytes", ctypes.c_uint),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.c_void_p),
        ("attribute_count", ctypes.c_uint),
    )


class Launch:
    """A launch of ``kernel`` on a one-dimensional grid.

    Args:
        kernel: the kernel; its source says threads and shared memory of a CTA.
        device_index: the device it will run on; it is torch's current one at every call.
        params_bytes: size of the kernel's parameter struct.

    Attributes:
        params: the struct's bytes, to be written with ``struct.pack_into``.
    """

    __slots__ = ("_call", "_config", "_config_ref", "_device_index", "_handle", "_pointers", "params")

    def __init__(self, kernel: Kernel, device_index: int, params_bytes: int) -> None:
        kernel.make_ready(device_index)
        source = kernel.binary.source
        self.params = ctypes.create_string_buffer(params_bytes)
        self._pointers = (ctypes.c_void_p * 1)(ctypes.addressof(self.params))
        self._config = _LaunchConfig(1, 1, 1, source.threads, 1, 1, source.shared_bytes, None, None, 0)
        self._config_ref = ctypes.byref(self._config)
        self._handle = kernel.handle
        self._device_index = device_index
        self._call: Any = driver().cuLaunchKernelEx

    def __call__(self, grid: int, stream: int) -> None:
        """Launch ``grid`` CTAs on the raw stream ``stream``.

        Raises:
            DriverError: the driver refused.
        """
        self._config.grid_x = grid
        self._config.stream = stream
        code = self._call(self._config_ref, self._handle, self._pointers, None)
        if code == _INVALID_CONTEXT:  # this thread has not called CUDA yet
            bind_context(self._device_index)
            code = self._call(self._config_ref, self._handle, self._pointers, None)
        if code:
            check(code, "cuLaunchKernelEx")

"""A prepared launch, on a driver that notes its calls."""

from __future__ import annotations

import ctypes
import types

import pytest

from bufpool.errors import DriverError
from bufpool.jit import kernel as kernel_module
from bufpool.jit import launch as launch_module
from bufpool.jit.launch import Launch

INVALID_CONTEXT, OUT_OF_RESOURCES = 201, 701


class Driver:
    """What a launch asks of the driver, and the codes that it answers a launch with."""

    def __init__(self, *codes):
        self.codes = list(codes)
        self.calls = []

    def _do(self, name):
        self.calls.append(name)
        return 0

    def cuDeviceGet(self, device, index):
        device._obj.value = 40 + index
        return 0

    def cuDevicePrimaryCtxRetain(self, context, device):
        context._obj.value = 1000 + device.value
        return self._do("retain")

    def cuCtxSetCurrent(self, context):
        return self._do(f"set {context.value}")

    def cuDevicePrimaryCtxRelease_v2(self, device):
        return self._do("release")

    def cuLaunchKernelEx(self, config, handle, pointers, extra):
        self._do(f"launch {config._obj.grid_x} on {config._obj.stream or 0}")
        return self.codes.pop(0)

    def cuGetErrorName(self, code, name):
        name._obj.value = b"CUDA_ERROR"
        return 0

    cuGetErrorString = cuGetErrorName


@pytest.fixture
def make_launch(monkeypatch):
    def make(driver, device_index=2):
        for module in (kernel_module, launch_module):
            monkeypatch.setattr(module, "driver", lambda: driver)
        source = types.SimpleNamespace(threads=384, shared_bytes=1024)
        kernel = types.SimpleNamespace(
            make_ready=lambda index: None, binary=types.SimpleNamespace(source=source), handle=ctypes.c_void_p(7)
        )
        return Launch(kernel, device_index, 64)

    return make


def test_a_launch_is_one_call(make_launch):
    driver = Driver(0)
    make_launch(driver)(132, 77)
    assert driver.calls == ["launch 132 on 77"]


def test_a_thread_without_a_context_gets_that_of_the_device_and_the_launch_is_repeated(make_launch):
    driver = Driver(INVALID_CONTEXT, 0)
    make_launch(driver)(5, 0)
    assert driver.calls == ["launch 5 on 0", "retain", "set 1042", "release", "launch 5 on 0"]


@pytest.mark.parametrize(
    "codes", [(INVALID_CONTEXT, INVALID_CONTEXT), (INVALID_CONTEXT, OUT_OF_RESOURCES), (OUT_OF_RESOURCES,)]
)
def test_what_the_driver_refuses_for_good_is_an_error(make_launch, codes):
    driver = Driver(*codes)
    with pytest.raises(DriverError, match=f"cuLaunchKernelEx: expected CUDA_SUCCESS, got {codes[-1]}"):
        make_launch(driver)(5, 0)
    assert driver.codes == []

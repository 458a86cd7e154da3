"""CUDA driver calls that the arenas and the pool need. The only module that calls ``cuda.bindings``.

Driver behaviour this relies on (CUDA 13.0, driver 580, H200):

* ``cuMemCreate``, ``cuMemMap``, ``cuMemSetAccess`` and ``cuMemUnmap`` do not synchronise, are legal while any stream of
  the process captures, and leave the capture as it was.
* ``cuCtxSynchronize`` breaks every capture that is under way in the context, whatever its mode or thread. It is only
  called after ``capturing_stream`` found none.
* Asking a stream for its capture state is legal at any time from any thread. A destroyed stream's handle must not be
  passed to any call: the process ends with a segmentation fault.
* An event query or a stream query breaks captures in global mode, unless the asking thread is in relaxed mode. Streams
  are queried in that mode only, and never a stream that captures.
* A new thread has no current context; calls about the per-thread default stream need one.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from functools import cache
from typing import Any, Protocol

import torch

from .errors import DriverError

__all__ = [
    "CudaDriver",
    "DeviceOutOfMemoryError",
    "VirtualMemoryDriver",
    "capture_of",
    "capturing_stream",
    "cuda_driver",
    "driver_version",
    "is_available",
    "is_capturing",
    "is_idle",
    "is_stream_idle",
    "retain_in_graph",
    "supports_virtual_memory",
    "synchronize",
    "unavailable_reason",
]


class DeviceOutOfMemoryError(DriverError):
    """The device has no physical memory, or no address space, left.

    Attributes:
        nbytes: bytes that were asked for; 0 if not known.
    """

    def __init__(self, text: str, nbytes: int = 0) -> None:
        super().__init__(text)
        self.nbytes = nbytes


class VirtualMemoryDriver(Protocol):
    """The driver calls of a growing address range, one method a call."""

    granule: int
    device_bytes: int

    def address_reserve(self, nbytes: int) -> int: ...

    def address_free(self, address: int, nbytes: int) -> None: ...

    def create(self, nbytes: int) -> Any: ...

    def map(self, address: int, nbytes: int, handle: Any) -> None: ...

    def set_access(self, address: int, nbytes: int) -> None: ...

    def unmap(self, address: int, nbytes: int) -> None: ...

    def release(self, handle: Any) -> None: ...


@cache
def _bindings() -> Any:
    from cuda.bindings import driver

    return driver


@cache
def unavailable_reason() -> str | None:
    """Why the CUDA driver cannot be called here; None if it can."""
    if torch.version.cuda is None:
        return "torch was built without CUDA"
    if not torch.cuda.is_available():
        return "torch finds no CUDA device"
    try:
        _bindings()
    except ImportError as error:
        return f"cuda.bindings cannot be imported ({error}); pip install 'bufpool[cuda13]' brings it"
    return None


def is_available() -> bool:
    """Whether the CUDA driver can be called here."""
    return unavailable_reason() is None


def _check(call: str, result: tuple[Any, ...], nbytes: int = 0) -> Any:
    """The value of a driver call's result, or DriverError with the call, its code and its meaning."""
    status = result[0]
    if int(status) != 0:
        driver = _bindings()
        _, meaning = driver.cuGetErrorString(status)
        text = f"{call}: {status.name} ({int(status)}): {(meaning or b'unknown error').decode()}"
        if nbytes and status == driver.CUresult.CUDA_ERROR_OUT_OF_MEMORY:
            raise DeviceOutOfMemoryError(f"{text}, for {nbytes} bytes", nbytes)
        raise DriverError(text)
    return result[1] if len(result) == 2 else result[1:]


def driver_version() -> int:
    """CUDA version that the installed driver supports, as 1000 * major + 10 * minor."""
    return int(_check("cuDriverGetVersion", _bindings().cuDriverGetVersion()))


@cache
def supports_virtual_memory(index: int) -> bool:
    """Whether physical memory of device ``index`` can be mapped into reserved address ranges."""
    if not is_available():
        return False
    driver = _bindings()
    torch.cuda.init()  # type: ignore[no-untyped-call]
    device = _check("cuDeviceGet", driver.cuDeviceGet(index))
    attribute = driver.CUdevice_attribute.CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED
    return bool(_check("cuDeviceGetAttribute", driver.cuDeviceGetAttribute(attribute, device)))


class CudaDriver:
    """Virtual memory of one device.

    A mapping can be read and written by its own device and by every visible device that reaches it directly, as with
    memory that torch allocates: a copy between devices and a collective need it.
    """

    def __init__(self, index: int) -> None:
        self._driver = driver = _bindings()
        torch.cuda.init()  # type: ignore[no-untyped-call]
        location = driver.CUmemLocation()
        location.type = driver.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
        location.id = index
        self._properties = properties = driver.CUmemAllocationProp()
        properties.type = driver.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
        properties.location = location
        minimum = driver.CUmemAllocationGranularity_flags.CU_MEM_ALLOC_GRANULARITY_MINIMUM
        self.granule = int(
            _check("cuMemGetAllocationGranularity", driver.cuMemGetAllocationGranularity(properties, minimum))
        )
        self.device_bytes = torch.cuda.get_device_properties(index).total_memory
        self._access = [self._access_of(index)]
        self._access += [
            self._access_of(peer)
            for peer in range(torch.cuda.device_count())
            if peer != index and torch.cuda.can_device_access_peer(peer, index)
        ]

    def _access_of(self, index: int) -> Any:
        access = self._driver.CUmemAccessDesc()
        access.location.type = self._driver.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
        access.location.id = index
        access.flags = self._driver.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
        return access

    def address_reserve(self, nbytes: int) -> int:
        """Address of a reserved range of ``nbytes``; no memory is behind it."""
        return int(_check("cuMemAddressReserve", self._driver.cuMemAddressReserve(nbytes, 0, 0, 0), nbytes))

    def address_free(self, address: int, nbytes: int) -> None:
        """Give back the exact range of one reservation."""
        _check("cuMemAddressFree", self._driver.cuMemAddressFree(address, nbytes))

    def create(self, nbytes: int) -> Any:
        """Handle of ``nbytes`` of physical memory, a multiple of the granule.

        Raises:
            DeviceOutOfMemoryError: the device has no memory left.
        """
        return _check("cuMemCreate", self._driver.cuMemCreate(nbytes, self._properties, 0), nbytes)

    def map(self, address: int, nbytes: int, handle: Any) -> None:
        """Put the whole of ``handle`` behind ``address``."""
        _check("cuMemMap", self._driver.cuMemMap(address, nbytes, 0, handle, 0))

    def set_access(self, address: int, nbytes: int) -> None:
        """Make a mapping readable and writable."""
        _check("cuMemSetAccess", self._driver.cuMemSetAccess(address, nbytes, self._access, len(self._access)))

    def unmap(self, address: int, nbytes: int) -> None:
        """Take one whole mapping away. Not ordered with any stream: synchronise first."""
        _check("cuMemUnmap", self._driver.cuMemUnmap(address, nbytes))

    def release(self, handle: Any) -> None:
        """Drop the handle; the memory lives as long as its mapping."""
        _check("cuMemRelease", self._driver.cuMemRelease(handle))


_drivers: dict[int, CudaDriver] = {}


def cuda_driver(index: int) -> CudaDriver:
    """The driver of device ``index``; made once."""
    found = _drivers.get(index)
    if found is None:
        found = _drivers.setdefault(index, CudaDriver(index))
    return found


def synchronize(index: int) -> None:
    """Wait for all work of device ``index``; the current device stays. Call it only when nothing captures."""
    torch.cuda.synchronize(index)


_contexts: dict[int, Any] = {}


@contextlib.contextmanager
def _current_context(index: int) -> Iterator[None]:
    """Make the context that torch uses on a device current in this thread, and the former one afterwards."""
    driver = _bindings()
    context = _contexts.get(index)
    if context is None:
        device = _check("cuDeviceGet", driver.cuDeviceGet(index))
        context = _check("cuDevicePrimaryCtxRetain", driver.cuDevicePrimaryCtxRetain(device))
        context = _contexts.setdefault(index, context)
    _check("cuCtxPushCurrent", driver.cuCtxPushCurrent(context))
    try:
        yield
    finally:
        _check("cuCtxPopCurrent", driver.cuCtxPopCurrent())


def capture_of(index: int, stream: int) -> tuple[int, Any] | None:
    """Id and graph of the capture that a stream takes part in; None if it does not capture.

    Args:
        index: the stream's device.
        stream: its raw handle, not the legacy default stream.

    Raises:
        DriverError: the capture was broken by an earlier error.
    """
    driver = _bindings()
    with _current_context(index):
        result = driver.cuStreamGetCaptureInfo(driver.CUstream(stream))
    found = _check("cuStreamGetCaptureInfo", result)
    if found[0] == driver.CUstreamCaptureStatus.CU_STREAM_CAPTURE_STATUS_NONE:
        return None
    if found[0] != driver.CUstreamCaptureStatus.CU_STREAM_CAPTURE_STATUS_ACTIVE:
        raise DriverError("cuStreamGetCaptureInfo: the capture was invalidated by an earlier error")
    return int(found[1]), found[2]


def is_capturing(stream: int) -> bool:
    """Whether ``stream`` (a raw handle, not the legacy default stream) captures, broken captures included."""
    driver = _bindings()
    status = _check("cuStreamIsCapturing", driver.cuStreamIsCapturing(driver.CUstream(stream)))
    return bool(status != driver.CUstreamCaptureStatus.CU_STREAM_CAPTURE_STATUS_NONE)


_STREAMS_PER_POOL = 32
_PRIORITIES = (0, -1, -2, -3)  # torch makes no others; where a device has fewer, it gives the nearest
_torch_streams: dict[int, tuple[int, ...]] = {}


def _streams_of_torch(index: int) -> tuple[int, ...]:
    """Raw handles of the streams that torch hands out on a device, in turn; it never destroys them."""
    found = _torch_streams.get(index)
    if found is None:
        handles = {
            torch.cuda.Stream(index, priority=priority).cuda_stream  # type: ignore[no-untyped-call]
            for priority in _PRIORITIES
            for _ in range(_STREAMS_PER_POOL)
        }
        found = _torch_streams.setdefault(index, tuple(sorted(handles)))
    return found


def capturing_stream(index: int, known: Iterable[int] = ()) -> int | None:
    """A stream of device ``index`` that captures now, from whatever thread; None if none does.

    Asked are the streams that torch hands out and those of ``known``. A capture on a stream of another library that the
    caller does not know cannot be seen.
    """
    with _current_context(index):
        for stream in {*known, *_streams_of_torch(index)} - {0}:
            if is_capturing(stream):
                return stream
    return None


@contextlib.contextmanager
def _relaxed() -> Iterator[None]:
    """Let this thread ask streams while others, or it itself, capture; the captures stay as they are."""
    driver = _bindings()
    mode = driver.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED
    former = _check("cuThreadExchangeStreamCaptureMode", driver.cuThreadExchangeStreamCaptureMode(mode))
    try:
        yield
    finally:
        _check("cuThreadExchangeStreamCaptureMode", driver.cuThreadExchangeStreamCaptureMode(former))


def is_stream_idle(index: int, stream: int) -> bool:
    """Whether all work of a stream (a raw handle) that does not capture is done. Waits for nothing, breaks no capture."""
    driver = _bindings()
    with _current_context(index), _relaxed():
        return int(driver.cuStreamQuery(driver.CUstream(stream))[0]) == 0


def is_idle(index: int, known: Iterable[int] = ()) -> bool:
    """Whether all work of a device is done, as far as can be seen: on the default stream, those of torch, and ``known``.

    Waits for nothing and breaks no capture. Streams that capture count as idle: what they ran before was ended by whoever
    began the capture, as ``torch.cuda.graph`` does. While a stream that is not torch's captures, the answer is no: asking
    the default stream could break that capture.
    """
    driver = _bindings()
    ours = _streams_of_torch(index)
    with _current_context(index), _relaxed():
        if any(stream not in ours and is_capturing(stream) for stream in {*known} - {0}):
            return False
        for stream in sorted({0, *known, *ours}):
            if stream != 0 and is_capturing(stream):
                continue
            if int(driver.cuStreamQuery(driver.CUstream(stream))[0]) != 0:
                return False
    return True


def retain_in_graph(graph: Any, resource: int, destroy: int) -> None:
    """Let ``graph`` and everything made from it call ``destroy(resource)`` when the last of them is gone.

    Args:
        graph: a graph that is being captured.
        resource: address passed on.
        destroy: address of a C function ``void (*)(void *)`` that calls neither Python nor CUDA.
    """
    driver = _bindings()
    flag = driver.CUuserObject_flags.CU_USER_OBJECT_NO_DESTRUCTOR_SYNC
    user_object = _check("cuUserObjectCreate", driver.cuUserObjectCreate(resource, driver.CUhostFn(destroy), 1, int(flag)))
    move = driver.CUuserObjectRetain_flags.CU_GRAPH_USER_OBJECT_MOVE
    try:
        _check("cuGraphRetainUserObject", driver.cuGraphRetainUserObject(graph, user_object, 1, int(move)))
    except DriverError:
        with contextlib.suppress(DriverError):
            _check("cuUserObjectRelease", driver.cuUserObjectRelease(user_object, 1))
        raise

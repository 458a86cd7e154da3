"""The driver, as far as it is seen without a GPU: why it is not there, what it is told, what is asked of streams."""

from __future__ import annotations

import enum
import types

import pytest
import torch

from bufpool import driver
from bufpool.driver import CudaDriver, DeviceOutOfMemoryError
from bufpool.errors import BufpoolError, DriverError


class Status(enum.IntEnum):
    CUDA_SUCCESS = 0
    CUDA_ERROR_OUT_OF_MEMORY = 2
    CUDA_ERROR_NOT_READY = 600
    CUDA_ERROR_ILLEGAL_ADDRESS = 700


GRANULE = 2 * 2**20
OURS, FOREIGN = 11, 77  # a stream of torch and one of another library


class Bindings:
    """What the module asks of ``cuda.bindings.driver``: notes each call, answers well unless told otherwise."""

    CUresult = Status
    CUstreamCaptureStatus = types.SimpleNamespace(
        CU_STREAM_CAPTURE_STATUS_NONE=0, CU_STREAM_CAPTURE_STATUS_ACTIVE=1, CU_STREAM_CAPTURE_STATUS_INVALIDATED=2
    )
    CUstreamCaptureMode = types.SimpleNamespace(CU_STREAM_CAPTURE_MODE_RELAXED="relaxed")
    CUmemLocationType = types.SimpleNamespace(CU_MEM_LOCATION_TYPE_DEVICE="on a device")
    CUmemAllocationType = types.SimpleNamespace(CU_MEM_ALLOCATION_TYPE_PINNED="pinned")
    CUmemAllocationGranularity_flags = types.SimpleNamespace(CU_MEM_ALLOC_GRANULARITY_MINIMUM="least")
    CUmemAccess_flags = types.SimpleNamespace(CU_MEM_ACCESS_FLAGS_PROT_READWRITE="read and write")
    CUdevice_attribute = types.SimpleNamespace(CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED="virtual memory")
    CUuserObject_flags = types.SimpleNamespace(CU_USER_OBJECT_NO_DESTRUCTOR_SYNC=1)
    CUuserObjectRetain_flags = types.SimpleNamespace(CU_GRAPH_USER_OBJECT_MOVE=1)
    CUmemLocation = CUmemAllocationProp = types.SimpleNamespace

    def __init__(self):
        self.calls = []
        self.answers = {"cuMemGetAllocationGranularity": (GRANULE,)}
        self.failures = {}
        self.capturing = set()
        self.busy = set()

    @staticmethod
    def CUmemAccessDesc():
        return types.SimpleNamespace(location=types.SimpleNamespace())

    @staticmethod
    def CUstream(handle):
        return handle

    CUhostFn = CUstream

    @staticmethod
    def cuGetErrorString(status):
        return Status.CUDA_SUCCESS, f"the meaning of {int(status)}".encode()

    def cuStreamIsCapturing(self, stream):
        return Status.CUDA_SUCCESS, int(stream in self.capturing)

    def cuStreamQuery(self, stream):
        self.calls.append(("cuStreamQuery", stream))
        return (Status.CUDA_ERROR_NOT_READY if stream in self.busy else Status.CUDA_SUCCESS,)

    def __getattr__(self, name):
        if not name.startswith("cu"):
            raise AttributeError(name)

        def call(*arguments):
            self.calls.append((name, *arguments))
            return (self.failures.get(name, Status.CUDA_SUCCESS), *self.answers.get(name, ("answer",)))

        return call

    def called(self, name):
        return [call[1:] for call in self.calls if call[0] == name]


@pytest.fixture
def bindings(monkeypatch):
    fake = Bindings()
    monkeypatch.setattr(driver, "_bindings", lambda: fake)
    monkeypatch.setattr(driver, "_contexts", {})
    monkeypatch.setattr(driver, "_streams_of_torch", lambda index: (OURS,))
    monkeypatch.setattr(torch.cuda, "init", lambda: None)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda index, peer: (index, peer) == (2, 1))
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: types.SimpleNamespace(total_memory=2**37))
    return fake


# --- Is it there? ---


@pytest.fixture
def anew(monkeypatch):
    """What is asked once for a process is asked again, before and after."""
    cached = driver.unavailable_reason, driver.supports_virtual_memory
    for function in cached:
        function.cache_clear()
    yield monkeypatch
    monkeypatch.undo()
    for function in cached:
        function.cache_clear()


def no_bindings():
    raise ImportError("No module named 'cuda'")


@pytest.mark.parametrize(
    ("built_for", "has_device", "reason"),
    [
        (None, False, "torch was built without CUDA"),
        ("13.0", False, "torch finds no CUDA device"),
        (
            "13.0",
            True,
            "cuda.bindings cannot be imported (No module named 'cuda'); pip install 'bufpool[cuda13]' brings it",
        ),
    ],
)
def test_the_reason_names_what_is_missing_first(anew, built_for, has_device, reason):
    anew.setattr(torch.version, "cuda", built_for)
    anew.setattr(torch.cuda, "is_available", lambda: has_device)
    anew.setattr(driver, "_bindings", no_bindings)
    assert driver.unavailable_reason() == reason
    assert not driver.is_available()
    assert not driver.supports_virtual_memory(0)


def test_it_is_asked_once(anew):
    asked = []
    anew.setattr(torch.version, "cuda", "13.0")
    anew.setattr(torch.cuda, "is_available", lambda: bool(asked.append(1)))
    assert driver.unavailable_reason() == driver.unavailable_reason() == "torch finds no CUDA device"
    assert len(asked) == 1


@pytest.mark.parametrize(("answer", "is_supported"), [(1, True), (0, False)])
def test_virtual_memory_is_an_attribute_of_the_device(anew, bindings, answer, is_supported):
    anew.setattr(torch.version, "cuda", "13.0")
    anew.setattr(torch.cuda, "is_available", lambda: True)
    bindings.answers = {"cuDeviceGet": ("device 1",), "cuDeviceGetAttribute": (answer,)}
    assert driver.is_available()
    assert driver.supports_virtual_memory(1) is is_supported
    assert bindings.called("cuDeviceGetAttribute") == [("virtual memory", "device 1")]


# --- What a call gives ---


def test_a_value_comes_bare_and_several_as_a_tuple(bindings):
    assert driver._check("call", (Status.CUDA_SUCCESS, 5)) == 5
    assert driver._check("call", (Status.CUDA_SUCCESS, 5, 6)) == (5, 6)
    assert driver._check("call", (Status.CUDA_SUCCESS,)) == ()
    bindings.answers["cuDriverGetVersion"] = (13000,)
    assert driver.driver_version() == 13000


def test_a_failure_names_the_call_its_code_and_its_meaning(bindings):
    with pytest.raises(DriverError) as caught:
        driver._check("cuMemMap", (Status.CUDA_ERROR_ILLEGAL_ADDRESS, None))
    assert type(caught.value) is DriverError
    assert str(caught.value) == "cuMemMap: CUDA_ERROR_ILLEGAL_ADDRESS (700): the meaning of 700"


def test_memory_that_is_short_has_an_error_of_its_own_with_bytes(bindings):
    bindings.failures["cuMemCreate"] = Status.CUDA_ERROR_OUT_OF_MEMORY
    with pytest.raises(DeviceOutOfMemoryError) as caught:
        CudaDriver(0).create(GRANULE)
    assert caught.value.nbytes == GRANULE
    assert isinstance(caught.value, BufpoolError)
    assert str(caught.value) == "cuMemCreate: CUDA_ERROR_OUT_OF_MEMORY (2): the meaning of 2, for 2097152 bytes"


# --- What is passed on ---


def test_a_range_is_reserved_mapped_and_given_back_by_exact_pairs(bindings):
    bindings.answers |= {"cuMemAddressReserve": (2**32,), "cuMemCreate": ("handle",)}
    cuda = CudaDriver(0)
    assert (cuda.granule, cuda.device_bytes) == (GRANULE, 2**37)
    bindings.calls.clear()
    assert cuda.address_reserve(8 * GRANULE) == 2**32
    handle = cuda.create(2 * GRANULE)
    cuda.map(2**32, 2 * GRANULE, handle)
    cuda.set_access(2**32, 2 * GRANULE)
    cuda.release(handle)
    cuda.unmap(2**32, 2 * GRANULE)
    cuda.address_free(2**32, 8 * GRANULE)
    properties, access = cuda._properties, cuda._access
    assert bindings.calls == [
        ("cuMemAddressReserve", 8 * GRANULE, 0, 0, 0),
        ("cuMemCreate", 2 * GRANULE, properties, 0),
        ("cuMemMap", 2**32, 2 * GRANULE, 0, "handle", 0),
        ("cuMemSetAccess", 2**32, 2 * GRANULE, access, len(access)),
        ("cuMemRelease", "handle"),
        ("cuMemUnmap", 2**32, 2 * GRANULE),
        ("cuMemAddressFree", 2**32, 8 * GRANULE),
    ]


def test_memory_is_of_its_device_and_open_to_those_that_reach_it(bindings):
    cuda = CudaDriver(1)
    assert (cuda._properties.type, cuda._properties.location.id) == ("pinned", 1)
    assert [access.location.id for access in cuda._access] == [1, 2]  # device 0 does not reach it
    assert {access.flags for access in cuda._access} == {"read and write"}


def test_a_device_has_one_driver(bindings, monkeypatch):
    monkeypatch.setattr(driver, "_drivers", {})
    assert driver.cuda_driver(0) is driver.cuda_driver(0)
    assert driver.cuda_driver(0) is not driver.cuda_driver(1)


def test_a_graph_that_cannot_keep_the_record_gives_it_back(bindings):
    bindings.answers["cuUserObjectCreate"] = ("object",)
    driver.retain_in_graph("graph", 4096, 8192)
    assert bindings.called("cuUserObjectCreate") == [(4096, 8192, 1, 1)]
    assert bindings.called("cuGraphRetainUserObject") == [("graph", "object", 1, 1)]
    assert bindings.called("cuUserObjectRelease") == []
    bindings.failures["cuGraphRetainUserObject"] = Status.CUDA_ERROR_ILLEGAL_ADDRESS
    with pytest.raises(DriverError, match=r"^cuGraphRetainUserObject: "):
        driver.retain_in_graph("graph", 4096, 8192)
    assert bindings.called("cuUserObjectRelease") == [("object", 1)]


# --- What is asked of streams ---


def test_a_capture_has_an_id_and_a_graph(bindings):
    bindings.answers["cuStreamGetCaptureInfo"] = (0, 0, None)
    assert driver.capture_of(0, OURS) is None
    bindings.answers["cuStreamGetCaptureInfo"] = (1, 42, "graph", "more")
    assert driver.capture_of(0, OURS) == (42, "graph")
    bindings.answers["cuStreamGetCaptureInfo"] = (2, 42, "graph")
    with pytest.raises(DriverError, match=r"the capture was invalidated by an earlier error$"):
        driver.capture_of(0, OURS)
    assert len(bindings.called("cuCtxPushCurrent")) == len(bindings.called("cuCtxPopCurrent")) == 3
    assert len(bindings.called("cuDevicePrimaryCtxRetain")) == 1


def test_a_stream_that_captures_is_found_among_those_of_torch_and_those_known(bindings):
    assert driver.capturing_stream(0, known=[0, FOREIGN]) is None
    bindings.capturing = {FOREIGN}
    assert driver.capturing_stream(0) is None
    assert driver.capturing_stream(0, known=[FOREIGN]) == FOREIGN
    bindings.capturing = {OURS}
    assert driver.capturing_stream(0) == OURS


def test_streams_are_queried_in_relaxed_mode_only(bindings):
    bindings.answers["cuThreadExchangeStreamCaptureMode"] = ("former",)
    assert driver.is_stream_idle(0, OURS)
    bindings.busy = {OURS}
    assert not driver.is_stream_idle(0, OURS)
    names = [call[0] for call in bindings.calls]
    first, query, second = (names.index(name) for name in ("cuCtxPushCurrent", "cuStreamQuery", "cuCtxPopCurrent"))
    assert first < query < second
    assert bindings.called("cuThreadExchangeStreamCaptureMode") == [("relaxed",), ("former",)] * 2


@pytest.mark.parametrize(
    ("busy", "capturing", "is_idle", "queried"),
    [
        ([], [], True, [0, OURS, FOREIGN]),
        ([0], [], False, [0]),
        ([OURS], [], False, [0, OURS]),
        ([FOREIGN], [], False, [0, OURS, FOREIGN]),
        ([OURS], [OURS], True, [0, FOREIGN]),  # one of torch that captures is left alone
        ([], [FOREIGN], False, []),  # asking the default stream could break that capture
    ],
)
def test_a_device_is_idle_when_all_its_streams_are(bindings, busy, capturing, is_idle, queried):
    bindings.busy, bindings.capturing = set(busy), set(capturing)
    assert driver.is_idle(0, known=[0, FOREIGN]) is is_idle
    assert [stream for (stream,) in bindings.called("cuStreamQuery")] == queried

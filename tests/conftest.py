"""Fixtures of all tests, and which marks need which hardware."""

from __future__ import annotations

import ctypes
import gc
import os
import subprocess
import sys
import textwrap
import types
from pathlib import Path

import pytest
import torch

import bufpool
import bufpool.place as place_module
import bufpool.pool as pool_module
from bufpool import driver, handout, host_memory, pin, process, slot
from bufpool.driver import DeviceOutOfMemoryError
from bufpool.errors import DriverError
from bufpool.handout import OwnerHandout

ROOT = Path(__file__).resolve().parent.parent


def _missing(mark: str) -> str | None:
    """What a marked test needs and this machine lacks; None if nothing."""
    if not torch.cuda.is_available():
        return "torch.cuda.is_available() is False: torch finds no CUDA device"
    if mark == "sm90":
        capability = torch.cuda.get_device_capability()
        if capability != (9, 0):
            return f"needs compute capability 9.0, device 0 has {capability[0]}.{capability[1]}"
    if mark == "multi_gpu" and torch.cuda.device_count() < 2:
        return f"needs 2 CUDA devices, torch finds {torch.cuda.device_count()}"
    return None


def pytest_collection_modifyitems(items):
    for mark in ("gpu", "sm90", "multi_gpu"):
        marked = [item for item in items if item.get_closest_marker(mark)]
        reason = _missing(mark) if marked else None
        if reason:
            for item in marked:
                item.add_marker(pytest.mark.skip(reason=reason))


@pytest.fixture(autouse=True, scope="module")
def _quick_collections():
    """Many tests run the collector; it need not walk each time through all of torch and what modules before brought in."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.fixture
def spec():
    """The outputs of a small attention kernel: 1024 and 32 bytes a row."""
    return bufpool.OutputSpec(out=((8, 64), torch.bfloat16), lse=((8,), torch.float32))


@pytest.fixture
def make_pool(request):
    """Makes pools; those still open at the end of the test are closed."""
    if "fake_cuda" in request.fixturenames:
        request.getfixturevalue("fake_cuda")  # its devices outlive the pools
    pools = []

    def make(*args, **options):
        pools.append(bufpool.OutputPool(*args, **options))
        return pools[-1]

    yield make
    for pool in pools:
        pool.close()
    pools.clear()
    gc.collect()


@pytest.fixture
def pool(make_pool):
    return make_pool()


@pytest.fixture
def run_script():
    """Runs a script (text, or the path of a file) in another interpreter, from the root; returns the finished process.

    ``before`` is what its command line starts with, such as another program that runs it.
    """

    def run(script, *args, timeout=120, before=(), options=(), **environment):
        source = [str(script)] if isinstance(script, Path) else ["-c", textwrap.dedent(script)]
        return subprocess.run(
            [*map(str, before), sys.executable, *options, *source, *map(str, args)],
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": str(ROOT), **environment},
            capture_output=True,
            text=True,
            timeout=timeout,
            check=False,
        )

    return run


class FakeDriver:
    """Virtual memory of one device, out of host memory; checks its caller and fails at the call it is told to.

    Rules of the real driver that it enforces: a reservation is freed as the exact pair it was made with and with nothing
    mapped in it; a mapping covers a whole handle inside one reservation, overlaps nothing and is unmapped whole; access is
    set on a whole mapping. Physical memory is in use until its handle is released and it is unmapped.
    """

    def __init__(self, granule=64 * 1024, device_bytes=64 * 2**20, memory_bytes=None):
        self.granule = granule
        self.device_bytes = device_bytes
        self.memory_bytes = device_bytes if memory_bytes is None else memory_bytes
        self.reservations = {}
        self.handles = {}
        self.mappings = {}
        self.accessible = set()
        self.calls = []
        self.fail_at = None
        self.failure = DriverError("injected failure")
        self.interrupt_at = None
        self._next_handle = 1

    def _enter(self, name, nbytes=0):
        self.calls.append(name)
        if self.fail_at is not None and len(self.calls) == self.fail_at:
            raise self.failure

    def _leave(self):
        if self.interrupt_at is not None and len(self.calls) == self.interrupt_at:
            raise KeyboardInterrupt

    def interrupt_after(self, calls):
        """Let the ``calls``-th call from now on take effect and then raise KeyboardInterrupt, as a signal handler does."""
        self.interrupt_at = len(self.calls) + calls

    def fail_after(self, calls, failure=None):
        """Fail at the ``calls``-th call from now on."""
        self.fail_at = len(self.calls) + calls
        self.failure = failure or DriverError("injected failure")

    @property
    def used_bytes(self):
        mapped = {handle: nbytes for nbytes, handle in self.mappings.values()}
        return sum({**mapped, **self.handles}.values())

    @property
    def mapped_bytes(self):
        return sum(nbytes for nbytes, _ in self.mappings.values())

    @property
    def is_clean(self):
        return not (self.reservations or self.handles or self.mappings)

    def is_usable(self, address, nbytes):
        """Whether each byte of the range is mapped and accessible."""
        while nbytes > 0:
            found = next((a for a in self.accessible if a <= address < a + self.mappings[a][0]), None)
            if found is None:
                return False
            step = found + self.mappings[found][0] - address
            address, nbytes = address + step, nbytes - step
        return True

    def address_reserve(self, nbytes):
        self._enter("address_reserve")
        assert nbytes > 0
        assert nbytes % self.granule == 0
        address = host_memory.reserve(nbytes)
        if address is None:
            raise DeviceOutOfMemoryError(f"no address space for {nbytes} bytes", nbytes)
        self.reservations[address] = nbytes
        self._leave()
        return address

    def address_free(self, address, nbytes):
        self._enter("address_free")
        assert self.reservations.get(address) == nbytes, "not the exact pair of one reservation"
        assert not any(address <= a < address + nbytes for a in self.mappings), "something is mapped in the range"
        host_memory.release(address, nbytes)
        del self.reservations[address]
        self._leave()

    def create(self, nbytes):
        self._enter("create")
        assert nbytes > 0
        assert nbytes % self.granule == 0
        if self.used_bytes + nbytes > self.memory_bytes:
            raise DeviceOutOfMemoryError(f"no memory for {nbytes} bytes", nbytes)
        handle, self._next_handle = self._next_handle, self._next_handle + 1
        self.handles[handle] = nbytes
        self._leave()
        return handle

    def map(self, address, nbytes, handle):
        self._enter("map")
        assert self.handles[handle] == nbytes, "not the whole handle"
        assert any(a <= address and address + nbytes <= a + n for a, n in self.reservations.items()), "not reserved"
        assert not any(a < address + nbytes and address < a + n for a, (n, _) in self.mappings.items()), "mapped already"
        self.mappings[address] = (nbytes, handle)
        self._leave()

    def set_access(self, address, nbytes):
        self._enter("set_access")
        assert self.mappings[address][0] == nbytes
        self.accessible.add(address)
        self._leave()

    def unmap(self, address, nbytes):
        self._enter("unmap")
        if address not in self.mappings:
            raise DriverError("nothing is mapped there")
        assert self.mappings[address][0] == nbytes, "a mapping is unmapped whole"
        del self.mappings[address]
        self.accessible.discard(address)
        host_memory.give_back(address, nbytes)  # what was there is gone
        self._leave()

    def release(self, handle):
        self._enter("release")
        if handle not in self.handles:
            raise DriverError("no such handle")
        del self.handles[handle]
        self._leave()


@pytest.fixture
def make_driver():
    return FakeDriver


class _Like(torch.Tensor):
    """A tensor that says it is on a CUDA device."""

    @property
    def device(self):
        return self.home


class FakeCuda:
    """Eight CUDA devices out of host memory, behind the real pool, slots and arenas."""

    def __init__(self):
        self.drivers = [FakeDriver() for _ in range(8)]
        self.stream = 0
        self.current = 0
        self.capture = None
        """Id of the capture that the current stream takes part in."""
        self.capturing = None
        """A stream, of whatever thread, that captures."""
        self.synchronized = []
        self.emptied = 0
        self.idle = False  # whether the work of all streams is done
        self.graphs = {}

    def like(self, index=None):
        tensor = torch.zeros(1).as_subclass(_Like)
        tensor.home = torch.device("cuda", index)
        return tensor

    def end_graph(self, capture):
        """The graph of a capture and everything made from it are gone."""
        post = ctypes.CFUNCTYPE(None, ctypes.c_void_p)
        for resource, destroy in self.graphs.pop(capture):
            post(destroy)(resource)

    def is_usable(self, tensor, index=0):
        return self.drivers[index].is_usable(tensor.data_ptr(), tensor.numel() * tensor.itemsize)


@pytest.fixture
def fake_cuda(monkeypatch):
    fake = FakeCuda()
    monkeypatch.setattr(driver, "is_available", lambda: True)
    monkeypatch.setattr(driver, "supports_virtual_memory", lambda index: True)
    monkeypatch.setattr(driver, "capture_of", lambda index, stream: fake.capture and (fake.capture, fake.capture))
    monkeypatch.setattr(driver, "is_capturing", lambda stream: fake.capturing == stream or bool(fake.capture))
    monkeypatch.setattr(driver, "is_idle", lambda index, known=(): fake.idle)
    monkeypatch.setattr(driver, "is_stream_idle", lambda index, stream: fake.idle)
    monkeypatch.setattr(driver, "capturing_stream", lambda index, known=(): fake.capturing)
    monkeypatch.setattr(driver, "synchronize", fake.synchronized.append)
    monkeypatch.setattr(slot, "cuda_driver", lambda index: fake.drivers[index])
    monkeypatch.setattr(
        slot, "make_handout", lambda spec, device, addresses, probe: OwnerHandout(spec, torch.device("cpu"), addresses)
    )

    def retain(graph, resource, destroy):
        fake.graphs.setdefault(graph, []).append((resource, destroy))

    monkeypatch.setattr(pin, "retain_in_graph", retain)
    for module in (place_module, pool_module):
        monkeypatch.setattr(module, "raw_stream", lambda index: fake.stream)
    monkeypatch.setattr(torch.cuda, "init", lambda: None)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: len(fake.drivers))
    monkeypatch.setattr(torch.cuda, "current_device", lambda: fake.current)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device=None: (0, fake.drivers[0].memory_bytes))
    monkeypatch.setattr(
        torch.cuda,
        "get_device_properties",
        lambda device=None: types.SimpleNamespace(total_memory=fake.drivers[0].memory_bytes),
    )

    def empty_cache():
        fake.emptied += 1

    monkeypatch.setattr(torch.cuda, "empty_cache", empty_cache)
    yield fake
    fake.capturing = fake.capture = None
    for device in fake.drivers:
        device.failure = None  # its traceback holds results of the test
    for capture in list(fake.graphs):
        fake.end_graph(capture)
    gc.collect()
    process.release_retired()
    process.forget_ended_captures()
    assert all(device.is_clean for device in fake.drivers), "memory of a device was not given back"


@pytest.fixture(params=["post", "owner"])
def each_handout(request, monkeypatch):
    """Both ways to make tensors over given memory, one after the other."""
    monkeypatch.setitem(handout._posts, "cpu", request.param == "post")
    return request.param


@pytest.fixture
def q():
    """An input on the host."""
    return torch.zeros(1)


# On CUDA devices


@pytest.fixture
def value():
    """One number on the device: what a kernel writes everywhere. A graph reads it anew at every replay."""
    return torch.zeros(1, device="cuda")


@pytest.fixture
def mib_spec():
    """1 MiB a row."""
    return bufpool.OutputSpec(block=((2**20,), torch.uint8))


@pytest.fixture
def nothing_left_queued():
    """The next test finds an idle device and an empty cache."""
    yield
    torch.cuda.synchronize()
    gc.collect()
    torch.cuda.empty_cache()

"""Facts on which docs/adapters-mempool.md rests: why there is no adapter behind torch.cuda.MemPool."""

from __future__ import annotations

import subprocess

import pytest
import torch

from bufpool import OutputPool


def test_a_python_callback_under_a_native_lock_deadlocks(run_script):
    """Thread A holds a native lock and waits for the GIL in a callback; thread B holds the GIL and waits for the lock.

    ``pthread_once`` runs a callback under a lock of its own, as torch's allocator runs a pluggable one under its mutex.
    ``PyDLL`` keeps the GIL in a call, as the end of a tensor does.
    """
    script = """
        import ctypes, faulthandler, sys, threading, time
        once = ctypes.c_int(0)
        called = threading.Event()
        release_gil = ctypes.CDLL(None).pthread_once
        keep_gil = ctypes.PyDLL(None).pthread_once

        @ctypes.CFUNCTYPE(None)
        def callback():
            called.set()
            time.sleep(0.5)  # gives the GIL up, as any Python code does now and then

        first = threading.Thread(target=release_gil, args=(ctypes.byref(once), callback), daemon=True)
        first.start()
        called.wait()
        print("before", flush=True)
        keep_gil(ctypes.byref(once), callback)
        print("after", flush=True)
    """
    with pytest.raises(subprocess.TimeoutExpired) as caught:
        run_script(script, timeout=5)
    said = caught.value.stdout
    assert (said.decode() if isinstance(said, bytes) else said).split() == ["before"]


def test_an_exception_in_a_callback_is_lost(run_script):
    """The native caller goes on with whatever its return register holds."""
    script = """
        import ctypes
        @ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_void_p)
        def allocate(nbytes, device, stream):
            raise MemoryError("need, have and limit")
        address = ctypes.cast(allocate, ctypes.c_void_p).value
        native = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_void_p)(address)
        native(64, 0, None)
        print("went on")
    """
    run = run_script(script)
    assert (run.returncode, run.stdout.strip()) == (0, "went on")
    assert "Exception ignored" in run.stderr


def test_no_adapter_is_shipped():
    with pytest.raises(ModuleNotFoundError):
        __import__("bufpool.adapters.torch_mempool")


needs_mempool = pytest.mark.skipif(not hasattr(torch.cuda, "MemPool"), reason="torch.cuda.MemPool is not there")


@pytest.mark.gpu
@needs_mempool
def test_a_mempool_in_force_gives_the_pool_nothing(pool, spec):
    q = torch.zeros(1, device="cuda")
    mempool = torch.cuda.MemPool()
    with torch.cuda.use_mem_pool(mempool):
        result = pool.acquire(spec, 5000, q)
        theirs = torch.empty(2**20, device="cuda")
    segments = [(s["address"], s["total_size"]) for s in mempool.snapshot()]
    assert any(start <= theirs.data_ptr() < start + size for start, size in segments)
    assert not any(start <= result.out.data_ptr() < start + size for start, size in segments)


@pytest.mark.gpu
@needs_mempool
def test_a_torch_arena_draws_from_the_mempool_in_force(spec):
    q = torch.zeros(1, device="cuda")
    mempool = torch.cuda.MemPool()
    with OutputPool(arena="torch") as pool:
        with torch.cuda.use_mem_pool(mempool):
            pool.reserve(spec, 5000, q)
        result = pool.acquire(spec, 5000, q)
        segments = [(s["address"], s["total_size"]) for s in mempool.snapshot()]
        assert any(start <= result.out.data_ptr() < start + size for start, size in segments)
        assert pool.stats().arena == "torch"
        del result

"""Import, forks, spawned children, exits and limits of the operating system: each in a process of its own."""

from __future__ import annotations

import os
import sys

import pytest

FORK_OPTIONS = ("-W", "ignore::DeprecationWarning")  # CPython warns about every fork of a process with threads

SETUP = """
import torch, bufpool
spec = bufpool.OutputSpec(out=((8, 64), torch.bfloat16), lse=((8,), torch.float32))
q = torch.zeros(1)
"""


def assert_quiet(done):
    assert (done.returncode, done.stderr) == (0, "")


# Import


def test_an_import_starts_no_cuda_and_touches_no_folder_or_environment(run_script, tmp_path):
    done = run_script(
        """
        import os, sys, threading
        import numpy, torch
        import torch.utils.dlpack

        read = []

        class Watched(dict):
            def __getitem__(self, key):
                read.append(key)
                return super().__getitem__(key)
            def get(self, key, default=None):
                read.append(key)
                return super().get(key, default)
            def __contains__(self, key):
                read.append(key)
                return super().__contains__(key)

        made = []
        sys.addaudithook(lambda event, args: made.append((event, args)) if event in ("os.mkdir", "open", "os.fork",
                         "subprocess.Popen", "socket.connect") else None)
        torch.cuda.init = torch.cuda._lazy_init = lambda: made.append("cuda")
        os.environ = Watched(os.environ)
        os.getenv = lambda key, default=None: read.append(key) or default
        threads, modules = threading.active_count(), set(sys.modules)
        import bufpool
        assert read == [], read
        written = [call for call in made if call[0] != "open" or (call[1][1] or "r").strip("rb") != ""]
        assert written == [], written
        assert not torch.cuda.is_initialized()
        assert threading.active_count() == threads
        new = set(sys.modules) - modules
        assert not [name for name in new if name.split(".")[0] in ("cuda", "rich", "matplotlib")], new
        assert "bufpool.pool" in new
        """,
        HOME=str(tmp_path / "home"),
        PYTHONDONTWRITEBYTECODE="1",
    )
    assert_quiet(done)
    assert list(tmp_path.iterdir()) == []


def test_a_pool_can_be_made_and_closed_without_any_use(run_script):
    assert_quiet(run_script(SETUP + "bufpool.OutputPool().close(); bufpool.default_pool().close()"))


def test_the_first_pool_of_a_process_may_be_of_plain_torch_memory(run_script):
    done = run_script(
        SETUP
        + """
plain = bufpool.OutputPool(arena="torch")
for rows in (5, 500):
    outputs = plain.acquire(spec, rows, q)
    outputs.lse.fill_(3)
    assert bool((outputs.lse == 3).all())
    del outputs
pool = bufpool.OutputPool()
pool.acquire(spec, 5, q).lse.fill_(3)
kinds = {type(slot.handout).__name__ for one in (plain, pool) for slot in one._slots}
print(*kinds)
"""
    )
    assert_quiet(done)
    assert len(done.stdout.split()) == 1


# Exit


def test_the_interpreter_ends_quietly_with_live_pools_results_and_threads(run_script):
    done = run_script(
        SETUP
        + """
import logging, threading, time
logging.disable()
pool, other = bufpool.OutputPool(trace=True), bufpool.default_pool()
held = [one.acquire(spec, rows, q) for one in (pool, other) for rows in range(1, 12)]
exported = [held[0].lse.numpy(), memoryview(held[1].lse.numpy()), torch.utils.dlpack.to_dlpack(held[2].lse)]
weight = torch.ones(8, requires_grad=True)
loss = (held[3].lse * weight).sum()
cycle = [pool, held]
cycle.append(cycle)

def work(seconds):
    mine = other.acquire(spec, 5, q)
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        other.acquire(spec, 5, q).lse.fill_(1)
    threading.Event().wait()

def work_and_end():
    for rows in range(1, 500):
        other.acquire(spec, rows, q).lse.fill_(1)

daemon = threading.Thread(target=work, args=(0.1,), daemon=True)  # holds a result for ever
daemon.start()
threading.Thread(target=work_and_end).start()
time.sleep(0.3)  # a daemon inside a torch call at the end aborts the process, with or without a pool
"""
    )
    assert_quiet(done)


def test_the_interpreter_ends_quietly_when_finalizers_call_the_pool(run_script):
    done = run_script(
        SETUP
        + """
class Late:
    def __init__(self, pool, q):
        self.pool, self.q, self.me = pool, q, self
    def __del__(self):
        try:
            self.pool.acquire(spec, 5, self.q)
            self.pool.stats()
        except (NameError, TypeError, AttributeError, bufpool.BufpoolError if bufpool else Exception):
            pass

pool = bufpool.OutputPool()
late = [Late(pool, q) for _ in range(3)]
held = pool.acquire(spec, 5, q)
"""
    )
    assert done.returncode == 0
    assert "Segmentation" not in done.stderr


def test_an_exit_by_exception_is_the_exception_alone(run_script):
    done = run_script(SETUP + "held = bufpool.default_pool().acquire(spec, 5, q)\nraise SystemExit(7)")
    assert (done.returncode, done.stderr) == (7, "")


def test_results_that_live_in_an_exit_handler_are_readable(run_script):
    done = run_script(
        SETUP
        + """
import atexit
pool = bufpool.OutputPool()
held = pool.acquire(spec, 5, q)
held.lse.fill_(3)
def last():
    pool.acquire(spec, 500, q).lse.fill_(9)
    print(int(held.lse.sum()))
atexit.register(last)
"""
    )
    assert_quiet(done)
    assert int(done.stdout) == 3 * 40


# Forks


def test_a_forked_child_may_use_a_host_pool_of_its_parent(run_script):
    done = run_script(
        SETUP
        + """
import os
pool = bufpool.OutputPool()
held = pool.acquire(spec, 5, q)
held.lse.fill_(5)
pool.acquire(spec, 5, q)
child = os.fork()
mine = [pool.acquire(spec, rows, q) for rows in (5, 500, 7)]
for outputs in mine:
    outputs.lse.fill_(7 if child else 8)
pool.trim(); pool.stats(); pool.report()
assert all(bool((outputs.lse == (7 if child else 8)).all()) for outputs in mine)
assert bool((held.lse == 5).all())
del mine, outputs, held
pool.sleep(); pool.wake(); pool.close()
if child:
    _, status = os.waitpid(child, 0)
    raise SystemExit(os.waitstatus_to_exitcode(status))
""",
        options=FORK_OPTIONS,
    )
    assert_quiet(done)


def test_a_fork_while_another_thread_is_inside_the_pool_leaves_the_child_no_lock(run_script):
    done = run_script(
        SETUP
        + """
import os, threading
pool = bufpool.OutputPool(max_slots=4)
stop = threading.Event()

def work():
    rows = 0
    while not stop.is_set():
        rows = rows % 3000 + 37
        pool.acquire(spec, rows, q)
        if rows % 5 == 0:
            pool.trim()

threads = [threading.Thread(target=work, daemon=True) for _ in range(3)]
for thread in threads:
    thread.start()
codes = []
for _ in range(20):
    child = os.fork()
    if child == 0:
        import signal
        signal.alarm(20)
        outputs = pool.acquire(spec, 10, q)
        outputs.lse.view(-1)[0] = 3
        pool.stats()
        bufpool.OutputPool().acquire(spec, 10, q)
        os._exit(0)
    codes.append(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
stop.set()
for thread in threads:
    thread.join()
assert codes == [0] * 20, codes
""",
        options=FORK_OPTIONS,
    )
    assert_quiet(done)


def in_child(act):
    """Run ``act`` in a forked child; its text, and the child's exit code."""
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        code = 9
        try:
            os.write(write, str(act()).encode())
            code = 0
        except BaseException as error:
            os.write(write, f"{type(error).__name__}: {error}".encode())
        finally:
            os._exit(code)
    os.close(write)
    with os.fdopen(read) as pipe:
        text = pipe.read()
    return text, os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("call", ["acquire", "reserve"])
def test_a_forked_child_gets_a_clear_error_for_device_memory_and_may_use_the_host(make_pool, fake_cuda, spec, q, call):
    pool = make_pool()
    held = pool.acquire(spec, 5, fake_cuda.like(0))
    pool.acquire(spec, 5, fake_cuda.like(0))
    text, code = in_child(lambda: getattr(pool, call)(spec, 5, fake_cuda.like(0)))
    assert code == 9
    assert text.startswith("BufpoolError: cuda:0: expected the process that started CUDA, got a forked child")
    assert "spawn" in text

    def on_host():
        outputs = pool.acquire(spec, 5, q)
        outputs.lse.fill_(3)
        total = int(outputs.lse.sum())
        del outputs
        pool.trim()
        pool.sleep()
        pool.wake()
        pool.close()
        return [len(device.calls) for device in fake_cuda.drivers], total

    before = [len(device.calls) for device in fake_cuda.drivers]
    del held
    text, code = in_child(on_host)
    assert (text, code) == (str((before, 120)), 0)
    held = pool.acquire(spec, 5, fake_cuda.like(0))
    assert all(fake_cuda.is_usable(tensor) for tensor in held)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_forked_child_is_told_even_if_the_pool_was_never_used(make_pool, fake_cuda, spec, monkeypatch):
    import torch

    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    pool = make_pool()
    text, code = in_child(lambda: pool.acquire(spec, 5, fake_cuda.like(0)))
    assert code == 9
    assert "got a forked child" in text


def test_a_spawned_child_has_pools_of_its_own(run_script, tmp_path):
    script = tmp_path / "spawns.py"
    script.write_text(
        "import multiprocessing, torch, bufpool\n"
        "SPEC = bufpool.OutputSpec(lse=((8,), torch.float32))\n"
        "def work(spec):\n"
        "    assert spec == SPEC\n"
        "    lse, = bufpool.default_pool().acquire(spec, 8, torch.zeros(1))\n"
        "    lse.fill_(3)\n"
        "    return lse.sum().item(), bufpool.default_pool().stats().acquires\n"
        "if __name__ == '__main__':\n"
        "    held = bufpool.default_pool().acquire(SPEC, 8, torch.zeros(1))\n"
        "    with multiprocessing.get_context('spawn').Pool(1) as workers:\n"
        "        print(*workers.apply(work, (SPEC,)))\n"
    )
    done = run_script(script)
    assert_quiet(done)
    assert done.stdout.split() == ["192.0", "1"]


def test_a_result_can_be_sent_to_another_process(run_script, tmp_path):
    script = tmp_path / "sends.py"
    script.write_text(
        "import torch, bufpool, torch.multiprocessing as mp\n"
        "def work(queue, done):\n"
        "    tensor = queue.get()\n"
        "    print(tuple(tensor.shape), tensor.sum().item())\n"
        "    del tensor\n"
        "    done.set()\n"
        "if __name__ == '__main__':\n"
        "    spec = bufpool.OutputSpec(lse=((8,), torch.float32))\n"
        "    pool = bufpool.OutputPool()\n"
        "    pool.reserve(spec, 1000, torch.zeros(1))\n"
        "    lse, = pool.acquire(spec, 5, torch.zeros(1))\n"
        "    lse.fill_(3)\n"
        "    context = mp.get_context('spawn')\n"
        "    queue, done = context.Queue(), context.Event()\n"
        "    child = context.Process(target=work, args=(queue, done))\n"
        "    child.start()\n"
        "    queue.put(lse)\n"
        "    done.wait(60)\n"
        "    child.join()\n"
    )
    done = run_script(script)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split("\n")[0] == "(5, 8) 120.0"


# Limits of the operating system


@pytest.mark.skipif(sys.platform != "linux", reason="RLIMIT_AS is Linux's")
def test_under_a_limit_of_address_space_the_reservation_is_halved_and_shown(run_script):
    done = run_script(
        SETUP
        + """
import resource
pool = bufpool.OutputPool()
used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (used + 2**30, resource.RLIM_INFINITY))
held = [pool.acquire(spec, 100, q) for _ in range(2)]
for number, outputs in enumerate(held):
    outputs.lse.fill_(number)
assert all(bool((outputs.lse == number).all()) for number, outputs in enumerate(held))
stats = pool.stats()
assert stats.short_reservations == 2, stats
assert stats.reserved_bytes < 2**30, stats
assert stats.arena == "host"
try:
    pool.acquire(spec, 2**21, q)
except bufpool.PoolLimitError as error:
    print(error)
assert all(bool((outputs.lse == number).all()) for number, outputs in enumerate(held))
del held, outputs
pool.acquire(spec, 100, q).lse.fill_(1)
"""
    )
    assert_quiet(done)
    assert "bytes" in done.stdout


@pytest.mark.skipif(sys.platform != "linux", reason="RLIMIT_AS is Linux's")
def test_no_address_space_at_all_is_a_limit_error_and_not_a_crash(run_script):
    done = run_script(
        SETUP
        + """
import resource
pool = bufpool.OutputPool()
used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (used + 2**24, resource.RLIM_INFINITY))
try:
    pool.acquire(spec, 100, q)
except bufpool.PoolLimitError as error:
    print(error)
resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
pool.acquire(spec, 100, q).lse.fill_(1)
assert pool.stats().slots == 1
"""
    )
    assert_quiet(done)
    assert "address range for 100 rows, refused by the system: expected at most" in done.stdout


def test_a_runner_in_a_forked_child_does_not_wait_for_a_thread_of_its_parent(run_script):
    done = run_script(
        """
        import os, signal, threading, torch, bufpool
        from bufpool import process
        from bufpool.graphs import GraphRunner
        spec, pool = bufpool.OutputSpec(x=((4,), torch.float32)), bufpool.OutputPool()
        inside, go = threading.Event(), threading.Event()
        def wait(x, allocator):
            with process.capture_turn:  # as it is held for a first call on CUDA
                inside.set()
                go.wait()
            return x
        runner = GraphRunner(wait, spec, [4], pool=pool, name="one")
        thread = threading.Thread(target=runner, kwargs={"x": torch.zeros(1, 4)})
        thread.start()
        inside.wait()
        child = os.fork()
        if child == 0:
            signal.alarm(10)
            GraphRunner(lambda x, allocator: x, spec, [4], pool=pool, name="one")(x=torch.zeros(1, 4))
            os._exit(0 if process.capture_turn.acquire(blocking=False) else 3)
        _, status = os.waitpid(child, 0)
        go.set()
        thread.join()
        print("status", status)
        """
    )
    assert "status 0" in done.stdout, done

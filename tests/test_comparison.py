"""``benchmarks/bench_comparison.py``: every contender has a line, a failure stays its own, peers give right outputs."""

from __future__ import annotations

import argparse
import json
import sys
import types
from pathlib import Path

import numpy
import pytest
import torch

from bufpool.allocator import FreshAllocator
from bufpool.cli.acquire_case import Setting, first_fault
from bufpool.ops.sparse_mla import sparse_mla_spec
from bufpool.workloads import held

CPU = torch.device("cpu")
ROOT = Path(__file__).resolve().parent.parent
SMALL = ("--rounds", "1", "--ramp-rows", "64", "--ramp-steps", "5")
NEED_CUDA = {
    "MemPool",
    "MemPool, entered once",
    "RMM pool",
    "RMM async",
    "CuPy, as_tensor",
    "CuPy, from_dlpack",
    "RMM behind torch",
    "torch.empty x3, segments",
}


@pytest.fixture(scope="module")
def bench():
    sys.path.insert(0, str(ROOT / "benchmarks"))
    try:
        import bench_comparison
    finally:
        sys.path.pop(0)
    return bench_comparison


@pytest.fixture
def peers(monkeypatch):
    """RMM and CuPy out of numpy: what the adapters ask of them, on the host."""
    made = []

    class DeviceBuffer(numpy.ndarray):
        def __new__(cls, *, size, mr):
            assert mr in made
            return numpy.empty(size, numpy.uint8)

    def resource(*arguments, **options):
        made.append((arguments, tuple(options.items())))
        return made[-1]

    names = ("PoolMemoryResource", "CudaMemoryResource", "CudaAsyncMemoryResource")
    rmm = types.SimpleNamespace(DeviceBuffer=DeviceBuffer, mr=types.SimpleNamespace(**dict.fromkeys(names, resource)))
    monkeypatch.setitem(sys.modules, "rmm", rmm)
    monkeypatch.setitem(sys.modules, "cupy", types.SimpleNamespace(empty=numpy.empty))
    return made


def test_every_contender_has_a_line_and_figures_or_a_reason(bench, capsys):
    assert bench.main(["--json", *SMALL]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert (facts["device"], facts["rows"], facts["ramp_needed_bytes"]) == ("cpu", 16, 64 * 132_096)
    contenders = facts["contenders"]
    assert list(contenders) == list(bench.NAMES)
    assert {name for name, each in contenders.items() if each["status"] == "needs CUDA"} == NEED_CUDA
    for name in set(contenders) - NEED_CUDA:
        each = contenders[name]
        assert each["status"] == "measured"
        assert set(each["acquire_us"]) == set(each["pool_us"]) == {"constant", "unseen"}
        assert all(us > 0 for us in each["acquire_us"].values())
        assert each["keeps_held"] is (name != "grow_only")
        assert each["ramp_short_rows"] is None
    assert contenders["pool"]["pool_us"] == contenders["pool"]["acquire_us"]
    assert contenders["pool"]["ramp_addresses"] == 1
    assert contenders["fresh"]["ramp_bytes"] == 64 * 132_096
    assert contenders["grow_only"]["ramp_bytes"] == (64 + 48) * 132_096  # rows 1, 16, 32, 48, 64
    assert 1 <= contenders["pool"]["ramp_bytes"] / (64 * 132_096) < 1.01


def test_the_table_is_markdown_and_names_what_is_missing(bench, capsys):
    assert bench.main([*SMALL]) == 0
    title, heads, rule, *lines = capsys.readouterr().out.splitlines()
    assert title == f"cpu, torch {torch.__version__}, h_q 128, 16 rows"
    table = [line for line in lines if line.startswith("| ")]
    assert [line.split("|")[1].strip() for line in table] == list(bench.NAMES)
    assert {line.count("|") for line in [heads, rule, *table]} == {10}
    assert len({len(line) for line in [heads, rule, *table]}) == 1
    assert set(rule) == set("|-: ")
    assert lines[len(table) :] == [f"not measured: {name}: needs CUDA" for name in bench.NAMES if name in NEED_CUDA]
    (pool,) = (line for line in table if line.startswith("| pool "))
    assert [cell.strip() for cell in pool.split("|")][3::2] == ["1.00", "1.00", "0.01", "1"]


@pytest.mark.parametrize("name", ["RMM pool", "RMM async", "CuPy, as_tensor", "CuPy, from_dlpack"])
def test_adapters_of_peers_give_outputs_of_their_own(bench, peers, name):
    allocator = bench.CONTENDERS[name].make()
    setting = Setting.of(held((7,), 2), 3, CPU)
    assert first_fault(allocator, setting) is None
    spec = sparse_mla_spec(3)
    outputs = allocator.acquire(spec, 5, setting.like)
    assert type(outputs) is spec.outputs_type
    assert all(tensor.is_contiguous() for tensor in outputs)
    if name == "RMM pool":
        upstream, pool = peers
        assert pool == ((upstream,), (("initial_pool_size", 2**21),))


def test_a_peer_that_is_not_there_is_told_from_one_that_is_broken(bench, monkeypatch, tmp_path):
    device = argparse.Namespace(type="cuda")
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "broken_peer.py").write_text("raise ImportError('libpeer.so: cannot open\\nshared object')\n")
    assert bench.missing("no_such_peer", True, device) == "not installed (No module named 'no_such_peer')"
    assert bench.missing("broken_peer", True, device) == "failed: ImportError: libpeer.so: cannot open shared object"
    assert bench.missing("json", True, device) is None
    assert bench.missing("json", True, CPU) == "needs CUDA"
    assert bench.missing(None, False, CPU) is None


class Failing(FreshAllocator):
    """Serves so many calls, and raises then."""

    def __init__(self, calls, error):
        self.calls, self.error = calls, error

    def acquire(self, spec, rows, like):
        self.calls -= 1
        if self.calls < 0:
            raise self.error
        return super().acquire(spec, rows, like)


def run(bench, **more):
    contenders = {name: bench.CONTENDERS[name] for name in ("fresh", "pool")} | more
    return bench.measure(contenders, CPU, bench.workloads_of(16, 1), bench.ramp_of(64, 5))


@pytest.mark.parametrize("calls", [0, 3, 100])  # in the check, in the ramp, while time is taken
def test_a_contender_that_fails_says_so_and_the_others_go_on(bench, calls):
    failing = bench.Contender(lambda: Failing(calls, RuntimeError("lost\nits way")), needs_cuda=False)
    found = run(bench, failing=failing)
    assert found["failing"].status == "failed: RuntimeError: lost its way"
    assert found["fresh"].status == found["pool"].status == "measured"
    assert set(found["fresh"].acquire_us) == {"constant", "unseen"}
    assert bench.cells(found["failing"], 1) == ["-"] * 8


def test_one_that_overwrites_what_is_held_is_no_contender_unless_it_is_known_to(bench):
    cache = bench.CONTENDERS["grow_only"].make
    found = run(bench, known=bench.CONTENDERS["grow_only"], unknown=bench.Contender(cache, needs_cuda=False))
    assert (found["known"].status, found["known"].keeps_held) == ("measured", False)
    assert found["unknown"].status == "failed: out: expected a held result to keep its 0, got 3"


def test_memory_that_runs_out_in_the_ramp_is_a_figure(bench):
    allocator = iter([Failing(9, None), Failing(2, MemoryError()), *[FreshAllocator()] * 9])
    found = run(bench, short=bench.Contender(lambda: next(allocator), needs_cuda=False))
    assert found["short"].status == "measured"
    assert found["short"].ramp_short_rows == 32  # the third of 1, 16, 32, 48, 64
    assert found["short"].ramp_addresses in (1, 2)
    assert set(found["short"].acquire_us) == {"constant", "unseen"}
    assert bench.cells(found["short"], 1)[5].endswith(", none left at 32 rows")


ARGUMENTS = argparse.Namespace(rows=16, rounds=1, ramp_rows=64, ramp_steps=5)


@pytest.fixture
def on_host(bench, monkeypatch):
    """Processes of their own are begun though there is no CUDA device."""
    monkeypatch.setattr(bench, "missing", lambda *_: None)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))


@pytest.mark.usefixtures("on_host")
def test_a_process_of_its_own_gives_the_figures_of_its_contender(bench):
    found = bench.measure_in_child("segments", ARGUMENTS, CPU)
    assert found.status == "measured"
    assert set(found.acquire_us) == set(found.pool_us) == {"constant", "unseen"}
    assert found.acquire_us != found.pool_us
    assert found.keeps_held is True


@pytest.mark.usefixtures("on_host")
def test_a_process_of_its_own_that_fails_says_why(bench, monkeypatch, tmp_path):
    (tmp_path / "rmm.py").write_text("raise ImportError('no librmm')\n")
    contender, module, _ = bench.CHILDREN["rmm"]
    monkeypatch.setitem(bench.CHILDREN, "rmm", (contender, module, {"PYTHONPATH": f"{tmp_path}:{ROOT}"}))
    found = bench.measure_in_child("rmm", ARGUMENTS, CPU)
    assert found.status == "failed: exit code 1: ImportError: no librmm"
    monkeypatch.setattr(bench, "CHILD_SECONDS", 0.01)
    assert bench.measure_in_child("segments", ARGUMENTS, CPU).status == ("failed: expected an end within 0.01 s, got none")


@pytest.mark.gpu
def test_on_cuda(bench, capsys):
    assert bench.main(["--device", "cuda", "--json", "--rows", "64", *SMALL]) in (0, 1)
    contenders = json.loads(capsys.readouterr().out)["contenders"]
    assert list(contenders) == list(bench.NAMES)
    for name in ("torch.empty x3", "fresh", "grow_only", "pool", "MemPool", "MemPool, entered once"):
        assert contenders[name]["status"] == "measured"
    assert contenders["torch.empty x3, segments"]["status"] == "measured"
    assert contenders["pool"]["ramp_addresses"] == 1
    for name, each in contenders.items():
        assert each["status"] == "measured" or name.startswith(("RMM", "CuPy")), name

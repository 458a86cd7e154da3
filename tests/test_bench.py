"""``bufpool bench`` and what the benchmarks share with it: values, JSON, exit codes, figures."""

import argparse
import contextlib
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from bufpool.allocator import FreshAllocator
from bufpool.cli import bench, device_clock, kernel_case, main, timing
from bufpool.cli.acquire_case import ALLOCATORS, Setting, first_fault, make_case, time_cold
from bufpool.cli.baselines import GrowOnlyAllocator
from bufpool.cli.device_clock import input_sets, time_launches
from bufpool.cli.footprint import pool_bytes
from bufpool.cli.kernel_case import Gemm, KernelCase, KernelShape
from bufpool.cli.plot import plot_acquire, plot_kernels, plot_workload_bytes
from bufpool.cli.table import print_sections
from bufpool.cli.timing import on_streams, time_loops
from bufpool.ops.sparse_mla import sparse_mla_spec
from bufpool.pool import OutputPool
from bufpool.workloads import Workload, constant, held, many_streams, ramp, suite, two_lanes

CPU = torch.device("cpu")
ROOT = Path(__file__).resolve().parent.parent
ROW_BYTES = 128 * 512 * 2 + 2 * 128 * 4


@pytest.fixture
def trace(tmp_path):
    path = tmp_path / "trace.csv"
    path.write_text("ContextTokens,Other\n9000,3\n10,2\n")
    return str(path)


@pytest.fixture
def bench_json(capsys):
    def run(*options, code=0):
        assert main(["bench", "--quick", "--json", *options]) == code
        out, err = capsys.readouterr()
        assert out.count("\n") == 1
        return json.loads(out), err

    return run


# --- The command ---


def test_json_holds_the_figures(bench_json):
    figures, err = bench_json()
    assert (figures["device"], figures["arena"], figures["trace"]) == ("cpu", "host", "synthetic")
    assert (figures["seed"], figures["quick"], figures["heads"]) == (0, True, 128)
    assert figures["torch"] == torch.__version__
    workloads = figures["workloads"]
    assert list(workloads) == ["constant", "ramp", "trace", "held-4"]
    page = os.sysconf("SC_PAGE_SIZE")
    needed = {"constant": 16, "ramp": 1024, "held-4": 5 * 16}
    for name, facts in workloads.items():
        assert set(facts["acquire_us"]) == {"fresh", "grow_only", "pool"}
        for allocator, us in facts["acquire_us"].items():
            low, high = facts["quartiles_us"][allocator]
            assert 0 < low <= us <= high < 100_000
        rows = needed.get(name, facts["rows"]["max"])
        assert facts["needed_bytes"] >= rows * ROW_BYTES if name == "trace" else facts["needed_bytes"] == rows * ROW_BYTES
        assert facts["needed_bytes"] <= facts["mapped_bytes"] <= facts["needed_bytes"] + 3 * page * facts["slots"]
        assert facts["mapped_per_needed"] == round(facts["mapped_bytes"] / facts["needed_bytes"], 4)
        assert facts["correct"] == {"fresh": True, "grow_only": name != "held-4", "pool": True}
    assert [facts["cold"] for facts in workloads.values()] == [False, True, False, False]
    assert [facts["rounds"] for facts in workloads.values()] == [5, 2, 5, 5]
    assert workloads["ramp"]["calls"] == 40
    assert workloads["ramp"]["grows"] == 40
    assert workloads["ramp"]["baseline_bytes"] == {"fresh": 1024 * ROW_BYTES, "grow_only": (1024 + 997) * ROW_BYTES}
    assert workloads["held-4"]["slots"] == 5
    assert workloads["held-4"]["baseline_bytes"] == {"fresh": 80 * ROW_BYTES, "grow_only": 16 * ROW_BYTES}
    assert figures["kernels"] == []
    assert figures["skipped"] == {
        "streams-8": "expected a CUDA device, which has streams, got cpu",
        "kernels": "device: expected a CUDA device, got cpu",
    }
    lines = err.splitlines()
    assert lines[-1].startswith("bufpool bench: 17 of 17 rounds, ")
    assert len(lines) == 10


def test_trace_hold_and_streams_are_those_asked_for(bench_json, trace):
    figures, _ = bench_json("--trace", trace, "--hold", "2", "--streams", "3")
    assert list(figures["workloads"]) == ["constant", "ramp", "trace", "held-2"]
    assert "streams-3" in figures["skipped"]
    assert figures["trace"] == trace
    facts = figures["workloads"]["trace"]
    assert (facts["rows"], facts["calls"]) == ({"min": 10, "max": 8192}, 3)  # 8192, 808, 10
    assert facts["needed_bytes"] == 8192 * ROW_BYTES
    assert figures["workloads"]["held-2"]["slots"] == 3
    other, _ = bench_json("--trace", trace, "--column", "Other")
    assert other["workloads"]["trace"]["rows"] == {"min": 2, "max": 3}


def test_rows_and_bytes_are_fixed_by_the_seed(bench_json):
    def fixed(seed):
        workloads = bench_json("--seed", seed)[0]["workloads"]
        keys = ("rows", "calls", "slots", "grows", "mapped_bytes", "needed_bytes", "baseline_bytes", "correct")
        return {name: {key: facts[key] for key in keys} for name, facts in workloads.items()}

    first = fixed("5")
    assert first == fixed("5")
    assert first["trace"] != fixed("6")["trace"]


def columns(line):
    return re.split(r"  +", line.strip())


def test_table_is_one_and_last(capsys):
    assert main(["bench", "--quick"]) == 0
    out, err = capsys.readouterr()
    lines = out.splitlines()
    assert lines[0].startswith(f"bufpool bench: cpu, torch {torch.__version__}, h_q 128, synthetic trace, host arena")
    assert columns(lines[1]) == ["host us per acquire", "fresh", "grow-only", "pool", "pool / fresh", "pool / grow-only"]
    assert columns(lines[6]) == ["most bytes", "fresh", "grow-only", "pool, mapped", "needed", "mapped / needed"]
    times = {name: cells for name, *cells in map(columns, lines[2:6])}
    assert list(times) == ["constant", "ramp, cold", "trace", "held-4"]
    fresh, grow_only, pool, *ratios = map(float, times["constant"])
    assert ratios == pytest.approx([pool / fresh, pool / grow_only], abs=0.01)
    assert times["held-4"][1].endswith(" *")
    assert columns(lines[8]) == ["ramp", "129.00 MiB", "254.60 MiB", "129.00 MiB", "129.00 MiB", "1.000"]
    assert lines[11] == "  * overwrites results that are still held or in use on another stream"
    assert lines[12] == "  not measured: streams-8: expected a CUDA device, which has streams, got cpu"
    assert lines[13] == "  not measured: kernels: device: expected a CUDA device, got cpu"
    assert len(lines) == 14
    assert all(line.startswith("bufpool bench: ") for line in err.splitlines())


def test_table_on_a_terminal(capsys, monkeypatch):
    pytest.importorskip("rich")
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    monkeypatch.setenv("COLUMNS", "100")
    print_sections("title", [(("time", "a"), [["x", "1.5"]]), (("bytes", "a", "b"), [["y", "[2]", "3"]])], ["[a] note"])
    out = capsys.readouterr().out
    assert "title" in out
    for cell in ("time", "1.5", "bytes", "[2]"):
        assert cell in out
    assert out.count("├") == 1
    assert out.splitlines()[-1] == "[a] note"


def test_a_pool_that_overwrites_is_found(bench_json, monkeypatch):
    class Aliasing(OutputPool):
        def acquire(self, spec, rows, like):
            first = super().acquire(spec, 2 * rows, like)
            super().acquire(spec, rows, like)
            self.kept = getattr(self, "kept", None) or first
            return spec.outputs_type(*(tensor[:rows] for tensor in self.kept))

    monkeypatch.setitem(ALLOCATORS, "pool", Aliasing)
    figures, err = bench_json(code=1)
    assert figures["workloads"]["held-4"]["correct"]["pool"] is False
    assert figures["workloads"]["constant"]["correct"]["pool"] is True
    assert err.splitlines()[-1] == ("bufpool bench: held-4: pool: out: expected a held result to keep its 0, got 12")


# --- What cannot be had: one line, exit code 2 ---


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--trace", "nowhere.csv"], "--trace: nowhere.csv: expected a readable CSV file, got No such file"),
        (["--device", "abacus"], "--device: expected cpu"),
        (["--device", "cuda:99"], "--device: expected cpu"),
        (["--seed", "-1"], "argument --seed: expected an integer from 0 to"),
        (["--hold", "0"], "argument --hold: expected an integer from 1 to 64, got '0'"),
        (["--streams", "1"], "argument --streams: expected an integer from 2 to 32, got '1'"),
        (["--plot", "no/where/at/all"], "--plot: expected a folder, or a name for one in a folder, got 'no/where/at/all'"),
        (["--plot", __file__], "--plot: expected a folder, or a name for one in a folder, got "),
        (["--rounds", "3"], "unrecognized arguments: --rounds"),
    ],
)
def test_wrong_arguments_are_one_line_and_exit_code_2(options, message, capsys):
    try:
        code = main(["bench", *options])
    except SystemExit as e:
        code = e.code
    out, err = capsys.readouterr()
    assert code == 2
    assert out == ""
    assert err.count("\n") == 1
    assert err.startswith("bufpool")
    assert message in err


def test_wrong_column_is_named(trace, capsys):
    assert main(["bench", "--trace", trace, "--column", "Tokens"]) == 2
    assert capsys.readouterr().err == (
        f"bufpool bench: --trace: {trace}: expected a column 'Tokens', got columns ContextTokens, Other\n"
    )


def test_plot_without_matplotlib_names_the_extra_before_any_work(tmp_path, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    assert main(["bench", "--plot", str(tmp_path / "figures")]) == 2
    assert capsys.readouterr().err.startswith("bufpool bench: --plot: expected matplotlib (pip install 'bufpool[plot]')")
    assert not (tmp_path / "figures").exists()


# --- Figures ---


def png_size(path):
    data = path.read_bytes()
    assert data[:8] == b"\x89PNG\r\n\x1a\n"
    return int.from_bytes(data[16:20], "big"), int.from_bytes(data[20:24], "big")


def test_plot_writes_the_figures_of_what_was_measured(bench_json, tmp_path):
    pytest.importorskip("matplotlib")
    folder = tmp_path / "figures"
    bench_json("--plot", str(folder))
    assert sorted(path.name for path in folder.iterdir()) == ["acquire.png", "bytes.png"]
    assert png_size(folder / "acquire.png") == (1080, 600)
    assert png_size(folder / "bytes.png") == (1080, 960)
    bench_json("--plot", str(folder))  # a folder that is there is written to again


def test_figures_of_all_workloads_and_kernels(tmp_path):
    pytest.importorskip("matplotlib")
    lines = {"pool: mapped": [1, 2], "pool: needed": [1, 2]}
    plot_workload_bytes(str(tmp_path / "bytes.png"), dict.fromkeys("abcde", lines), "title")
    assert png_size(tmp_path / "bytes.png") == (1620, 960)
    us = {"a": {"fresh": (5.0, 4.0, 6.0)}, "b": {"fresh": (5000.0, 4000.0, 5000.0)}}
    plot_acquire(str(tmp_path / "acquire.png"), us, "title")
    for name, gemm in (("both.png", 1300.0), ("alone.png", None)):
        plot_kernels(str(tmp_path / name), {"576, 128, 2048, 8192": (900.0, gemm)}, "title")
        assert png_size(tmp_path / name) == (1080, 252)


# --- Workloads and cases ---


def test_suite_is_fixed_by_its_seed():
    workloads = suite(16, 400, seed=3)
    assert list(workloads) == [
        "constant", "unseen", "ramp", "trace", "two-lanes", "held-1", "held-4", "streams-8",
    ]  # fmt: skip
    assert all(workload.name == name for name, workload in workloads.items())
    assert workloads == suite(16, 400, seed=3)
    other = suite(16, 400, seed=4)
    assert {name for name in workloads if workloads[name] != other[name]} == {"unseen", "trace"}
    assert workloads["streams-8"] == Workload("streams-8", (16,) * 400, streams=8)
    assert workloads["ramp"].is_cold
    assert workloads["ramp"].rows[-1] == 16384


def test_trace_has_each_chunk_once_for_every_layer():
    assert suite(16, 6, prompts=[9000, 5], layers=2)["trace"].rows == (8192, 8192, 808, 808, 5, 5)
    assert suite(16, 6, prompts=[9000, 5], layers=1)["trace"].rows == (8192, 808, 5)


def test_command_and_benchmarks_share_their_row_counts():
    args = argparse.Namespace(seed=0, hold=4, streams=8)
    mine = bench.bench_workloads(CPU, bench._FULL, args, None, is_timed=True)
    sys.path.insert(0, str(ROOT / "benchmarks"))
    try:
        import bench_acquire
        import bench_growth
    finally:
        sys.path.pop(0)
    theirs = {workload.name: workload for workload in bench_acquire.make_workloads(16)}
    assert {mine[name] == theirs[name] for name in ("constant", "trace", "held-4")} == {True}
    assert bench_growth.workload_named("ramp") == mine["ramp"] == ramp(16384, 400)


def test_the_benchmark_of_sleep_sees_memory_that_does_not_come_back(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    import bench_sleep

    case = bench_sleep.Case("one growth", 2**26)
    figures = bench_sleep.measure(case, CPU, rounds=2)
    assert figures.fault is None
    assert figures.back_bytes >= case.nbytes - bench_sleep.NOISE_BYTES["cpu"]
    monkeypatch.setattr(bench_sleep.Pooled, "sleep", lambda self: None)
    monkeypatch.setattr(bench_sleep.Pooled, "wake", lambda self: None)
    assert "bytes back" in bench_sleep.measure(case, CPU, rounds=2).fault


@pytest.mark.parametrize("workload", [constant(5, 3), two_lanes(5, 4), held([3, 5], 2), ramp(9, 3)], ids=lambda w: w.name)
def test_right_allocators_have_no_fault(workload, make_pool):
    setting = Setting.of(workload, 2, CPU)
    assert first_fault(make_pool(), setting) is None
    assert first_fault(FreshAllocator(), setting) is None


def test_faults_are_found():
    class Other(FreshAllocator):
        def acquire(self, spec, rows, like):
            outputs = super().acquire(spec, rows, like)
            return outputs._replace(lse=outputs.lse.double())

    setting = Setting.of(held([4], 1), 2, CPU)
    assert first_fault(GrowOnlyAllocator(), setting) == "out: expected a held result to keep its 0, got 3"
    fault = first_fault(Other(), setting)
    assert fault.startswith("lse: expected ((5, 2), torch.float32,")
    assert fault.endswith("got ((5, 2), torch.float64, device(type='cpu'))")


def test_results_of_several_streams_count_as_held(monkeypatch, make_pool):
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: contextlib.nullcontext())
    setting = Setting(many_streams(4, 8, 3), (sparse_mla_spec(2),), torch.empty(1), (object(),) * 3)
    assert first_fault(GrowOnlyAllocator(), setting) is not None
    assert first_fault(make_pool(), setting) is None


def test_batches_are_dealt_to_streams_in_runs(monkeypatch):
    calls = []

    @contextlib.contextmanager
    def stream(name):
        calls.append(name)
        yield

    monkeypatch.setattr(torch.cuda, "stream", stream)
    on_streams(lambda rows: calls.append(list(rows)), "abc")(range(7))
    assert calls == ["a", [0, 1, 2], "b", [3, 4, 5], "c", [6]]


def test_case_warms_beyond_the_largest_row_count_and_repeats_a_short_trace():
    seen = []
    setting = Setting.of(held([7, 9], 2), 2, CPU)
    case = make_case(setting, {"a": seen.append})
    assert seen == [[10, 10, 10]]
    assert len(case.warm) == 2
    assert [list(batch) for batch in case.timed] == [[7, 9]]


def test_cold_rounds_begin_with_a_new_allocator_and_close_it():
    made = []

    class Noted(OutputPool):
        def __init__(self):
            super().__init__()
            made.append(self)

    rounds = []
    setting = Setting.of(ramp(64, 4), 2, CPU)
    us = time_cold(setting, {"pool": Noted, "fresh": FreshAllocator}, 3, lambda: rounds.append(len(made)))
    assert {name: len(values) for name, values in us.items()} == {"pool": 3, "fresh": 3}
    assert rounds == [2, 3, 4]  # one more before the clock starts
    assert [pool.stats().grows for pool in made] == [4] * 4
    assert [pool.stats().mapped_bytes for pool in made] == [0] * 4


def test_before_and_on_round_are_outside_the_clock(monkeypatch):
    now = [0]
    monkeypatch.setattr(timing, "perf_counter_ns", lambda: now[0])

    def spend(ns):
        now[0] += ns

    us = time_loops(
        {"a": lambda rows: spend(4000)},
        [[1, 2], [3, 4]],
        CPU,
        before=lambda name: spend(10**9),
        on_round=lambda: spend(10**9),
    )
    assert us == {"a": [2.0, 2.0]}


def test_bytes_of_the_pool_after_each_call():
    page = os.sysconf("SC_PAGE_SIZE")
    bytes_ = pool_bytes(Setting.of(held([2, 4, 3, 3], 1), 2, CPU))
    row = sparse_mla_spec(2).row_nbytes
    assert bytes_.needed == [2 * row, 6 * row, 7 * row, 7 * row]  # two slots: 2 then 3 rows, and 4
    assert all(need <= have <= need + 6 * page for have, need in zip(bytes_.mapped, bytes_.needed, strict=True))
    assert (bytes_.stats.slots, bytes_.stats.acquires) == (2, 4)


# --- Kernels, as far as a machine without a GPU can tell ---

SMALL = KernelShape(512, 2, 8, 40)


def test_flops_count_both_products():
    assert KernelShape(576, 128, 2048, 8192).flops(4096) == 2 * 4096 * 128 * 2048 * 1088


def test_kernel_case_draws_other_inputs_for_each_set_and_checks_them():
    case = KernelCase(SMALL, 6, CPU, seed=1, sets=2, backend="reference")
    again = KernelCase(SMALL, 6, CPU, seed=1, sets=2, backend="reference")
    first, second, third = (case.launch(number).out.clone() for number in range(3))
    assert torch.equal(first, third)
    assert not torch.equal(first, second)
    assert torch.equal(first, again.launch(0).out)
    _, _, indices = case._inputs[0]
    assert all(len(set(row.tolist())) == 8 for row in indices)
    error, fault = case.error()
    assert 0 < error < 3e-3  # out is rounded to bfloat16
    assert fault is None
    case.close()


@pytest.mark.parametrize(
    ("place", "message"),
    [(0, "out: expected an error of at most 0.022, got "), (2, "lse: expected float64's within 0.012")],
)
def test_kernel_case_finds_a_wrong_output(place, message, monkeypatch):
    case = KernelCase(SMALL, 6, CPU, seed=1, sets=1, backend="reference")

    def wrong(number):
        outputs = case_launch(number)
        outputs[place][-1] += 0.5
        return outputs

    case_launch = case.launch
    monkeypatch.setattr(case, "launch", wrong)
    assert case.error()[1].startswith(message)
    monkeypatch.setattr(case, "launch", lambda number: [t.fill_(float("nan")) for t in case_launch(number)])
    assert case.error()[1].startswith("out: expected an error of at most 0.022, got nan")


class FakeEvent:
    """An event on a device whose clock only launches move."""

    now = 0.0

    def __init__(self, enable_timing):
        assert enable_timing

    def record(self):
        self.at = FakeEvent.now

    def synchronize(self):
        pass

    def elapsed_time(self, other):
        return other.at - self.at


@pytest.fixture
def fake_clock(monkeypatch):
    monkeypatch.setattr(FakeEvent, "now", 0.0)
    monkeypatch.setattr(torch.cuda, "Event", FakeEvent)
    monkeypatch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    monkeypatch.setattr(
        torch.cuda, "get_device_properties", lambda device: argparse.Namespace(L2_cache_size=50 * 2**20, total_memory=0)
    )

    def spend(ms):
        FakeEvent.now += ms

    return spend


def test_launches_take_turns_and_each_is_timed(fake_clock):
    numbers = {"a": [], "b": []}

    def launch(name, ms):
        def run(number):
            numbers[name].append(number)
            fake_clock(ms)

        return run

    ms = time_launches({"a": launch("a", 2.0), "b": launch("b", 0.5)}, CPU, seconds=0.01)
    assert set(ms["a"]) == {2.0}
    assert set(ms["b"]) == {0.5}
    assert len(ms["a"]) == len(ms["b"]) == 20  # 5 rounds of 4, until b has had its 10 ms
    assert numbers["a"] == list(range(25))


def test_inputs_are_more_than_l2_holds(fake_clock):
    assert input_sets(2**30, CPU) == 2
    assert input_sets(50 * 2**20, CPU) == 4
    assert input_sets(2**20, CPU) == 151


def test_command_with_kernels(bench_json, fake_clock, monkeypatch, tmp_path):
    """The kernels' part of the command, on the reference and a clock that stands in for the device's."""
    pytest.importorskip("matplotlib")

    class Small(KernelCase):
        def __init__(self, shape, s_q, device, seed):
            super().__init__(shape, 6, device, seed, sets=2, backend="reference")

        def launch(self, number):
            fake_clock(1.0)
            return super().launch(number)

    class NoGemm:
        def __init__(self, device, seed):
            raise RuntimeError("no such\nproduct")

    monkeypatch.setattr(bench.sparse_mla_sm90, "unavailable_reason", lambda device: None)
    monkeypatch.setattr(bench, "KernelCase", Small)
    monkeypatch.setattr(bench, "Gemm", NoGemm)
    monkeypatch.setattr(bench, "_QUICK", bench._Extent(2, 2, 64, 4, 4, (SMALL,), 0.01))
    figures, _ = bench_json("--plot", str(tmp_path))
    assert figures["skipped"]["gemm"] == "expected torch to multiply e4m3 matrices, got no such product"
    (facts,) = figures["kernels"]
    assert (facts["ms"], facts["launches"], facts["input_sets"], facts["fault"]) == (1.0, 12, 2, None)
    assert facts["tflops"] == round(SMALL.flops(6) / 1e9, 1)
    assert facts["of_gemm"] is None
    assert (tmp_path / "kernels.png").exists()

    monkeypatch.setattr(kernel_case, "_OUT_RELATIVE", 1e-9)
    _, err = bench_json(code=1)
    assert err.splitlines()[-1].startswith("bufpool bench: 512, 2, 8, 40: out: expected an error of at most 1e-09, got ")


# --- As a process ---


def test_bench_keeps_stdout_to_one_object():
    done = subprocess.run(
        [sys.executable, "-W", "error", "-m", "bufpool", "bench", "--quick", "--json"],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("\n") == 1
    assert set(json.loads(done.stdout)["workloads"]) == {"constant", "ramp", "trace", "held-4"}


def run_python(*arguments):
    """Python in the root of the tree, with bufpool of this tree."""
    return subprocess.run(
        [sys.executable, *arguments],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )


@pytest.mark.parametrize(("script", "keys"), [
    ("bench_acquire.py", {"device", "device_name", "torch", "heads", "rows", "acquire_us", "thresholds"}),
    ("bench_growth.py", {"device", "torch", "growth", "ramp", "trace", "thresholds"}),
])  # fmt: skip
def test_benchmarks_keep_their_plain_entry(script, keys, trace):
    options = ("--rounds", "2") if script == "bench_acquire.py" else ()
    done = run_python("-W", "error", f"benchmarks/{script}", "--json", "--trace", trace, *options)
    assert done.returncode in (0, 1), done.stderr  # a busy machine may miss a threshold
    figures = json.loads(done.stdout)
    assert set(figures) == keys
    if script == "bench_growth.py":
        assert figures["trace"]["grow_only_bytes"] == 8192 * ROW_BYTES
        assert figures["trace"]["mapped_per_needed"] <= 1.01
        assert len(figures["thresholds"]) == 4
    else:
        assert set(figures["acquire_us"]) == {"constant", "unseen", "trace", "two-lanes", "held-1", "held-4"}
        assert figures["thresholds"][0]["measure"] == "constant: pool / torch.empty x3"


BENCHMARKS = [f"bench_{question}.py" for question in ("acquire", "comparison", "growth", "hit_path", "sparse_mla")]
no_cuda = pytest.mark.skipif(torch.cuda.is_available(), reason="asks what happens without a CUDA device")


@no_cuda
def test_a_benchmark_without_its_device_is_one_line_and_exit_code_2(run_script):
    script = """
        import runpy, sys
        for name in sys.argv[1:]:
            sys.argv = ["benchmarks/" + name, "--device", "cuda"]
            try:
                runpy.run_path(sys.argv[0], run_name="__main__")
            except SystemExit as e:
                print(name, e.code)
        """
    done = run_script(script, *BENCHMARKS, PYTHONPATH=f"{ROOT}:{ROOT / 'benchmarks'}")
    assert done.stdout.splitlines() == [f"{name} 2" for name in BENCHMARKS], done.stderr
    assert done.stderr.splitlines() == [
        f"{name}: --device: expected cpu (torch sees no CUDA device here), got 'cuda'" for name in BENCHMARKS
    ]


@no_cuda
@pytest.mark.parametrize(("name", "code"), [("cuda", 0), ("cuda:7", 0), ("abacus", 4)])
def test_benchmarks_under_pytest_skip_without_cuda_and_refuse_what_is_no_device(name, code):
    done = run_python("-m", "pytest", "-p", "no:cacheprovider", "-rs", "benchmarks/bench_growth.py", "--device", name)
    assert done.returncode == code, done.stdout + done.stderr
    assert f"--device: expected cpu (torch sees no CUDA device here), got {name!r}" in done.stdout + done.stderr
    assert "Traceback" not in done.stdout + done.stderr
    assert ("3 skipped" in done.stdout) == (code == 0)


# --- On a GPU ---


@pytest.fixture
def cuda():
    return torch.empty(0, device="cuda").device


@pytest.mark.gpu
def test_bench_on_cuda(bench_json, cuda):
    figures, _ = bench_json("--device", "cuda", "--hold", "1", "--streams", "3")
    assert figures["device"] == str(cuda)
    assert list(figures["workloads"]) == ["constant", "ramp", "trace", "held-1", "streams-3"]
    assert "streams-3" not in figures["skipped"]
    for name, facts in figures["workloads"].items():
        assert facts["correct"]["fresh"] is facts["correct"]["pool"] is True
        assert facts["correct"]["grow_only"] is (name not in ("held-1", "streams-3"))
        assert facts["baseline_kind"] == "reserved by torch"
        if figures["arena"] == "cuda":
            assert facts["needed_bytes"] <= facts["mapped_bytes"] <= facts["needed_bytes"] + 3 * 2**21 * facts["slots"]
    assert figures["workloads"]["streams-3"]["slots"] == 3
    assert figures["workloads"]["streams-3"]["needed_bytes"] == 3 * 4096 * ROW_BYTES
    assert figures["workloads"]["ramp"]["baseline_bytes"]["grow_only"] >= 1024 * ROW_BYTES
    assert bool(figures["kernels"]) is ("kernels" not in figures["skipped"])


@pytest.mark.gpu
def test_streams_of_a_setting_have_lanes_of_their_own(cuda, make_pool):
    setting = Setting.of(many_streams(64, 40, 4), 2, cuda)
    pool = make_pool()
    assert first_fault(pool, setting) is None
    assert first_fault(FreshAllocator(), setting) is None
    assert first_fault(GrowOnlyAllocator(), setting) is not None
    case = make_case(setting, {"pool": setting.loop(pool)})
    time_loops(case.loops, case.warm, cuda)
    assert len({lane.stream for lane in pool.stats().lanes}) == 4
    assert pool.stats().slots == 4


@pytest.mark.gpu
def test_nothing_of_the_baselines_is_left(cuda):
    torch.cuda.empty_cache()
    before = torch.cuda.memory_reserved(cuda)
    time_cold(Setting.of(ramp(512, 8), 8, cuda), ALLOCATORS, 2)
    assert torch.cuda.memory_reserved(cuda) <= before + 2 * 2**20


@pytest.mark.gpu
@pytest.mark.sm90
def test_kernels_and_matrix_product_on_cuda(bench_json, cuda, tmp_path):
    pytest.importorskip("matplotlib")
    figures, _ = bench_json("--device", "cuda", "--plot", str(tmp_path))
    if "kernels" in figures["skipped"]:
        pytest.skip(figures["skipped"]["kernels"])
    assert len(figures["kernels"]) == 2
    for facts in figures["kernels"]:
        assert facts["fault"] is None
        assert 1e-3 < facts["out_error"] < 2.2e-2
        assert 0 < facts["tflops"] < 2000
        assert facts["input_sets"] >= 2
        assert facts["launches"] >= 12
        if "gemm" not in figures["skipped"]:
            assert facts["of_gemm"] == pytest.approx(facts["tflops"] / facts["gemm_tflops"], rel=1e-2)
            assert 0 < facts["of_gemm"] < 1
    assert (tmp_path / "kernels.png").exists()


@pytest.mark.gpu
@pytest.mark.sm90
def test_device_clock_agrees_with_the_host_over_many_products(cuda):
    gemm = Gemm(cuda, seed=0, size=4096)
    assert len(gemm._inputs) >= 2
    ms = time_launches({"gemm": gemm.launch}, cuda, seconds=0.05)["gemm"]
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for number in range(50):
        gemm.launch(number)
    end.record()
    end.synchronize()
    assert sorted(ms)[len(ms) // 2] == pytest.approx(start.elapsed_time(end) / 50, rel=0.25)
    assert len(ms) >= device_clock._LAUNCHES * 3

"""The command line: what it prints, writes and returns, with real values."""

import json
import os
import signal
import subprocess
import sys
import time
import weakref

import pytest
import torch

from bufpool.allocator import FreshAllocator
from bufpool.cli import doctor, main
from bufpool.cli import job as job_module
from bufpool.cli import run as run_command
from bufpool.cli.acquire_case import Setting
from bufpool.cli.baselines import GrowOnlyAllocator
from bufpool.cli.footprint import baseline_bytes
from bufpool.cli.job import Job, plan_calls, run_calls
from bufpool.cli.progress import progress
from bufpool.cli.table import bytes_text
from bufpool.cli.timing import acquire_loop, batches, time_loops
from bufpool.errors import CompileError, PoolLimitError
from bufpool.ops.sparse_mla import sparse_mla_prefill, sparse_mla_spec
from bufpool.pool import OutputPool
from bufpool.spec import OutputSpec
from bufpool.workloads import held, two_lanes

CPU = torch.device("cpu")
PROMPTS = (40, 7, 100, 33)
# In chunks of 64: 40, 7, 64, 36, 33 rows.
SMALL = ("--chunk", "64", "--layers", "2", "--heads", "2", "--topk", "4")


@pytest.fixture(autouse=True)
def _one_thread():
    # Small operations gain nothing from more threads, and on a busy machine they wait for one another.
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def trace(tmp_path):
    path = tmp_path / "trace.csv"
    path.write_text("ContextTokens,Other\n" + "".join(f"{tokens},1\n" for tokens in PROMPTS))
    return str(path)


@pytest.fixture
def run_json(trace, capsys):
    def run(*options, code=0):
        assert main(["run", "--trace", trace, *SMALL, "--json", *options]) == code
        out, err = capsys.readouterr()
        assert out.count("\n") == 1
        return json.loads(out), err

    return run


def small_job(hold=0, seed=0):
    calls = plan_calls(PROMPTS, chunk=64, layers=2, max_calls=100)
    return Job(calls, layers=2, heads=2, topk=4, hold=hold, seed=seed, device=CPU)


# --- The main job ---


def test_run_json_holds_the_figures_of_the_job(run_json, trace):
    facts, err = run_json()
    row_bytes = 2 * 512 * 2 + 2 * 4 + 2 * 4
    assert facts["calls"] == 10
    assert (facts["requests"], facts["chunks"]) == (4, 5)
    assert facts["rows"] == {"min": 7, "median": 36, "max": 64}
    assert facts["slots"] == 1
    assert facts["needed_bytes"] == 64 * row_bytes
    assert facts["needed_bytes"] <= facts["mapped_bytes"] <= facts["needed_bytes"] + 3 * os.sysconf("SC_PAGE_SIZE")
    assert facts["peak_mapped_bytes"] == facts["mapped_bytes"]
    assert 1 <= facts["grows"] <= 2  # 40 rows, then 64; 7, 36 and 33 fit
    assert facts["spills"] == 0
    assert (facts["verified"], facts["failed"], facts["first_failure"]) == (3, 0, None)  # calls 0, 7 and the last
    assert set(facts["acquire_us"]) == {"pool", "fresh", "grow_only"}
    assert all(0 < us < 10_000 for us in facts["acquire_us"].values())
    assert facts["torch"] == torch.__version__
    assert (facts["device"], facts["arena"], facts["trace"]) == ("cpu", "host", trace)
    assert err.splitlines()[-1].startswith("bufpool run: 10 of 10 calls, ")


def test_run_is_fixed_by_its_seed(run_json):
    first, _ = run_json("--seed", "5")
    again, _ = run_json("--seed", "5")
    other, _ = run_json("--seed", "6")
    assert first["checksum"] == again["checksum"] != other["checksum"]


def test_run_computes_the_same_with_results_held(run_json):
    dropped, _ = run_json()
    held, _ = run_json("--hold", "3")
    assert held["checksum"] == dropped["checksum"]
    assert held["slots"] == 4
    assert held["rotations"] >= 3
    assert (held["verified"], held["failed"]) == (3, 0)


def test_run_spills_past_eight_slots(run_json):
    facts, _ = run_json("--hold", "9", "--layers", "4")
    assert facts["slots"] == 8
    assert facts["spills"] > 0
    assert facts["failed"] == 0


def test_run_stops_at_max_calls(run_json):
    facts, _ = run_json("--max-calls", "3")
    assert (facts["calls"], facts["chunks"], facts["rows"]["max"]) == (3, 2, 40)


def test_run_reads_another_column(run_json):
    facts, _ = run_json("--column", "Other")
    assert facts["rows"] == {"min": 1, "median": 1, "max": 1}


def test_run_prints_a_table_last(trace, capsys):
    assert main(["run", "--trace", trace, *SMALL]) == 0
    out, err = capsys.readouterr()
    lines = [line.split(maxsplit=1) for line in out.splitlines()]
    text = dict(line for line in lines if len(line) == 2)
    assert text["calls"] == "10 (4 requests, 5 chunks)"
    assert "rows min / median / max      7 / 36 / 64" in out
    assert "slots                        1 (0 rotations, 0 spills)" in out
    assert "results verified             3 of 3" in out
    assert "mapped / needed bytes" in out
    assert "grow-only cache" in out
    assert err.count("bufpool run: ") == 10


def test_run_default_is_the_synthetic_trace(capsys):
    assert main(["run", "--max-calls", "2", "--heads", "1", "--topk", "2", "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["trace"] == "synthetic"
    assert facts["rows"]["max"] == 894  # the first prompt of seed 0
    assert (facts["chunk"], facts["layers"]) == (2048, 4)


def test_run_fails_when_an_allocator_hands_memory_out_twice(run_json, monkeypatch):
    class Aliasing(OutputPool):
        def __init__(self):
            super().__init__()
            self.cache = GrowOnlyAllocator()

        def acquire(self, spec, rows, like):
            super().acquire(spec, rows, like)
            return self.cache.acquire(spec, rows, like)

    monkeypatch.setattr(run_command, "OutputPool", Aliasing)
    facts, err = run_json("--hold", "1", code=1)
    assert facts["failed"] >= 1
    assert facts["verified"] + facts["failed"] == 3
    assert facts["first_failure"].startswith("call 0 (request 0, layer 0, 40 rows), out: expected ")
    assert err.splitlines()[-1].startswith("bufpool run: expected equal results, got a difference in call 0 ")


def test_the_grow_only_cache_is_wrong_once_results_are_held():
    result = run_calls(small_job(hold=1), GrowOnlyAllocator(), sparse_mla_prefill)
    assert result.failed == 2  # calls 0 and 7 were overwritten; nothing follows the last one
    assert result.verified == 1
    assert run_calls(small_job(hold=0), GrowOnlyAllocator(), sparse_mla_prefill).failed == 0


def test_one_wrong_bit_is_found():
    class OneBit(FreshAllocator):
        pass

    def operator(*args, allocator):
        outputs = sparse_mla_prefill(*args, allocator=allocator)
        if isinstance(allocator, OneBit):
            outputs.lse.view(torch.int32)[-1, -1] ^= 1
        return outputs

    result = run_calls(small_job(), OneBit(), operator)
    assert (result.verified, result.failed) == (0, 3)
    assert result.first_failure.startswith("call 0 (request 0, layer 0, 40 rows), lse: expected ")
    assert " at [39, 1], got " in result.first_failure


def test_layers_and_requests_differ():
    seen = []

    def operator(*args, allocator):
        outputs = sparse_mla_prefill(*args, allocator=allocator)
        seen.append(outputs.out[0].clone())
        return outputs

    run_calls(small_job(), FreshAllocator(), operator)
    assert all(not torch.equal(a, b) for n, a in enumerate(seen[1:6]) for b in seen[1:6][n + 1 :])


@pytest.mark.parametrize(("calls", "layers", "step"), [(1, 1, 7), (400, 4, 7), (400, 7, 8), (6100, 61, 96)])
def test_comparisons_are_few_and_reach_every_layer(calls, layers, step):
    assert job_module._check_step(calls, layers) == step
    if calls > step * layers:
        assert {number % layers for number in range(0, calls, step)} == set(range(layers))


def test_results_are_dropped_before_the_next_call():
    pool = OutputPool()
    run_calls(small_job(), pool, sparse_mla_prefill)
    assert pool.stats().slots == 1
    assert pool.stats().in_use_bytes == 0


# --- What cannot be had: one line, exit code 2 ---


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            ["run", "--trace", "nowhere.csv"],
            "run: --trace: nowhere.csv: expected a readable CSV file, got No such file",
        ),
        (["run", "--heads", "0"], "run: argument --heads: expected an integer from 1 to 65536, got '0'"),
        (["run", "--heads", "two"], "run: argument --heads: expected an integer from 1 to 65536, got 'two'"),
        (["run", "--chunk", "1.5"], "run: argument --chunk: expected an integer from 1 to 2147483647, got '1.5'"),
        (["run", "--layers", "0"], "run: argument --layers: expected an integer from 1 to"),
        (["run", "--topk", "0"], "run: argument --topk: expected an integer from 1 to"),
        (["run", "--hold", "-1"], "run: argument --hold: expected an integer from 0 to 2147483647, got '-1'"),
        (["run", "--seed", "x"], "run: argument --seed: expected an integer from 0 to"),
        (["run", "--max-calls", "0"], "run: argument --max-calls: expected an integer from 1 to 1000000, got '0'"),
        (["run", "--device", "abacus"], "run: --device: expected cpu"),
        (["run", "--device", "meta"], "run: --device: expected cpu"),
        (["run", "--device", "hpu"], "run: --device: expected cpu"),
        (["run", "--device", "cuda:99"], "run: --device: expected cpu"),
        (
            ["run", "--plot", "figure.jpg"],
            "run: argument --plot: expected a file name ending in .png, got 'figure.jpg'",
        ),
        (["run", "--plot", "no/where.png"], "run: argument --plot: expected a file in an existing folder"),
        (["run", "--max-calls", "4", "--heads", "60000", "--hold", "90000"], "run: cpu: expected a job of at most "),
        (["compile", "--arch", "foo"], "compile: argument --arch: expected a real architecture such as sm_90a, got 'foo'"),
        (["compile", "--arch", "90"], "compile: argument --arch: expected a real architecture such as sm_90a, got '90'"),
        (["compile", "--arch", ""], "compile: argument --arch: expected a real architecture such as sm_90a, got ''"),
        (["run", "--unheard-of"], ": unrecognized arguments: --unheard-of"),
        (["walk"], ": argument COMMAND: invalid choice: 'walk'"),
        ([], ": expected a command (run, bench, doctor, compile), got none"),
    ],
)
def test_wrong_arguments_are_one_line_and_exit_code_2(options, message, capsys):
    try:
        code = main(options)
    except SystemExit as e:
        code = e.code
    out, err = capsys.readouterr()
    assert code == 2
    assert out == ""
    assert err.count("\n") == 1
    assert err.startswith("bufpool")
    assert message in err


def test_wrong_column_names_the_columns_there_are(trace, capsys):
    assert main(["run", "--trace", trace, "--column", "Tokens"]) == 2
    assert capsys.readouterr().err == (
        f"bufpool run: --trace: {trace}: expected a column 'Tokens', got columns ContextTokens, Other\n"
    )


@pytest.mark.parametrize(
    ("error", "code", "message"),
    [
        (
            PoolLimitError("cpu", need=7, have=5, limit=9),
            1,
            "cpu: expected at most 9 bytes, got 5 bytes and a need of 7 more",
        ),
        (torch.OutOfMemoryError("CUDA out of memory.\nTried to allocate 2 GiB"), 1, "CUDA out of memory. Tried to"),
        (KeyboardInterrupt(), 130, ""),
    ],
)
def test_what_fails_while_it_runs_is_one_line_too(error, code, message, trace, capsys, monkeypatch):
    def fail(*args):
        raise error

    monkeypatch.setattr(run_command, "run_calls", fail)
    assert main(["run", "--trace", trace]) == code
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith(f"bufpool run: {message}") if message else err == ""
    assert err.count("\n") == bool(message)


def test_a_compiler_log_keeps_its_lines(capsys, monkeypatch):
    def fail(args):
        raise CompileError("kernel.cu: expected it to compile, got:\nline 1\nline 2")

    monkeypatch.setattr("bufpool.cli.compile.run_compile", fail)
    assert main(["compile"]) == 1
    assert capsys.readouterr().err == ("bufpool compile: kernel.cu: expected it to compile, got:\nline 1\nline 2\n")


@pytest.mark.parametrize(("lines", "rest"), [(20, ""), (21, "... and 1 more line\n"), (150, "... and 130 more lines\n")])
def test_a_long_compiler_log_is_cut(lines, rest, capsys, monkeypatch):
    log = [f"line {n}" for n in range(1, lines + 1)]

    def fail(args):
        raise CompileError("\n".join([*log, "", ""]))

    monkeypatch.setattr("bufpool.cli.compile.run_compile", fail)
    assert main(["compile"]) == 1
    assert capsys.readouterr().err == "bufpool compile: " + "\n".join(log[:20]) + "\n" + rest


# --- The figure ---


def test_plot_is_a_png(trace, tmp_path, capsys):
    pytest.importorskip("matplotlib")
    path = tmp_path / "bytes.png"
    assert main(["run", "--trace", trace, *SMALL, "--plot", str(path)]) == 0
    data = path.read_bytes()
    assert data[:8] == b"\x89PNG\r\n\x1a\n"
    width, height = int.from_bytes(data[16:20], "big"), int.from_bytes(data[20:24], "big")
    assert (width, height) == (1080, 600)


def test_plot_without_matplotlib_names_the_extra_before_any_work(trace, tmp_path, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    assert main(["run", "--trace", trace, "--plot", str(tmp_path / "bytes.png")]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("bufpool run: --plot: expected matplotlib (pip install 'bufpool[plot]'), got ")
    assert err.count("\n") == 1


def test_bytes_of_the_baselines():
    spec = OutputSpec(x=((), torch.float32))
    curves, kind = baseline_bytes(Setting(held([10, 4, 12, 12], 1), (spec,), torch.empty(1), ()))
    assert kind == "buffers"
    assert curves["fresh"] == [40, 56, 64, 96]
    assert curves["grow_only"] == [40, 40, 88, 48]


def test_bytes_of_the_baselines_in_two_lanes():
    specs = (OutputSpec(x=((), torch.float32)), OutputSpec(x=((), torch.int8)))
    curves, _ = baseline_bytes(Setting(two_lanes(3, 4), specs, torch.empty(1), ()))
    assert curves["fresh"] == [12, 3, 12, 3]
    assert curves["grow_only"] == [12, 15, 15, 15]


# --- Baseline and timing ---


def test_grow_only_cache_keeps_one_buffer_and_aliases():
    spec = sparse_mla_spec(2)
    like = torch.empty(1)
    cache = GrowOnlyAllocator()
    first = cache.acquire(spec, rows=8, like=like)
    second = cache.acquire(spec, rows=3, like=[like])
    assert second.out.shape == (3, 2, 512)
    assert second.out.data_ptr() == first.out.data_ptr()
    third = cache.acquire(spec, rows=9, like=like)
    assert third.out.data_ptr() != first.out.data_ptr()
    assert sum(tensor.nbytes for buffers in cache._buffers.values() for tensor in buffers) == spec.nbytes(9)


def test_loops_drop_hold_and_take_lanes_in_turn():
    class Held:
        pass

    class Counting:
        def __init__(self):
            self.results = weakref.WeakSet()
            self.seen = []

        def acquire(self, spec, rows, like):
            self.seen.append((spec, rows, len(self.results)))
            result = Held()
            self.results.add(result)
            return result

    like = torch.empty(1)
    dropped, held, lanes = Counting(), Counting(), Counting()
    acquire_loop(dropped, ["a"], like)([5, 6, 7])
    assert dropped.seen == [("a", 5, 0), ("a", 6, 0), ("a", 7, 0)]
    loop = acquire_loop(held, ["a"], like, hold=2)
    loop([1, 2, 3, 4])
    assert [alive for _, _, alive in held.seen] == [0, 1, 2, 2]
    acquire_loop(lanes, ["a", "b"], like)([1, 2, 3])
    assert lanes.seen == [("a", 1, 0), ("b", 2, 0), ("a", 3, 0)]


def test_contenders_take_turns_and_run_the_same_rows():
    order = []
    loops = {name: lambda rows, name=name: order.append((name, tuple(rows))) for name in "abc"}
    us = time_loops(loops, [[1], [2], [3], [4]], CPU)
    assert "".join(name for name, _ in order) == "abcbcacababc"
    assert [rows for _, rows in order] == [(n,) for n in (1, 2, 3, 4) for _ in range(3)]
    assert {name: len(values) for name, values in us.items()} == {"a": 4, "b": 4, "c": 4}


def test_time_is_per_call():
    us = time_loops({"sleep": lambda rows: time.sleep(0.02)}, [[1] * 10], CPU)
    assert 2000 <= us["sleep"][0] < 20_000


def test_batches_are_whole():
    assert batches([1, 2, 3, 4, 5], 2) == [[1, 2], [3, 4]]
    assert batches([1, 2], 3) == [[1, 2]]


# --- Progress and table ---


def test_progress_in_plain_lines(capsys):
    with progress("job", 25) as show:
        for done in range(1, 26):
            show(done)
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 10
    assert lines[-1].startswith("job: 25 of 25 calls, ")


def test_progress_on_a_terminal_is_a_bar(capsys, monkeypatch):
    pytest.importorskip("rich")
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    with progress("job", 3) as show:
        show(3)
    out, err = capsys.readouterr()
    assert out == ""
    assert "3/3" in err


def test_progress_without_rich_is_plain_on_a_terminal_too(capsys, monkeypatch):
    for name in ("rich", "rich.console", "rich.progress"):
        monkeypatch.setitem(sys.modules, name, None)
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    with progress("job", 1) as show:
        show(1)
    assert capsys.readouterr().err.startswith("job: 1 of 1 calls, ")


def test_bytes_as_text():
    assert [bytes_text(n) for n in (0, 1023, 1536, 2**21, 2**31, 2**43)] == [
        "0 B",
        "1023 B",
        "1.50 KiB",
        "2.00 MiB",
        "2.00 GiB",
        "8.00 TiB",
    ]


# --- On a GPU ---


@pytest.mark.gpu
def test_run_on_cuda(run_json):
    facts, _ = run_json("--device", "cuda", "--heads", "64", "--hold", "2")
    assert facts["device"] == f"cuda:{torch.cuda.current_device()}"
    assert facts["device_name"] == torch.cuda.get_device_name()
    assert (facts["verified"], facts["failed"]) == (3, 0)
    assert facts["slots"] == 3
    granules = 3 * facts["slots"]  # an arena a tensor, each rounded up
    assert facts["needed_bytes"] <= facts["mapped_bytes"] <= facts["needed_bytes"] + granules * 2**21


@pytest.mark.gpu
def test_baselines_on_cuda_are_what_torch_reserves(run_script):
    done = run_script(  # in a process of its own: blocks that other tests left in torch's cache would serve here
        """
        import json, torch
        from bufpool.cli.acquire_case import Setting
        from bufpool.cli.footprint import baseline_bytes
        from bufpool.workloads import held
        device = torch.empty(0, device="cuda").device
        print(json.dumps(baseline_bytes(Setting.of(held([1024, 2048, 1024], 0), 64, device))))
        """
    )
    assert done.returncode == 0, done.stderr
    curves, kind = json.loads(done.stdout)
    assert kind == "reserved by torch"
    for name, values in curves.items():
        assert values == sorted(values), name
        assert values[1] >= sparse_mla_spec(64).nbytes(2048), name


@pytest.mark.gpu
def test_doctor_on_cuda(capsys):
    assert main(["doctor", "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    device = facts["devices"][1]
    assert device["device"] == "cuda:0"
    assert device["name"] == torch.cuda.get_device_name(0)
    assert device["capability"] == "{}.{}".format(*torch.cuda.get_device_capability(0))
    assert 0 < device["free_bytes"] <= device["total_bytes"]
    assert device["arena"] == ("cuda" if device["virtual_memory"] == "yes" else "torch")
    assert device["sm90_kernel"] == "yes" or device["sm90_kernel"].startswith("no: ")


# --- doctor ---


def test_doctor_json_says_what_serves(capsys, monkeypatch, tmp_path):
    monkeypatch.setenv("BUFPOOL_CACHE_DIR", str(tmp_path / "kernels"))
    assert main(["doctor", "--json"]) == 0
    out, err = capsys.readouterr()
    facts = json.loads(out)
    assert err == ""
    assert facts["torch"] == torch.__version__
    assert facts["torch_cuda"] == torch.version.cuda
    assert facts["devices"][0] == {"device": "cpu", "arena": "host"}
    assert len(facts["devices"]) == 1 + torch.cuda.device_count()
    assert facts["cache_folder"] == {"path": str(tmp_path / "kernels"), "exists": False, "is_writable": True}
    if torch.cuda.device_count() == 0:
        assert facts["driver"].startswith("no: torch ")


def test_doctor_looks_at_the_cache_folder_and_makes_nothing(tmp_path):
    path = tmp_path / "a" / "b"
    assert doctor._folder(path) == {"path": str(path), "exists": False, "is_writable": True}
    assert not path.exists()
    (tmp_path / "file").write_text("")
    assert doctor._folder(tmp_path / "file" / "b")["is_writable"] is False
    assert doctor._folder(tmp_path)["exists"] is True


def test_doctor_prints_a_table(capsys):
    assert main(["doctor"]) == 0
    out = capsys.readouterr().out
    for name in ("torch", "driver", "cuda-core", "NVRTC", "cache folder", "SM90 kernel"):
        assert name in out


def test_doctor_shows_the_devices_beside_one_that_fails(monkeypatch):
    def examine(index):
        if index == 1:
            raise RuntimeError("CUDA error")
        return {"device": f"cuda:{index}", "arena": "cuda"}

    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    monkeypatch.setattr(doctor, "_cuda_device", examine)
    _, *devices = doctor.examine()["devices"]
    assert devices == [
        {"device": "cuda:0", "arena": "cuda"},
        {"device": "cuda:1", "arena": "unknown (RuntimeError: CUDA error)"},
        {"device": "cuda:2", "arena": "cuda"},
    ]


def test_doctor_survives_a_machine_where_everything_fails(capsys, monkeypatch):
    def fail(*args):
        raise RuntimeError("broken\ninstallation")

    for name in ("_driver", "_nvrtc", "_cache_folder", "_arena"):
        monkeypatch.setattr(doctor, name, fail)
    monkeypatch.setattr(torch.cuda, "device_count", fail)
    assert main(["doctor", "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["driver"] == "unknown (RuntimeError: broken installation)"
    assert facts["devices"][0]["arena"] == "unknown (RuntimeError: broken installation)"
    assert main(["doctor"]) == 0
    assert "unknown (RuntimeError: broken installation)" in capsys.readouterr().out


# --- As a process ---


def test_python_m_bufpool_keeps_stdout_to_one_object(trace):
    done = subprocess.run(
        [sys.executable, "-m", "bufpool", "run", "--trace", trace, *SMALL, "--json"],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["calls"] == 10
    assert done.stdout.count("\n") == 1


def test_the_command_line_imports_no_extras():
    code = (
        "import sys, torch\n"
        "before = set(sys.modules)\n"  # torch itself imports cuda.bindings where it finds it
        "import bufpool.cli, bufpool.cli.run, bufpool.cli.doctor\n"
        "names = {name.split('.')[0] for name in set(sys.modules) - before}\n"
        "print(sorted(names & {'rich', 'matplotlib', 'cuda', 'IPython'}))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout == "[]\n"


def test_interrupted_run_is_quiet_and_exits_130():
    options = ("--max-calls", "4000", "--chunk", "64", "--heads", "1", "--topk", "1")
    process = subprocess.Popen(
        [sys.executable, "-m", "bufpool", "run", *options],
        env={**os.environ, "OMP_NUM_THREADS": "1"},  # small operations on a busy machine wait for one another
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),  # a shell's background job ignores it
    )
    assert process.stderr.readline().startswith("bufpool run: 400 of 4000 calls")
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert (process.returncode, out) == (130, "")
    assert all(line.startswith("bufpool run: ") for line in err.splitlines())


def test_an_unknown_debug_mode_is_one_line(monkeypatch, capsys):
    monkeypatch.setenv("BUFPOOL_DEBUG", "foo")
    assert main(["doctor"]) == 2
    assert capsys.readouterr().err == "bufpool doctor: BUFPOOL_DEBUG: expected poison or guard, got 'foo'\n"


def test_options_are_not_guessed_from_their_start(capsys):
    with pytest.raises(SystemExit) as end:
        main(["run", "--max", "5"])
    assert end.value.code == 2
    assert "--max" in capsys.readouterr().err

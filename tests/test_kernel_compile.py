"""Every kernel variant compiles here, without a GPU, within its resources; and the sources keep their layers."""

from __future__ import annotations

import argparse
import dataclasses
import importlib.util
import json
import re
import shutil
import struct
from pathlib import Path

import pytest

from bufpool.cli import compile as cli
from bufpool.cli import main
from bufpool.errors import CompileError
from bufpool.jit import compiler
from bufpool.jit.compiler import compile_source, source_directory
from bufpool.ops import sparse_mla_sm90
from bufpool.ops.sparse_mla_sm90 import VARIANTS

has_compiler = pytest.mark.skipif(
    importlib.util.find_spec("cuda") is None or importlib.util.find_spec("cuda.core") is None,
    reason="needs cuda.core with NVRTC",
)


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("BUFPOOL_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(compiler, "_memory", {})
    return tmp_path


@has_compiler
@pytest.mark.parametrize("d_qk", sorted(VARIANTS))
def test_variant_fits(d_qk, cache, caplog):
    binary = compile_source(VARIANTS[d_qk], reuse=False)
    assert caplog.messages == []  # ptxas says there which wgmma it could not overlap
    assert cli.faults(binary) == []
    assert binary.registers * VARIANTS[d_qk].threads <= 65536
    assert VARIANTS[d_qk].entry.encode() in binary.image


@has_compiler
def test_wgmma_that_cannot_overlap_is_said(cache, tmp_path, monkeypatch, caplog):
    sources = tmp_path / "csrc"
    shutil.copytree(source_directory(), sources)
    kernel = sources / "sparse_mla_prefill.cu"
    text = kernel.read_text()
    assert text.count("FRAGMENTS = 2;") == 1
    kernel.write_text(text.replace("FRAGMENTS = 2;", "FRAGMENTS = 3;"))  # more than the accumulators have registers for
    monkeypatch.setattr(compiler, "source_directory", lambda: sources)
    compile_source(VARIANTS[576])
    assert "expected ptxas to have no complaint" in caplog.text
    assert "wgmma.mma_async instructions are serialized" in caplog.text


@has_compiler
def test_command_reports_every_variant(cache, capsys):
    code = cli.run_compile(argparse.Namespace(arch="sm_90a", driver=None, json=True))
    report = json.loads(capsys.readouterr().out)
    assert code == 0
    assert [kernel["name"] for kernel in report["kernels"]] == [source.name for source in VARIANTS.values()]
    for kernel in report["kernels"]:
        assert set(kernel) == {"name", "registers", "spill_bytes", "smem_bytes", "seconds"}
        assert kernel["registers"] > 0
        assert kernel["spill_bytes"] == 0
        assert 0 < kernel["smem_bytes"] <= 232448
        assert kernel["seconds"] > 0
    assert len(list(cache.glob("*.kernel"))) == len(VARIANTS)
    assert compile_source(VARIANTS[576]).registers == report["kernels"][-1]["registers"]


@has_compiler
def test_command_keeps_kernels_for_other_drivers(cache, monkeypatch, capsys):
    assert main(["compile", "--driver", "99.0", "--driver", "99.1", "--json"]) == 0
    assert len(json.loads(capsys.readouterr().out)["kernels"]) == len(VARIANTS)
    assert len(list(cache.glob("*.kernel"))) == 2 * len(VARIANTS)
    monkeypatch.setattr(compiler, "driver_version", lambda: 99010)
    monkeypatch.setattr(compiler, "_memory", {})
    assert all(compile_source(source).is_cached for source in VARIANTS.values())


@has_compiler
def test_command_shows_the_first_lines_of_a_long_log(cache, capsys):
    assert main(["compile", "--arch", "sm_80"]) == 1
    printed = capsys.readouterr()
    with pytest.raises(CompileError) as e:
        compile_source(VARIANTS[min(VARIANTS)], "sm_80")
    log = str(e.value).rstrip().splitlines()
    assert len(log) > 100
    assert printed.out == ""
    assert printed.err.splitlines() == [f"bufpool compile: {log[0]}", *log[1:20], f"... and {len(log) - 20} more lines"]


@pytest.fixture
def compiled(monkeypatch):
    """In place of the compiler, NVRTC 13.0: notes for which driver each variant is compiled and kept."""
    asked = []

    def compile_instead(source, arch, reuse, driver):
        asked.append(driver)
        return make_binary()

    monkeypatch.setattr(cli, "compile_source", compile_instead)
    monkeypatch.setattr(cli, "is_kept", lambda binary, driver: True)
    monkeypatch.setattr(cli, "nvrtc_version", lambda: (13, 0))
    return asked


@pytest.mark.parametrize(
    ("here", "options", "drivers"),
    [
        (13010, [], "driver 13.1"),
        (0, ["--driver", "13.0"], "driver 13.0"),
        (13010, ["--driver", "13.0", "--driver", "14.2"], "drivers 13.0, 14.2"),
    ],
)
def test_command_says_for_which_drivers(here, options, drivers, compiled, monkeypatch, capsys):
    monkeypatch.setattr(cli, "driver_version", lambda: here)
    assert main(["compile", *options]) == 0
    printed = capsys.readouterr()
    assert printed.out.startswith(f"compiled for sm_90a, for {drivers}, kept in ")
    assert printed.err == ""


@pytest.mark.parametrize("is_json", [False, True])
def test_command_says_that_kernels_for_no_driver_are_never_found(is_json, compiled, monkeypatch, capsys):
    monkeypatch.setattr(cli, "driver_version", lambda: 0)
    assert main(["compile", *["--json"] * is_json]) == 0
    printed = capsys.readouterr()
    if is_json:
        assert len(json.loads(printed.out)["kernels"]) == len(VARIANTS)
    else:
        assert printed.out.startswith("compiled for sm_90a, for no driver, kept in ")
    assert printed.err == (
        "bufpool compile: no driver here, so no machine with a GPU will find these kernels; name its driver, such as"
        " --driver 13.0\n"
    )


@pytest.mark.parametrize("version", ["12.4", "12.9", "0.0"])
def test_command_refuses_a_driver_of_an_older_major_version(version, compiled, capsys):
    assert main(["compile", "--driver", "13.0", "--driver", version]) == 2
    assert compiled == []
    assert capsys.readouterr().err == (
        "bufpool compile: --driver: expected 13.0 or newer, since a driver runs what a compiler of its own major version or"
        f" an older one made, and NVRTC here is 13.0, got {version}\n"
    )


@pytest.mark.parametrize("version", [(13, 3), None])
def test_command_takes_a_driver_of_an_older_minor_version(version, compiled, monkeypatch):
    monkeypatch.setattr(cli, "nvrtc_version", lambda: version)  # None: the compiler says itself that it is not there
    assert main(["compile", "--driver", "13.0"]) == 0
    assert compiled == [13000] * len(VARIANTS)


@pytest.mark.parametrize("version", ["13", "13.0.1", "thirteen", ""])
def test_command_refuses_what_is_no_driver_version(version, capsys):
    with pytest.raises(SystemExit) as e:
        main(["compile", "--driver", version])
    assert e.value.code == 2
    assert "expected the CUDA version of a driver such as 13.0, got" in capsys.readouterr().err


def make_binary(**changes):
    source = dataclasses.replace(VARIANTS[576], shared_bytes=changes.pop("shared_bytes", 1000))
    return dataclasses.replace(compiler.Binary(source, "sm_90a", b"", 128, 0, 1.0, is_cached=False), **changes)


@pytest.mark.parametrize(
    ("changes", "fault"),
    [
        ({}, None),
        ({"spill_bytes": 8}, "expected no spilled registers, got 8 bytes"),
        ({"shared_bytes": 232449}, "expected at most 232448 bytes of shared memory, got 232449"),
        ({"shared_bytes": 232448}, None),
        ({"registers": -1}, "expected the compiler to say registers and spills"),
    ],
)
def test_faults_are_named(changes, fault):
    found = cli.faults(make_binary(**changes))
    assert (found == []) if fault is None else (len(found) == 1 and fault in found[0])


@pytest.mark.parametrize(("spill_bytes", "code"), [(0, 0), (4, 1)])
def test_exit_code_tells_of_spills(spill_bytes, code, monkeypatch, capsys):
    monkeypatch.setattr(cli, "compile_source", lambda source, arch, reuse, driver: make_binary(spill_bytes=spill_bytes))
    monkeypatch.setattr(cli, "is_kept", lambda binary, driver: True)
    assert cli.run_compile(argparse.Namespace(arch="sm_90a", driver=None, json=False)) == code
    printed = capsys.readouterr()
    assert "128 registers" in printed.out
    assert ("spilled registers" in printed.err) == bool(code)


def test_kernels_that_could_not_be_kept_are_named_and_fail(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("BUFPOOL_CACHE_DIR", str(tmp_path / "file"))
    (tmp_path / "file").write_text("")
    monkeypatch.setattr(cli, "compile_source", lambda source, arch, reuse, driver: make_binary())
    assert cli.run_compile(argparse.Namespace(arch="sm_90a", driver=None, json=False)) == 1
    printed = capsys.readouterr()
    wanted = f"{VARIANTS[576].name}: expected to be kept in {tmp_path / 'file'} (BUFPOOL_CACHE_DIR), got no entry there\n"
    assert printed.err.endswith(wanted)
    assert "kept in" not in printed.out


def test_parameters_are_packed_as_the_kernel_declares_them():
    text = (source_directory() / "sparse_mla_plan.cuh").read_text()
    body = re.search(r"struct Params \{(.*?)\n\};", text, re.DOTALL)[1]
    codes = {"i64": "q", "u32": "I", "int": "i", "float": "f"}
    fields = [line.split("//")[0].strip() for line in body.splitlines()]
    declared = "".join("Q" if "*" in field else codes[field.split()[0]] for field in fields if field)
    packed = sparse_mla_sm90._CHANGING.format + sparse_mla_sm90._FIXED.format
    spelled = re.sub(r"(\d+)(\w)", lambda found: found[2] * int(found[1]), packed.replace("<", ""))
    assert spelled == declared
    assert struct.calcsize("<" + declared) == struct.calcsize("@" + declared)


def test_the_page_tells_how_much_shared_memory_is_taken():
    text = (Path(__file__).resolve().parents[1] / "docs" / "kernel.md").read_text()
    table = re.search(r"Shared memory, bytes:\n\n(.*?)\n\n", text, re.DOTALL)[1].splitlines()
    *parts, sums = [[int(cell.replace(",", "")) for cell in line.split("|")[2:4]] for line in table[2:]]
    assert sums == [VARIANTS[576].shared_bytes, VARIANTS[512].shared_bytes]
    assert [-(-sum(column) // 1024) * 1024 for column in zip(*parts, strict=True)] == sums


ASM = re.compile(r"\basm\b")


def files_with_asm(directory):
    return {path.name for path in directory.rglob("*.cu*") if ASM.search(re.sub(r"//.*", "", path.read_text()))}


def test_inline_ptx_stands_in_one_file():
    assert files_with_asm(source_directory()) == {"ptx.cuh"}


def test_planted_ptx_is_found(tmp_path):
    (tmp_path / "kernel.cu").write_text('void f() { asm volatile("nop;"); }\n')
    (tmp_path / "other.cuh").write_text("// asm in a comment\n")
    assert files_with_asm(tmp_path) == {"kernel.cu"}


def test_sources_include_nothing_from_outside():
    for path in source_directory().rglob("*.cu*"):
        for included in re.findall(r"#\s*include\s*(\S+)", path.read_text()):
            assert (source_directory() / included.strip('"')).is_file(), f"{path.name} includes {included}"
        assert not re.search(r"#\s*if", path.read_text()), f"{path.name} has variants by #if"

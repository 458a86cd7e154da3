"""Sources, keys, the cache on disk and what it does when it cannot be written."""

from __future__ import annotations

import importlib.util
import json
import logging
import os
import sys

import pytest

from bufpool.errors import CompileError
from bufpool.jit import compiler
from bufpool.jit.compiler import Binary, Source, cache_directory, compile_source, source_directory

SOURCE = Source("thing", "thing.cu", "thing", (("SIZE", "3"),), threads=32, shared_bytes=0)
TEXT = '#include "thing.cuh"\nextern "C" __global__ void thing(int* p) { p[threadIdx.x] = SIZE + EXTRA; }\n'


@pytest.fixture(autouse=True)
def empty_memory(monkeypatch):
    monkeypatch.setattr(compiler, "_memory", {})


@pytest.fixture
def sources(tmp_path, monkeypatch):
    """A source directory of one kernel and one header."""
    directory = tmp_path / "csrc"
    directory.mkdir()
    (directory / "thing.cu").write_text(TEXT)
    (directory / "thing.cuh").write_text("constexpr int EXTRA = 4;\n")
    monkeypatch.setattr(compiler, "source_directory", lambda: directory)
    return directory


@pytest.fixture
def compiles(monkeypatch):
    """Counts compilations, and makes them free."""
    made = []

    def compile_nothing(source, arch):
        made.append(source.name)
        return Binary(source, arch, b"\x7fELF" + bytes(range(256)) * 10, 40, 0, 0.25, is_cached=False)

    monkeypatch.setattr(compiler, "_compile", compile_nothing)
    return made


def forget():
    compiler._memory.clear()


def entries(directory):
    return sorted(path.name for path in directory.iterdir())


def test_sources_are_found_in_the_tree():
    assert (source_directory() / "sparse_mla_prefill.cu").is_file()


def test_sources_are_found_inside_an_installed_package(tmp_path, monkeypatch):
    package = tmp_path / "site" / "bufpool"
    (package / "jit").mkdir(parents=True)
    (package / "csrc").mkdir()
    monkeypatch.setattr(compiler, "__file__", str(package / "jit" / "compiler.py"))
    assert source_directory() == package / "csrc"


def test_missing_sources_name_both_places(tmp_path, monkeypatch):
    monkeypatch.setattr(compiler, "__file__", str(tmp_path / "bufpool" / "jit" / "compiler.py"))
    with pytest.raises(CompileError, match=r"csrc: expected the CUDA sources in .*bufpool/csrc or .*csrc, got neither"):
        source_directory()


def test_cache_directory_is_asked_at_every_call(monkeypatch, tmp_path):
    monkeypatch.delenv("BUFPOOL_CACHE_DIR", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert cache_directory() == tmp_path / "xdg" / "bufpool"
    monkeypatch.setenv("BUFPOOL_CACHE_DIR", str(tmp_path / "mine"))
    assert cache_directory() == tmp_path / "mine"
    assert cache_directory(tmp_path / "given") == tmp_path / "given"
    monkeypatch.delenv("BUFPOOL_CACHE_DIR")
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert cache_directory() == tmp_path / "home" / ".cache" / "bufpool"


def test_importing_makes_nothing(run_script, tmp_path):
    done = run_script(
        "import sys, bufpool.jit.compiler, bufpool.jit.launch, bufpool.ops.sparse_mla_sm90\n"
        "print('cuda.core' in sys.modules)",
        BUFPOOL_CACHE_DIR=str(tmp_path / "never"),
    )
    assert done.stdout.split() == ["False"], done.stderr
    assert not (tmp_path / "never").exists()


def test_second_compile_comes_from_memory_and_a_later_process_from_disk(sources, compiles, tmp_path):
    first = compile_source(SOURCE, cache_dir=tmp_path / "cache")
    assert compile_source(SOURCE, cache_dir=tmp_path / "cache") is first
    forget()
    later = compile_source(SOURCE, cache_dir=tmp_path / "cache")
    assert compiles == ["thing"]
    assert later.is_cached
    assert (later.image, later.registers, later.spill_bytes, later.seconds) == (first.image, 40, 0, 0.25)
    assert len(entries(tmp_path / "cache")) == 1


def test_without_reuse_everything_is_compiled_anew_and_kept(sources, compiles, tmp_path):
    compile_source(SOURCE, cache_dir=tmp_path)
    compile_source(SOURCE, cache_dir=tmp_path, reuse=False)
    assert len(compiles) == 2
    assert compile_source(SOURCE, cache_dir=tmp_path) is not None
    assert len(compiles) == 2


@pytest.mark.parametrize("change", ["header", "source", "define", "arch", "nvrtc", "driver", "cuda-core", "threads"])
def test_each_part_of_the_key_counts(sources, compiles, tmp_path, monkeypatch, change):
    compile_source(SOURCE, cache_dir=tmp_path / "cache")
    source, arch = SOURCE, "sm_90a"
    if change == "header":
        (sources / "thing.cuh").write_text("constexpr int EXTRA = 5;\n")
    elif change == "source":
        (sources / "thing.cu").write_text(TEXT + "// more\n")
    elif change == "define":
        source = Source("thing", "thing.cu", "thing", (("SIZE", "4"),), threads=32, shared_bytes=0)
    elif change == "threads":
        source = Source("thing", "thing.cu", "thing", (("SIZE", "3"),), threads=64, shared_bytes=0)
    elif change == "arch":
        arch = "sm_100a"
    elif change == "nvrtc":
        monkeypatch.setattr(compiler, "nvrtc_version", lambda: (99, 0, 1))
    elif change == "driver":
        monkeypatch.setattr(compiler, "driver_version", lambda: 99000)
    else:
        monkeypatch.setattr(compiler, "_package_version", lambda name: "99.0")
    forget()
    compile_source(source, arch, cache_dir=tmp_path / "cache")
    assert len(compiles) == 2
    assert len(entries(tmp_path / "cache")) == 2


def test_what_is_compiled_for_a_driver_serves_where_that_driver_is(sources, compiles, tmp_path, monkeypatch):
    binary = compile_source(SOURCE, cache_dir=tmp_path, driver=99000)
    assert compiler.is_kept(binary, cache_dir=tmp_path, driver=99000)
    assert not compiler.is_kept(binary, cache_dir=tmp_path)
    monkeypatch.setattr(compiler, "driver_version", lambda: 99000)
    forget()
    assert compile_source(SOURCE, cache_dir=tmp_path).is_cached
    monkeypatch.setattr(compiler, "driver_version", lambda: 99010)
    forget()
    assert not compile_source(SOURCE, cache_dir=tmp_path).is_cached
    assert len(compiles) == 2


@pytest.mark.parametrize("damage", ["cut", "flipped", "empty", "alien"])
def test_a_damaged_entry_is_said_and_replaced(sources, compiles, tmp_path, caplog, damage):
    compile_source(SOURCE, cache_dir=tmp_path)
    (path,) = tmp_path.glob("*.kernel")
    whole = path.read_bytes()
    path.write_bytes(
        {"cut": whole[:-7], "flipped": whole[:100] + b"\xff" + whole[101:], "empty": b"", "alien": b"x" * 4000}[damage]
    )
    forget()
    with caplog.at_level(logging.WARNING, "bufpool"):
        compile_source(SOURCE, cache_dir=tmp_path)
    assert "expected a whole entry" in caplog.text
    assert len(compiles) == 2
    assert path.read_bytes()[:8] == whole[:8]
    forget()
    compile_source(SOURCE, cache_dir=tmp_path)
    assert len(compiles) == 2


def test_a_folder_that_cannot_be_made_is_said_and_memory_serves(sources, compiles, tmp_path, caplog):
    (tmp_path / "file").write_text("")
    with caplog.at_level(logging.WARNING, "bufpool"):
        first = compile_source(SOURCE, cache_dir=tmp_path / "file" / "cache")
    assert "kernel cache: expected a folder to write to (BUFPOOL_CACHE_DIR), got" in caplog.text
    assert compile_source(SOURCE, cache_dir=tmp_path / "file" / "cache") is first


def test_a_full_disk_is_said_leaves_nothing_and_memory_serves(sources, compiles, tmp_path, caplog, monkeypatch):
    def no_space(descriptor):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", no_space)
    with caplog.at_level(logging.WARNING, "bufpool"):
        first = compile_source(SOURCE, cache_dir=tmp_path / "cache")
    assert "No space left on device" in caplog.text
    assert entries(tmp_path / "cache") == []
    assert compile_source(SOURCE, cache_dir=tmp_path / "cache") is first


def test_an_entry_that_cannot_be_read_is_said(sources, compiles, tmp_path, caplog):
    compile_source(SOURCE, cache_dir=tmp_path)
    (path,) = tmp_path.glob("*.kernel")
    path.unlink()
    path.mkdir()
    forget()
    with caplog.at_level(logging.WARNING, "bufpool"):
        compile_source(SOURCE, cache_dir=tmp_path)
    assert "expected to read" in caplog.text
    assert len(compiles) == 2


@pytest.mark.parametrize("arch", ["", "90", "compute_90a", "sm_90a -O0", "SM_90", "sm_90a\n"])
def test_an_architecture_that_is_none_is_refused(arch):
    assert not compiler.is_architecture(arch)
    with pytest.raises(CompileError, match="arch: expected a real architecture such as sm_90a, got"):
        compile_source(SOURCE, arch)


@pytest.mark.parametrize("arch", ["sm_80", "sm_90a", "sm_100f"])
def test_an_architecture_is_known_by_its_name(arch):
    assert compiler.is_architecture(arch)


def test_the_version_of_the_compiler_is_none_where_there_is_none(monkeypatch):
    monkeypatch.setitem(sys.modules, "cuda.pathfinder", None)
    assert compiler.nvrtc_version() is None


def test_without_cuda_core_the_error_says_what_to_install(sources, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "cuda.core", None)
    with pytest.raises(CompileError, match=r"cuda\.core: expected it to be importable, got .*pip install bufpool"):
        compile_source(SOURCE, cache_dir=tmp_path)


def test_what_ptxas_says_is_read():
    log = (
        "ptxas info    : Compiling entry function 'thing' for 'sm_90a'\n"
        "    16 bytes stack frame, 12 bytes spill stores, 20 bytes spill loads\n"
        "ptxas info    : Used 168 registers, used 1 barriers\n"
    )
    assert compiler._resources(log) == (168, 32)
    assert compiler._resources("") == (-1, -1)


class TestNvrtc:
    """With the compiler itself; needs no GPU."""

    pytestmark = pytest.mark.skipif(
        importlib.util.find_spec("cuda") is None or importlib.util.find_spec("cuda.core") is None,
        reason="needs cuda.core with NVRTC",
    )

    def test_compiles(self, sources, tmp_path):
        binary = compile_source(SOURCE, cache_dir=tmp_path)
        assert binary.image[:4] == b"\x7fELF"
        assert binary.registers > 0
        assert binary.spill_bytes == 0
        assert not binary.is_cached

    def test_compiling_again_still_says_registers(self, sources, tmp_path):
        for _ in range(2):
            assert compile_source(SOURCE, cache_dir=tmp_path, reuse=False).registers > 0

    def test_a_compiler_without_a_cache_is_asked_without_the_option(self, sources, tmp_path, monkeypatch):
        import cuda.core

        asked = []

        def old_program(text, kind, options, program=cuda.core.Program):
            asked.append(options.no_cache)
            if options.no_cache:
                raise RuntimeError("nvrtc: error: unrecognized option --no-cache found")
            return program(text, kind, options)

        monkeypatch.setattr(cuda.core, "Program", old_program)
        assert compile_source(SOURCE, cache_dir=tmp_path).registers > 0
        assert asked == [True, None]

    def test_an_error_shows_the_log(self, sources, tmp_path):
        (sources / "thing.cuh").write_text("constexpr int EXTRA = nonsense;\n")
        with pytest.raises(CompileError, match=r"(?s)thing: expected thing.cu to compile for sm_90a, got.*nonsense"):
            compile_source(SOURCE, cache_dir=tmp_path)
        assert not list(tmp_path.glob("*.kernel"))


def test_key_is_json_of_plain_values():
    versions = compiler._versions()
    plain = {name: list(version) if isinstance(version, tuple) else version for name, version in versions.items()}
    assert json.loads(json.dumps(versions)) == plain

"""The cache of compiled kernels among processes: eight at once, one that is killed, a full disk, a read-only folder.

Each scene is a process of its own that imports once and forks what it needs, so that none of it touches the test run.
The compiler itself is replaced where it is not the question: what is asked is what happens on disk.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import tempfile
import time

import pytest

from bufpool.jit import compiler
from bufpool.jit.compiler import Binary, Source, compile_source, is_kept

pytestmark = pytest.mark.slow

has_compiler = pytest.mark.skipif(
    importlib.util.find_spec("cuda") is None or importlib.util.find_spec("cuda.core") is None,
    reason="needs cuda.core with NVRTC",
)

# What every scene begins with. An image says which variant and which process made it.
START = """
import os, signal, sys, time
from dataclasses import replace
from bufpool.jit import compiler
from bufpool.jit.compiler import Binary, Source, compile_source, is_kept

FOLDER = sys.argv[1]

def variant(number):
    return Source(f"variant{number}", "sparse_mla_prefill.cu", "entry", (("N", str(number)),), 32, 0)

def image(source):
    return source.name.encode() * 100_000

def compile_nothing(source, arch):
    return Binary(source, arch, image(source), 40, 0, 0.25, is_cached=False)

compiler._compile = compile_nothing

def anew(source, **options):
    compiler._memory.clear()
    return compile_source(source, cache_dir=FOLDER, **options)

def in_processes(count, work):
    # Forks so many that begin together; each runs work(number). Ends with how many did not end well.
    reader, writer = os.pipe()
    children = []
    for number in range(count):
        child = os.fork()
        if child == 0:
            os.close(writer)
            os.read(reader, 1)  # until all are there
            try:
                work(number)
            except BaseException:
                sys.excepthook(*sys.exc_info())
                os._exit(1)
            os._exit(0)
        children.append(child)
    os.close(reader)
    os.close(writer)
    return sum(os.waitpid(child, 0)[1] != 0 for child in children)
"""


def entries(folder):
    return sorted(path.name for path in folder.iterdir())


def scene(run_script, text, folder, **options):
    done = run_script(START + text, folder, **options)
    assert done.returncode == 0, done.stderr
    return done


def test_eight_processes_at_once_read_whole_entries_while_others_write_them(run_script, tmp_path):
    done = scene(
        run_script,
        """
def work(number):
    for turn in range(60):
        source = variant((number + turn) % 3)
        found = anew(source, reuse=(number + turn) % 4 != 0)
        assert found.image == image(source), (found.source, len(found.image))
        assert (found.registers, found.spill_bytes, found.seconds) == (40, 0, 0.25)

failed = in_processes(8, work)
assert failed == 0, failed
compiler._compile = None
for number in range(3):
    assert anew(variant(number)).is_cached
""",
        tmp_path / "cache",
    )
    assert done.stderr == ""  # not one entry was ever seen in part
    assert len(entries(tmp_path / "cache")) == 3


def test_eight_processes_make_the_folder_together(run_script, tmp_path):
    done = scene(
        run_script,
        "assert in_processes(8, lambda number: anew(variant(number))) == 0",
        tmp_path / "not" / "there" / "yet",
    )
    assert done.stderr == ""
    assert len(entries(tmp_path / "not" / "there" / "yet")) == 8


@has_compiler
def test_eight_processes_compile_the_same_kernel(run_script, tmp_path):
    sources = tmp_path / "csrc"
    sources.mkdir()
    (sources / "k.cu").write_text('extern "C" __global__ void k(int* p) { p[threadIdx.x] = 7; }\n')
    done = run_script(
        START.replace("compiler._compile = compile_nothing", "")
        + f"""
import pathlib
compiler.source_directory = lambda: pathlib.Path({str(sources)!r})
source = Source("k", "k.cu", "k", (), 32, 0)

def work(number):
    found = anew(source)
    assert found.image[:4] == b"\\x7fELF"
    assert is_kept(found, cache_dir=FOLDER)

assert in_processes(8, work) == 0
assert anew(source).is_cached
""",
        tmp_path / "cache",
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    assert len(entries(tmp_path / "cache")) == 1


@pytest.mark.parametrize("when", ["compiling", "written in part", "written", "renamed"])
def test_a_killed_process_leaves_no_entry_or_a_whole_one(run_script, tmp_path, when):
    done = scene(
        run_script,
        f"""
when = {when!r}

def die(*arguments):
    os.kill(os.getpid(), signal.SIGKILL)

def write_a_part(descriptor, mode):
    os.ftruncate(descriptor, 1000)
    die()

def rename_and_die(*paths, rename=os.replace):
    rename(*paths)
    die()

child = os.fork()
if child == 0:
    if when == "compiling":
        compiler._compile = die
    elif when == "written in part":
        os.fchmod = write_a_part
    elif when == "written":
        os.replace = die
    else:
        os.replace = rename_and_die
    anew(variant(0))
    os._exit(0)
assert os.waitpid(child, 0)[1] == signal.SIGKILL

# The next process knows nothing of it.
found = anew(variant(0))
assert found.image == image(variant(0))
assert found.is_cached == (when == "renamed")
assert anew(variant(0)).is_cached
""",
        tmp_path,
    )
    assert done.stderr == ""
    kept = [name for name in entries(tmp_path) if name.endswith(".kernel")]
    assert len(kept) == 1
    assert len(entries(tmp_path)) == 1 + (when in ("written in part", "written"))


def test_temporary_files_of_killed_processes_go_with_a_later_write(tmp_path, monkeypatch):
    monkeypatch.setattr(compiler, "_memory", {})
    monkeypatch.setattr(compiler, "_compile", lambda source, arch: Binary(source, arch, b"x", 1, 0, 0.0, is_cached=False))
    for name, age_seconds in {".new-old": 2 * 24 * 3600, ".new-young": 60, "mine": 2 * 24 * 3600}.items():
        (tmp_path / name).write_text("")
        os.utime(tmp_path / name, (time.time() - age_seconds,) * 2)
    binary = compile_source(Source("s", "sparse_mla_prefill.cu", "s", (), 32, 0), cache_dir=tmp_path)
    assert is_kept(binary, cache_dir=tmp_path)
    assert [name for name in entries(tmp_path) if not name.endswith(".kernel")] == [".new-young", "mine"]


# What a process sees that may write files of so many bytes only: a write fails in the middle, as on a full disk.
FULL = """
import logging, resource
logging.basicConfig(format="%(message)s")
former = anew(variant(0))
resource.setrlimit(resource.RLIMIT_FSIZE, (5000, 5000))
"""


def test_a_write_that_fails_in_the_middle_is_said_and_memory_serves(run_script, tmp_path):
    done = scene(
        run_script,
        FULL
        + """
found = anew(variant(1))
assert found.image == image(variant(1))
assert compile_source(variant(1), cache_dir=FOLDER) is found
assert not is_kept(found, cache_dir=FOLDER)
again = anew(variant(0), reuse=False)  # does not replace the former entry by a part
assert anew(variant(0)).is_cached
""",
        tmp_path,
    )
    lines = done.stderr.splitlines()
    assert len(lines) == 2
    for line in lines:
        assert line.startswith(f"kernel cache: expected to write {tmp_path}/")
        assert line.endswith(".kernel, got [Errno 27] File too large; the kernel stays in memory")
    assert len(entries(tmp_path)) == 1


def mounts(options, folder):
    """The start of a command line that runs with a file system of its own mounted on the folder."""
    tool = shutil.which("unshare")
    if tool is None:
        pytest.skip("needs unshare, to mount a file system")
    shell = f'mount -t tmpfs {options} bufpool "$0" && exec "$@"'
    start = [tool, "--user", "--map-root-user", "--mount", "sh", "-c", shell]
    tried = subprocess.run([*start, folder, "true"], capture_output=True, text=True)
    if tried.returncode != 0:
        pytest.skip(f"needs to mount a file system in a namespace of its own: {tried.stderr.strip()}")
    return [*start, folder]


def test_a_disk_that_is_full_is_said_and_memory_serves(run_script, tmp_path):
    done = scene(
        run_script,
        """
import logging, pathlib
logging.basicConfig(format="%(message)s")
for number in range(6):  # of 0.8 MB each
    found = anew(variant(number))
    assert found.image == image(variant(number))
kept = [number for number in range(6) if is_kept(anew(variant(number)), cache_dir=FOLDER)]
assert kept == [0, 1, 2], kept
assert [path.suffix for path in pathlib.Path(FOLDER).iterdir()] == [".kernel"] * 3
""",
        tmp_path,
        before=mounts("-o size=3m", tmp_path),
    )
    lines = done.stderr.splitlines()
    assert len(lines) >= 3
    for line in lines:
        assert line.startswith(f"kernel cache: expected to write {tmp_path}/")
        assert line.endswith(".kernel, got [Errno 28] No space left on device; the kernel stays in memory")


READ_ONLY = """
import logging
logging.basicConfig(format="%(message)s")
assert anew(variant(0)).is_cached
print("read", file=sys.stderr)
found = anew(variant(1))
assert found.image == image(variant(1))
assert compile_source(variant(1), cache_dir=FOLDER) is found
assert not is_kept(found, cache_dir=FOLDER)
"""


def check_read_only(done, folder, reason):
    read, *lines = done.stderr.splitlines()
    assert read == "read"  # what is there serves, and nothing is said
    (line,) = lines
    assert line.startswith(f"kernel cache: expected to write {folder}/")
    assert line.endswith("; the kernel stays in memory")
    assert reason in line


def test_a_folder_that_may_not_be_written_serves_what_it_has(run_script):
    # Root may write everywhere: it becomes nobody, and then the way to the folder must be open to all.
    folder = tempfile.mkdtemp(prefix="bufpool-read-only-")
    try:
        done = scene(
            run_script,
            """
anew(variant(0))
keys = {number: compiler._key(variant(number), "sm_90a") for number in range(2)}
compiler._key = lambda source, arch, driver: keys[int(source.name[-1])]  # nobody may not see the sources
os.chmod(FOLDER, 0o555)
if os.geteuid() == 0:
    os.seteuid(65534)
"""
            + READ_ONLY,
            folder,
        )
        check_read_only(done, folder, "[Errno 13] Permission denied")
    finally:
        os.chmod(folder, 0o755)
        shutil.rmtree(folder)


def test_a_file_system_that_is_mounted_read_only_serves_what_it_has(run_script, tmp_path):
    done = scene(
        run_script,
        """
import subprocess
anew(variant(0))
subprocess.run(["mount", "-o", "remount,ro", FOLDER], check=True)
"""
        + READ_ONLY,
        tmp_path,
        before=mounts("", tmp_path),
    )
    check_read_only(done, tmp_path, "[Errno 30] Read-only file system")


def test_what_one_user_compiled_another_one_reads(tmp_path, monkeypatch):
    """An image is built by one user and run by another."""
    monkeypatch.setattr(compiler, "_memory", {})
    monkeypatch.setattr(compiler, "_compile", lambda source, arch: Binary(source, arch, b"x", 1, 0, 0.0, is_cached=False))
    compile_source(Source("s", "sparse_mla_prefill.cu", "s", (), 32, 0), cache_dir=tmp_path)
    (entry,) = tmp_path.iterdir()
    assert entry.stat().st_mode & 0o777 == 0o644
    # A folder that nobody made before stays the user's own.
    compiler._memory.clear()
    compile_source(Source("s", "sparse_mla_prefill.cu", "s", (), 32, 0), cache_dir=tmp_path / "new")
    assert (tmp_path / "new").stat().st_mode & 0o077 == 0

"""From CUDA source to a cubin: NVRTC through cuda.core, behind a cache on disk.

Nothing happens at import: cuda.core, NVRTC and the cache directory are touched at the first compile.

*Concurrency*: safe from several threads and processes. A cache entry is written to a temporary file and renamed, and
carries a digest of itself, so a reader sees a whole entry, or none. Two processes that miss at once compile twice and
write the same bytes. A process that is killed leaves at most a temporary file, which a later write removes after a day.
A folder that is full or cannot be written is said once for each kernel, and memory serves.
"""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import io
import json
import logging
import os
import re
import tempfile
import threading
import time
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from ..errors import CompileError

__all__ = [
    "Binary",
    "Source",
    "cache_directory",
    "compile_source",
    "driver_version",
    "is_architecture",
    "is_kept",
    "nvrtc_version",
    "source_directory",
]

_log = logging.getLogger(__name__)

_ENTRY_MAGIC = b"bufpool1"
_TEMPORARY = ".new-"
_STALE_SECONDS = 24 * 3600  # no write takes as long
_DIGEST_BYTES = hashlib.sha256().digest_size
_INSTALL_HINT = "pip install bufpool[cuda13] (or bufpool[cuda12] with a CUDA 12 driver)"

_memory: dict[str, Binary] = {}
_memory_lock = threading.Lock()


@dataclass(frozen=True)
class Source:
    """One kernel variant: a file of the source directory and what the compiler is told about it.

    Attributes:
        name: of the variant, unique.
        file: path under the source directory.
        entry: the ``extern "C"`` kernel in it.
        defines: macros, ``(name, value)``.
        threads: of one CTA.
        shared_bytes: dynamic shared memory of one CTA.
    """

    name: str
    file: str
    entry: str
    defines: tuple[tuple[str, str], ...]
    threads: int
    shared_bytes: int


@dataclass(frozen=True)
class Binary:
    """A compiled variant.

    Attributes:
        image: the cubin.
        registers: per thread, at launch.
        spill_bytes: stored and loaded by one thread because registers were short.
        seconds: spent compiling; what was spent then, if it came from the cache.
        is_cached: it came from disk.
    """

    source: Source
    arch: str
    image: bytes
    registers: int
    spill_bytes: int
    seconds: float
    is_cached: bool


def source_directory() -> Path:
    """The directory of the CUDA sources: inside the package in a wheel, beside it in a source tree.

    Raises:
        CompileError: it is in neither place.
    """
    package = Path(__file__).resolve().parent.parent
    places = (package / "csrc", package.parent / "csrc")
    for place in places:
        if place.is_dir():
            return place
    raise CompileError(f"csrc: expected the CUDA sources in {places[0]} or {places[1]}, got neither")


def cache_directory(path: str | os.PathLike[str] | None = None) -> Path:
    """Where compiled kernels are kept; asked at every call, created by nobody here.

    ``path`` if given, else ``BUFPOOL_CACHE_DIR``, else ``bufpool`` under ``XDG_CACHE_HOME`` (``~/.cache``).
    """
    if path is not None:
        return Path(path)
    chosen = os.environ.get("BUFPOOL_CACHE_DIR")
    if chosen:
        return Path(chosen)
    root = os.environ.get("XDG_CACHE_HOME")
    return (Path(root) if root else Path.home() / ".cache") / "bufpool"


def is_architecture(name: str) -> bool:
    """Whether a real architecture is named so, such as ``sm_90a``. Whether the compiler knows it, the compiler says."""
    return re.fullmatch(r"sm_\d{2,3}[af]?", name) is not None


def compile_source(
    source: Source,
    arch: str = "sm_90a",
    *,
    cache_dir: str | os.PathLike[str] | None = None,
    reuse: bool = True,
    driver: int | None = None,
) -> Binary:
    """Compile a variant for ``arch``, or take it from memory or disk.

    Args:
        source: the variant.
        arch: real architecture, as NVRTC names it (``sm_90a``).
        cache_dir: see ``cache_directory``.
        reuse: False compiles anew; what comes out is kept all the same.
        driver: keep it for processes with this driver, as ``cuDriverGetVersion`` counts (13000 is CUDA 13.0). None: for
            those with this machine's driver.

    Raises:
        CompileError: the compiler refused (the text ends with its log), the sources are missing, or cuda.core is not
            installed.
    """
    if not is_architecture(arch):
        raise CompileError(f"arch: expected a real architecture such as sm_90a, got {arch!r}")
    key = _key(source, arch, driver)
    if reuse:
        with _memory_lock:
            found = _memory.get(key)
        if found is not None:
            return found
    directory = _directory_or_none(cache_dir)
    found = _read(directory, key, source, arch) if directory and reuse else None
    if found is None:
        found = _compile(source, arch)
        if directory:
            _write(directory, key, found)
    with _memory_lock:
        _memory[key] = found
    return found


def is_kept(binary: Binary, *, cache_dir: str | os.PathLike[str] | None = None, driver: int | None = None) -> bool:
    """Whether a later process finds this binary on disk. Reads the entry and checks its digest.

    Args:
        binary: what ``compile_source`` returned.
        cache_dir: see ``cache_directory``.
        driver: see ``compile_source``.
    """
    try:
        directory = cache_directory(cache_dir)
    except RuntimeError:  # no home
        return False
    found = _read(directory, _key(binary.source, binary.arch, driver), binary.source, binary.arch)
    return found is not None and found.image == binary.image


# --------------------------------------------------------------------------------------------------------------- NVRTC


def _compile(source: Source, arch: str) -> Binary:
    try:
        from cuda.core import Program, ProgramOptions
    except ImportError as e:
        raise CompileError(f"cuda.core: expected it to be importable, got {e}; {_INSTALL_HINT}") from e
    directory = source_directory()
    try:
        text = (directory / source.file).read_text()
    except OSError as e:
        raise CompileError(f"{source.file}: expected a readable source in {directory}, got {e}") from e
    log = io.StringIO()
    start = time.perf_counter()
    # NVRTC's own cache gives the binary without ptxas's figures; one too old to have a cache does not know the option.
    for no_cache in (True, None):
        options = ProgramOptions(
            name=source.file,
            arch=arch,
            std="c++17",
            include_path=[str(directory)],
            define_macro=list(source.defines) or None,
            ptxas_options=["-v"],
            no_cache=no_cache,
        )
        try:
            program = Program(text, "c++", options)
            try:
                image = bytes(program.compile("cubin", logs=log).code)
            finally:
                program.close()
            break
        except MemoryError:
            raise
        except Exception as e:
            if no_cache and "no-cache" in str(e):
                continue
            raise CompileError(
                f"{source.name}: expected {source.file} to compile for {arch}, got:\n{log.getvalue()}{e}"
            ) from e
    seconds = time.perf_counter() - start
    for line in log.getvalue().splitlines():
        if "Performance Loss" in line:  # such as wgmma that ptxas had to put one after the other
            _log.warning("%s: expected ptxas to have no complaint, got: %s", source.name, line.strip())
    registers, spill_bytes = _resources(log.getvalue())
    _log.info("compiled %s for %s in %.2f s, %d registers", source.name, arch, seconds, registers)
    return Binary(source, arch, image, registers, spill_bytes, seconds, is_cached=False)


def _resources(log: str) -> tuple[int, int]:
    """Registers and spilled bytes out of what ``ptxas -v`` says; -1 where it does not say."""
    registers = re.findall(r"Used (\d+) registers", log)
    spills = re.findall(r"(\d+) bytes spill stores, (\d+) bytes spill loads", log)
    return (
        max(map(int, registers), default=-1),
        sum(int(stores) + int(loads) for stores, loads in spills) if spills else -1,
    )


# --------------------------------------------------------------------------------------------------------------- cache


def _key(source: Source, arch: str, driver: int | None = None) -> str:
    """Digest of everything that decides what the compiler makes: sources, headers, flags, versions, architecture."""
    directory = source_directory()
    files = sorted(path for path in directory.rglob("*") if path.suffix in (".cu", ".cuh"))
    parts = {
        "files": [(str(path.relative_to(directory)), hashlib.sha256(path.read_bytes()).hexdigest()) for path in files],
        "source": [source.name, source.file, source.entry, source.defines, source.threads, source.shared_bytes],
        "arch": arch,
        "versions": _versions(driver),
    }
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()


def _versions(driver: int | None = None) -> dict[str, object]:
    return {
        "format": _ENTRY_MAGIC.decode(),
        "cuda.core": _package_version("cuda-core"),
        "nvrtc": nvrtc_version(),
        "driver": driver_version() if driver is None else driver,
    }


def _package_version(name: str) -> str:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return "none"


def nvrtc_version() -> tuple[int, int, int] | None:
    """Major and minor CUDA version of the compiler, and size of its library: patch releases share the version.

    None where there is no compiler. An entry can still be read there where somebody else's key had none either.
    """
    try:
        from cuda.pathfinder import load_nvidia_dynamic_lib

        path = load_nvidia_dynamic_lib("nvrtc").abs_path
        major, minor = ctypes.c_int(), ctypes.c_int()
        ctypes.CDLL(path).nvrtcVersion(ctypes.byref(major), ctypes.byref(minor))
        return major.value, minor.value, os.path.getsize(path)
    except (ImportError, OSError, RuntimeError):
        return None


def driver_version() -> int:
    """CUDA version of this machine's driver, as ``cuDriverGetVersion`` counts (13000 is 13.0); 0 where there is none."""
    version = ctypes.c_int()
    try:
        ctypes.CDLL("libcuda.so.1").cuDriverGetVersion(ctypes.byref(version))
    except OSError:
        return 0
    return version.value


def _directory_or_none(path: str | os.PathLike[str] | None) -> Path | None:
    try:
        directory = cache_directory(path)
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    except (OSError, RuntimeError) as e:
        _log.warning("kernel cache: expected a folder to write to (BUFPOOL_CACHE_DIR), got %s; kernels stay in memory", e)
        return None
    return directory


def _read(directory: Path, key: str, source: Source, arch: str) -> Binary | None:
    path = directory / f"{key}.kernel"
    try:
        entry = path.read_bytes()
    except FileNotFoundError:
        return None
    except OSError as e:
        _log.warning("kernel cache: expected to read %s, got %s; compiling", path, e)
        return None
    head = len(_ENTRY_MAGIC) + _DIGEST_BYTES
    payload = entry[head:]
    if entry[:head] != _ENTRY_MAGIC + hashlib.sha256(payload).digest():
        _log.warning("kernel cache: expected a whole entry in %s, got %d bytes of another digest", path, len(entry))
        return None
    line, _, image = payload.partition(b"\n")
    facts = json.loads(line)
    return Binary(source, arch, image, facts["registers"], facts["spill_bytes"], facts["seconds"], is_cached=True)


def _write(directory: Path, key: str, binary: Binary) -> None:
    facts = {"registers": binary.registers, "spill_bytes": binary.spill_bytes, "seconds": binary.seconds}
    payload = json.dumps(facts).encode() + b"\n" + binary.image
    path = directory / f"{key}.kernel"
    temporary = None
    try:
        descriptor, temporary = tempfile.mkstemp(prefix=_TEMPORARY, dir=directory)
        with os.fdopen(descriptor, "wb") as file:
            # For whoever may enter the folder: one user builds an image, another one runs it.
            os.fchmod(descriptor, 0o644)
            file.write(_ENTRY_MAGIC + hashlib.sha256(payload).digest() + payload)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except OSError as e:
        _log.warning("kernel cache: expected to write %s, got %s; the kernel stays in memory", path, e)
        if temporary is not None:
            with contextlib.suppress(OSError):
                os.unlink(temporary)
    else:
        _remove_stale(directory)


def _remove_stale(directory: Path) -> None:
    """Remove temporary files of processes that were killed while they wrote."""
    for path in directory.glob(f"{_TEMPORARY}*"):
        with contextlib.suppress(OSError):  # another process may be quicker
            if time.time() - path.stat().st_mtime > _STALE_SECONDS:
                path.unlink()

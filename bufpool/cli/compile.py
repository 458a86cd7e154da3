"""``bufpool compile``: compile every kernel variant ahead of its first use, and say what each takes."""

from __future__ import annotations

import argparse
import json
import re
import sys

from ..jit.compiler import (
    Binary,
    cache_directory,
    compile_source,
    driver_version,
    is_architecture,
    is_kept,
    nvrtc_version,
)
from ..ops.sparse_mla_sm90 import ARCH, VARIANTS
from .table import bytes_text, print_table
from .usage import UsageError

__all__ = ["MAX_SHARED_BYTES", "add_arguments", "faults", "run_compile"]

MAX_SHARED_BYTES = 232_448
"""Shared memory that one CTA may have on compute capability 9.0."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``bufpool compile``."""
    parser.add_argument(
        "--arch", type=_architecture, default=ARCH, metavar="NAME", help="architecture to compile for (%(default)s)"
    )
    parser.add_argument(
        "--driver",
        type=_driver_version,
        action="append",
        metavar="VERSION",
        help="keep the kernels for machines whose driver has this CUDA version, such as 13.0 (nvidia-smi names it); may be"
        " given several times (default: this machine's driver)",
    )
    parser.add_argument("--json", action="store_true", help="one JSON object on stdout in place of the table")


def run_compile(args: argparse.Namespace) -> int:
    """Compile all variants anew, keep them in the cache, and print what each takes. Needs NVRTC, but no GPU.

    Without a driver, here or in ``args``, it proves that the kernels compile; one line on stderr says that no machine with
    a GPU will look for them.

    Returns:
        1 if a variant spills registers, takes more shared memory than a CTA may have, or could not be kept, else 0.

    Raises:
        UsageError: a driver that could not load what this compiler makes.
        CompileError: a variant does not compile; the text ends with the compiler's log.
    """
    _check_drivers(args.driver or [])
    drivers: list[int | None] = args.driver or [None]
    lost: list[str] = []
    for driver in drivers:
        binaries = [compile_source(source, args.arch, reuse=False, driver=driver) for source in VARIANTS.values()]
        lost += [binary.source.name for binary in binaries if not is_kept(binary, driver=driver)]
    found = [fault for binary in binaries for fault in faults(binary)]
    if lost:
        found.append(f"{', '.join(lost)}: expected to be kept in {_folder()} (BUFPOOL_CACHE_DIR), got no entry there")
    versions = args.driver or list(filter(None, [driver_version()]))
    if args.json:
        print(json.dumps({"kernels": [_facts(binary) for binary in binaries]}))
    else:
        print_table(
            f"compiled for {args.arch}, for {_drivers_text(versions)}" + ("" if lost else f", kept in {_folder()}"),
            [(binary.source.name, _line(binary)) for binary in binaries],
        )
    for fault in found:
        print(f"bufpool compile: {fault}", file=sys.stderr)
    if not versions and not lost:
        hint = "no driver here, so no machine with a GPU will find these kernels; name its driver, such as --driver 13.0"
        print(f"bufpool compile: {hint}", file=sys.stderr)
    return 1 if found else 0


def _architecture(text: str) -> str:
    """An argument that names a real architecture. Whether the compiler knows that one, it says itself."""
    if not is_architecture(text):
        raise argparse.ArgumentTypeError(f"expected a real architecture such as {ARCH}, got {text!r}")
    return text


def _driver_version(text: str) -> int:
    """An argument that names a CUDA version, as the driver counts: 13.0 is 13000."""
    parts = re.fullmatch(r"(\d{1,3})\.(\d{1,2})", text)
    if not parts:
        raise argparse.ArgumentTypeError(f"expected the CUDA version of a driver such as 13.0, got {text!r}")
    return int(parts[1]) * 1000 + int(parts[2]) * 10


def _check_drivers(drivers: list[int]) -> None:
    """See that each driver loads what this compiler makes.

    Source: NVIDIA, "CUDA Compatibility", Minor Version Compatibility. What a toolkit compiled runs on drivers of its own
    major release, of whichever minor one, and on newer drivers.
    """
    nvrtc = nvrtc_version()
    for driver in drivers:
        if nvrtc is not None and driver // 1000 < nvrtc[0]:
            raise UsageError(
                f"--driver: expected {nvrtc[0]}.0 or newer, since a driver runs what a compiler of its own major version or"
                f" an older one made, and NVRTC here is {nvrtc[0]}.{nvrtc[1]}, got {_version_text(driver)}"
            )


def _version_text(driver: int) -> str:
    return f"{driver // 1000}.{driver % 1000 // 10}"


def _drivers_text(drivers: list[int]) -> str:
    if not drivers:
        return "no driver"
    return f"driver{'s' if len(drivers) > 1 else ''} {', '.join(map(_version_text, drivers))}"


def faults(binary: Binary) -> list[str]:
    """What is wrong with a compiled variant, as ``<variant>: expected <rule>, got <value>``."""
    name, source = binary.source.name, binary.source
    found = []
    if binary.registers < 0 or binary.spill_bytes < 0:
        found.append(f"{name}: expected the compiler to say registers and spills, got no such line in its log")
    elif binary.spill_bytes > 0:
        found.append(f"{name}: expected no spilled registers, got {binary.spill_bytes} bytes")
    if source.shared_bytes > MAX_SHARED_BYTES:
        found.append(f"{name}: expected at most {MAX_SHARED_BYTES} bytes of shared memory, got {source.shared_bytes}")
    return found


def _folder() -> str:
    try:
        return str(cache_directory())
    except RuntimeError as e:  # no home
        return f"a folder of the user ({e})"


def _facts(binary: Binary) -> dict[str, object]:
    return {
        "name": binary.source.name,
        "registers": binary.registers,
        "spill_bytes": binary.spill_bytes,
        "smem_bytes": binary.source.shared_bytes,
        "seconds": round(binary.seconds, 3),
    }


def _line(binary: Binary) -> str:
    return (
        f"{binary.registers} registers, {binary.spill_bytes} bytes spilled, "
        f"{bytes_text(binary.source.shared_bytes)} of shared memory, {binary.seconds:.2f} s"
    )

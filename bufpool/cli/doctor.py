"""``bufpool doctor``: what bufpool can do on this machine, and why not where it cannot."""

from __future__ import annotations

import argparse
import importlib
import importlib.metadata
import json
import os
import platform
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch

from .. import __version__
from .table import bytes_text, print_table

__all__ = ["add_arguments", "examine", "run_doctor"]

_T = TypeVar("_T")

_NVRTC_PACKAGES = ("nvidia-cuda-nvrtc", "nvidia-cuda-nvrtc-cu13", "nvidia-cuda-nvrtc-cu12")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``bufpool doctor``."""
    parser.add_argument("--json", action="store_true", help="one JSON object on stdout in place of the table")


def run_doctor(args: argparse.Namespace) -> int:
    """Print what `examine` finds; always 0, since a machine without a GPU is no failure."""
    facts = examine()
    if args.json:
        print(json.dumps(facts))
    else:
        print_table(f"bufpool {facts['bufpool']} on Python {facts['python']}, {facts['platform']}", _lines(facts))
    return 0


def examine() -> dict[str, Any]:
    """Everything that decides what serves here; a fact that cannot be had is a text that begins with ``unknown``."""
    return {
        "bufpool": __version__,
        "python": platform.python_version(),
        "platform": f"{platform.system()} {platform.machine()}",
        "torch": torch.__version__,
        "torch_cuda": torch.version.cuda,
        "torch_hip": torch.version.hip,
        "driver": _or_reason(_driver),
        "cuda_core": _version("cuda-core"),
        "cuda_bindings": _version("cuda-bindings"),
        "nvrtc": _or_reason(_nvrtc),
        "cache_folder": _or_reason(_cache_folder),
        "devices": [
            {"device": "cpu", "arena": _or_reason(lambda: _arena("cpu"))},
            *_cuda_devices(),
        ],
        "extras": {"rich": _version("rich"), "matplotlib": _version("matplotlib")},
    }


def _or_reason(ask: Callable[[], _T]) -> _T | str:
    # A doctor that falls over with its patient helps nobody: whatever goes wrong is the finding.
    try:
        return ask()
    except Exception as e:
        return f"unknown ({type(e).__name__}: {_one_line(e)})"


def _cuda_devices() -> list[dict[str, Any]]:
    count = _or_reason(torch.cuda.device_count)
    if isinstance(count, str):
        return [{"device": "cuda", "arena": count}]
    found = {f"cuda:{index}": _or_reason(partial(_cuda_device, index)) for index in range(count)}
    return [{"device": name, "arena": facts} if isinstance(facts, str) else facts for name, facts in found.items()]


def _one_line(e: Exception) -> str:
    return " ".join(str(e).split())[:300]


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _driver() -> str:
    driver = importlib.import_module("bufpool.driver")
    if not driver.is_available():
        return f"no: {driver.unavailable_reason()}"
    version = driver.driver_version()
    return f"CUDA {version // 1000}.{version % 1000 // 10}"


def _nvrtc() -> str:
    if _version("cuda-core") is None:
        return "no: cuda-core is not installed; pip install 'bufpool[cuda13]' or 'bufpool[cuda12]' brings it"
    pathfinder = importlib.import_module("cuda.pathfinder")
    loaded = pathfinder.load_nvidia_dynamic_lib("nvrtc")
    packages = [f"{name} {version}" for name in _NVRTC_PACKAGES if (version := _version(name))]
    return ", ".join(packages) or str(loaded.abs_path)


def _arena(device: str) -> str:
    """The kind of arena that serves there, found by acquiring one row."""
    from ..pool import OutputPool
    from ..spec import OutputSpec

    with OutputPool() as pool:
        pool.acquire(OutputSpec(row=((1,), torch.float32)), rows=1, like=torch.empty(0, device=device))
        return str(pool.stats().arena)


def _cuda_device(index: int) -> dict[str, Any]:
    name = f"cuda:{index}"
    major, minor = torch.cuda.get_device_capability(index)
    properties = torch.cuda.get_device_properties(index)
    return {
        "device": name,
        "name": properties.name,
        "capability": f"{major}.{minor}",
        "total_bytes": properties.total_memory,
        "free_bytes": _or_reason(lambda: torch.cuda.mem_get_info(index)[0]),
        "virtual_memory": _or_reason(lambda: _virtual_memory(index)),
        "arena": _or_reason(lambda: _arena(name)),
        "sm90_kernel": _or_reason(lambda: _sm90_kernel(index)),
    }


def _virtual_memory(index: int) -> str:
    driver = importlib.import_module("bufpool.driver")
    if not driver.is_available():
        return f"no: {driver.unavailable_reason()}"
    return "yes" if driver.supports_virtual_memory(index) else "no: the device does not support it"


def _sm90_kernel(index: int) -> str:
    try:
        kernel = importlib.import_module("bufpool.ops.sparse_mla_sm90")
    except ImportError as e:
        return f"no: the kernel cannot be imported ({_one_line(e)})"
    reason = kernel.unavailable_reason(torch.device("cuda", index))
    return "yes" if reason is None else f"no: {reason}"


def _cache_folder() -> dict[str, Any]:
    compiler = importlib.import_module("bufpool.jit.compiler")
    return _folder(compiler.cache_directory())


def _folder(path: Path) -> dict[str, Any]:
    """A folder, and whether it can be written, or made where it is not there yet; nothing is made."""
    existing = path
    while not existing.exists() and existing != existing.parent:
        existing = existing.parent
    is_writable = existing.is_dir() and os.access(existing, os.W_OK | os.X_OK)
    return {"path": str(path), "exists": path.is_dir(), "is_writable": is_writable}


def _lines(facts: dict[str, Any]) -> list[tuple[str, str]]:
    build = facts["torch_cuda"] and f"CUDA {facts['torch_cuda']}"
    build = build or (facts["torch_hip"] and f"HIP {facts['torch_hip']}") or "CPU only"
    cache = facts["cache_folder"]
    if isinstance(cache, dict):
        cache = f"{cache['path']} ({'can' if cache['is_writable'] else 'cannot'} be written)"
    lines = [
        ("torch", f"{facts['torch']} ({build})"),
        ("driver", facts["driver"]),
        ("cuda-core", facts["cuda_core"] or "not installed"),
        ("NVRTC", facts["nvrtc"]),
        ("cache folder", cache),
    ]
    for device in facts["devices"]:
        name = device["device"]
        if "name" in device:
            lines += [
                (name, f"{device['name']}, capability {device['capability']}, {bytes_text(device['total_bytes'])}"),
                ("  virtual memory", device["virtual_memory"]),
                ("  SM90 kernel", device["sm90_kernel"]),
            ]
            name = ""
        lines.append((f"{name}  arena" if name else "  arena", device["arena"]))
    if len(facts["devices"]) == 1:
        lines.append(("SM90 kernel", "no: needs a CUDA device of capability 9.0"))
    return lines

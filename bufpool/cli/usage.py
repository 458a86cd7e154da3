"""What a command line may say: the parser, the kinds of argument, and the error that ends in exit code 2."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable
from typing import NoReturn

import torch

from ..workloads import TraceError, read_trace

__all__ = ["Parser", "UsageError", "integer", "make_folder", "open_device", "png_file", "trace_prompts"]

EXIT_USAGE = 2


class UsageError(Exception):
    """The command line asks for something that cannot be had; the text is one line for the user."""


class Parser(argparse.ArgumentParser):
    """An argument parser whose errors are one line."""

    def error(self, message: str) -> NoReturn:
        print(f"{self.prog}: {message}", file=sys.stderr)
        raise SystemExit(EXIT_USAGE)


def integer(least: int, most: int = 2**31 - 1) -> Callable[[str], int]:
    """An argument that is an integer from ``least`` to ``most``."""

    def parse(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            value = least - 1
        if not least <= value <= most:
            raise argparse.ArgumentTypeError(f"expected an integer from {least} to {most}, got {text!r}")
        return value

    return parse


def png_file(text: str) -> str:
    """An argument that names a PNG file in a folder that can be written."""
    folder = os.path.dirname(text) or "."
    if not text.lower().endswith(".png"):
        raise argparse.ArgumentTypeError(f"expected a file name ending in .png, got {text!r}")
    if not os.path.isdir(folder):
        raise argparse.ArgumentTypeError(f"expected a file in an existing folder, got {text!r}")
    if os.path.isdir(text) or not os.access(text if os.path.exists(text) else folder, os.W_OK):
        raise argparse.ArgumentTypeError(f"expected a file that can be written, got {text!r}")
    return text


def make_folder(path: str, option: str) -> None:
    """Make the folder where it is not there, inside one that is, and see that it can be written.

    Raises:
        UsageError: it cannot be had.
    """
    try:
        if not os.path.isdir(path):
            os.mkdir(path)
    except OSError as e:
        raise UsageError(f"{option}: expected a folder, or a name for one in a folder, got {path!r} ({e.strerror})") from e
    if not os.access(path, os.W_OK | os.X_OK):
        raise UsageError(f"{option}: expected a folder that can be written, got {path!r}")


def trace_prompts(path: str, column: str) -> list[int]:
    """Prompt lengths of the file that ``--trace`` names.

    Raises:
        UsageError: it cannot be read, or holds something else.
    """
    try:
        return read_trace(path, column)
    except TraceError as e:
        raise UsageError(f"--trace: {e}") from e


def open_device(name: str) -> torch.device:
    """The torch device of that name, with its index, after a first allocation on it.

    Raises:
        UsageError: torch knows no such device, or this machine has none.
    """
    wanted = f"--device: expected {_devices()}, got {name!r}"
    try:
        device = torch.device(name)
    except RuntimeError as e:
        raise UsageError(wanted) from e
    if device.type in ("meta", "fake"):
        raise UsageError(wanted)
    if device.type == "cpu":
        return torch.device("cpu")
    try:
        return torch.empty(1, device=device).device
    except (RuntimeError, AssertionError, ImportError) as e:
        # torch built without CUDA raises AssertionError, without another backend ImportError or NotImplementedError
        # (a RuntimeError), and an index past the last device RuntimeError.
        raise UsageError(wanted) from e


def _devices() -> str:
    count = torch.cuda.device_count()
    if count == 0:
        return "cpu (torch sees no CUDA device here)"
    return "cpu or " + ("cuda:0" if count == 1 else f"cuda:0 .. cuda:{count - 1}")

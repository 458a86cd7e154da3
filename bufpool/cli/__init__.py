"""The command line: ``bufpool run | bench | doctor | compile``.

Exit codes: 0 done, 1 the command ran and something failed, 2 the command line asks for something that cannot be had,
130 interrupted.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Sequence

import torch

from .. import __version__
from ..debug import Debug
from ..errors import BufpoolError, CompileError
from .usage import EXIT_USAGE, Parser, UsageError

__all__ = ["main"]

EXIT_FAILED = 1
EXIT_INTERRUPTED = 130

LOG_LINES = 20
"""Lines of a compile error, with the compiler's log, that are shown."""

# command: (module, function that runs it, what it does). Only the module of the command asked for is imported.
_COMMANDS = {
    "run": ("run", "run_job", "replay a request trace through the pool, check the results, show the figures"),
    "bench": ("bench", "run_bench", "measure the pool beside torch.empty and a grow-only cache, and the kernels on a GPU"),
    "doctor": ("doctor", "run_doctor", "say what bufpool can do on this machine"),
    "compile": ("compile", "run_compile", "compile the kernels ahead of their first use"),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code.

    Args:
        argv: the arguments after the program's name; by default those of this process.
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    try:
        _check_debug_mode()
        return _run(arguments)
    except UsageError as e:
        return _fail(arguments, _one_line(e), EXIT_USAGE)
    except CompileError as e:
        return _fail(arguments, _first_lines(str(e)), EXIT_FAILED)
    except BufpoolError as e:  # one line each
        return _fail(arguments, str(e), EXIT_FAILED)
    except (torch.OutOfMemoryError, MemoryError) as e:
        return _fail(arguments, _one_line(e) or "expected enough memory, got none", EXIT_FAILED)
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    except BrokenPipeError:
        # The reader of stdout is gone; keep the interpreter from flushing to it once more at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_FAILED
    except OSError as e:
        return _fail(arguments, _one_line(e), EXIT_FAILED)


def _check_debug_mode() -> None:
    try:
        Debug.from_environment()
    except ValueError as e:
        raise UsageError(str(e)) from e


def _run(arguments: list[str]) -> int:
    parser = Parser(
        prog="bufpool",
        description="Fresh outputs for inference kernels, on memory that never moves.",
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"bufpool {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND")
    asked = next((word for word in arguments if word in _COMMANDS), None)
    function = None
    for name, (module_name, function_name, purpose) in _COMMANDS.items():
        text = purpose[0].upper() + purpose[1:] + "."
        command = commands.add_parser(name, help=purpose, description=text, allow_abbrev=False)
        if name == asked:
            module = importlib.import_module(f".{module_name}", __name__)
            module.add_arguments(command)
            function = getattr(module, function_name)
    args = parser.parse_args(arguments)
    if function is None:
        parser.error(f"expected a command ({', '.join(_COMMANDS)}), got none")
    code = function(args)
    sys.stdout.flush()
    return int(code)


def _fail(arguments: list[str], message: str, code: int) -> int:
    asked = next((f" {word}" for word in arguments if word in _COMMANDS), "")
    print(f"bufpool{asked}: {message}", file=sys.stderr)
    return code


def _first_lines(text: str) -> str:
    """A compiler's log keeps its lines, since nobody would read it in one; but what is wrong stands in the first ones."""
    lines = text.rstrip().splitlines()
    more = len(lines) - LOG_LINES
    return "\n".join(lines if more <= 0 else [*lines[:LOG_LINES], f"... and {more} more line{'s' if more > 1 else ''}"])


def _one_line(e: BaseException) -> str:
    return " ".join(str(e).split())

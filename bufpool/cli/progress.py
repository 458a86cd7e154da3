"""How far a command is: a bar on a terminal, plain lines elsewhere, always on stderr."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

__all__ = ["progress"]

_PLAIN_STEPS = 10
_SECONDS_BETWEEN_DRAWINGS = 0.1


@contextmanager
def progress(what: str, total: int, unit: str = "calls") -> Iterator[Callable[[int], None]]:
    """Give a function to be called with the number of calls (or other ``unit``) done so far, 1 to ``total``.

    Nothing is drawn but inside that function: a thread that draws would take time from what is measured. The bar needs
    rich (the ``cli`` extra); without it, or where stderr is no terminal, ten lines tell the same.
    """
    if sys.stderr.isatty():
        try:
            import rich.console
            import rich.progress
        except ImportError:
            pass
        else:
            with rich.progress.Progress(
                rich.progress.TextColumn("{task.description}"),
                rich.progress.BarColumn(),
                rich.progress.MofNCompleteColumn(),
                rich.progress.TimeElapsedColumn(),
                console=rich.console.Console(stderr=True),
                auto_refresh=False,
            ) as bar:
                task = bar.add_task(what, total=total)
                drawn = 0.0

                def draw(done: int) -> None:
                    nonlocal drawn
                    now = time.monotonic()
                    is_due = done == total or now - drawn >= _SECONDS_BETWEEN_DRAWINGS
                    drawn = now if is_due else drawn
                    bar.update(task, completed=done, refresh=is_due)

                yield draw
            return
    start = time.monotonic()

    def print_line(done: int) -> None:
        if done * _PLAIN_STEPS // total > (done - 1) * _PLAIN_STEPS // total:
            print(f"{what}: {done} of {total} {unit}, {time.monotonic() - start:.1f} s", file=sys.stderr, flush=True)

    yield print_line

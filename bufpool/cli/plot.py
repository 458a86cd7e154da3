"""The figure of the main job: bytes over calls."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from .usage import UsageError

__all__ = ["plot_bytes", "require_matplotlib"]

_GIB = 2**30
_MIB = 2**20


def require_matplotlib() -> None:
    """Find out now whether a figure can be drawn, and not after the work is done.

    Raises:
        UsageError: matplotlib is not installed.
    """
    try:
        import matplotlib.figure  # noqa: F401
    except ImportError as e:
        raise UsageError(f"--plot: expected matplotlib (pip install 'bufpool[plot]'), got {e}") from e


def plot_bytes(path: str, curves: Mapping[str, Sequence[int]], title: str) -> None:
    """Write a PNG with one line for each curve: bytes after each call.

    Raises:
        UsageError: the file cannot be written.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    most = max(max(values) for values in curves.values())
    unit, unit_name = (_GIB, "GiB") if most >= _GIB else (_MIB, "MiB")
    figure = Figure(figsize=(9, 5), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    styles = ("-", "--", ":", "-.")
    for number, (name, values) in enumerate(curves.items()):
        calls = range(1, len(values) + 1)
        # The needed line lies on the mapped one where all is well: keep both visible.
        axes.plot(calls, [value / unit for value in values], styles[number % 4], label=name, lw=2.5 if number < 2 else 1)
    axes.set_xlabel("calls")
    axes.set_ylabel(unit_name)
    axes.set_ylim(bottom=0)
    axes.set_title(title)
    axes.legend()
    axes.grid(alpha=0.3)
    try:
        figure.savefig(path, format="png", dpi=120)
    except OSError as e:
        raise UsageError(f"--plot: expected a file that can be written, got {path!r} ({e.strerror or e})") from e

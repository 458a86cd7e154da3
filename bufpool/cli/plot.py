"""The figures: bytes over calls, time per acquire, rates of the kernels."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from .usage import UsageError

__all__ = ["plot_acquire", "plot_bytes", "plot_kernels", "plot_workload_bytes", "require_matplotlib"]

_GIB = 2**30
_MIB = 2**20
_LOGARITHMIC_FROM = 30  # times between the lowest and the highest bar


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
    figure = _figure(9, 5)
    axes = figure.add_subplot()
    _draw_bytes(axes, curves)
    axes.set_title(title)
    axes.legend()
    _save(figure, path)


def plot_workload_bytes(path: str, curves: Mapping[str, Mapping[str, Sequence[int]]], title: str) -> None:
    """Write a PNG with a panel for each workload: bytes after each call.

    Raises:
        UsageError: the file cannot be written.
    """
    across = 2 if len(curves) == 4 else min(len(curves), 3)
    down = -(-len(curves) // across)
    figure = _figure(4.5 * across, 3.5 * down + 1)
    panels = figure.subplots(down, across, squeeze=False).flatten()
    for axes, (name, lines) in zip(panels, curves.items(), strict=False):
        _draw_bytes(axes, lines)
        axes.set_title(name)
    for axes in panels[len(curves) :]:
        axes.set_visible(False)
    figure.suptitle(title)
    figure.legend(*panels[0].get_legend_handles_labels(), loc="outside lower center", ncols=2)
    _save(figure, path)


def plot_acquire(path: str, us: Mapping[str, Mapping[str, tuple[float, float, float]]], title: str) -> None:
    """Write a PNG with a group of bars for each workload: median microseconds, with the quartiles as whiskers.

    Args:
        path: of the PNG.
        us: workload, allocator, median and quartiles.
        title: of the figure.

    Raises:
        UsageError: the file cannot be written.
    """
    figure = _figure(9, 5)
    axes = figure.add_subplot()
    names = list(next(iter(us.values())))
    width = 0.8 / len(names)
    for number, name in enumerate(names):
        places = [group + (number - (len(names) - 1) / 2) * width for group in range(len(us))]
        medians = [each[name][0] for each in us.values()]
        whiskers = [
            [max(median - low, 0) for median, low, _ in (each[name] for each in us.values())],
            [max(high - median, 0) for median, _, high in (each[name] for each in us.values())],
        ]
        bars = axes.bar(places, medians, width, yerr=whiskers, label=name, capsize=2)
        axes.bar_label(bars, fmt="%.3g", fontsize=8)
    axes.set_xticks(range(len(us)), list(us))
    axes.set_ylabel("us per acquire")
    all_medians = [median for each in us.values() for median, _, _ in each.values()]
    if max(all_medians) > _LOGARITHMIC_FROM * min(all_medians):
        axes.set_yscale("log")
        axes.set_ylabel("us per acquire (logarithmic)")
    axes.set_title(title)
    axes.legend()
    axes.grid(axis="y", alpha=0.3)
    _save(figure, path)


def plot_kernels(path: str, tflops: Mapping[str, tuple[float, float | None]], title: str) -> None:
    """Write a PNG with a bar for each shape: TFLOP/s, with the matrix product beside it where there is one.

    Raises:
        UsageError: the file cannot be written.
    """
    figure = _figure(9, 1.5 + 0.6 * len(tflops))
    axes = figure.add_subplot()
    places = range(len(tflops))
    bars = axes.barh([place - 0.2 for place in places], [kernel for kernel, _ in tflops.values()], 0.4, label="kernel")
    axes.bar_label(bars, fmt="%.0f")
    if all(gemm is not None for _, gemm in tflops.values()):
        bars = axes.barh([place + 0.2 for place in places], [gemm for _, gemm in tflops.values()], 0.4, label="FP8 GEMM")
        axes.bar_label(bars, fmt="%.0f")
    axes.set_yticks(places, list(tflops))
    axes.invert_yaxis()
    axes.set_ylabel("d_qk, h_q, topk, s_kv")
    axes.set_xlabel("TFLOP/s")
    axes.set_title(title)
    axes.legend()
    _save(figure, path)


def _figure(width_inches: float, height_inches: float) -> Any:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width_inches, height_inches), layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def _draw_bytes(axes: Any, curves: Mapping[str, Sequence[int]]) -> None:
    most = max(max(values) for values in curves.values())
    unit, unit_name = (_GIB, "GiB") if most >= _GIB else (_MIB, "MiB")
    styles = ("-", "--", ":", "-.")
    for number, (name, values) in enumerate(curves.items()):
        calls = range(1, len(values) + 1)
        # The needed line lies on the mapped one where all is well: keep both visible.
        axes.plot(calls, [value / unit for value in values], styles[number % 4], label=name, lw=2.5 if number < 2 else 1)
    axes.set_xlabel("calls")
    axes.set_ylabel(unit_name)
    axes.set_ylim(bottom=0)
    axes.grid(alpha=0.3)


def _save(figure: Any, path: str) -> None:
    try:
        figure.savefig(path, format="png", dpi=120)
    except OSError as e:
        raise UsageError(f"--plot: expected a file that can be written, got {path!r} ({e.strerror or e})") from e

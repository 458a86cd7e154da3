"""A table of facts on stdout: drawn by rich on a terminal, aligned text elsewhere."""

from __future__ import annotations

import sys
from collections.abc import Sequence

__all__ = ["bytes_text", "print_table"]


def print_table(title: str, facts: Sequence[tuple[str, str]]) -> None:
    """Print a title and lines of name and value."""
    if sys.stdout.isatty():
        try:
            import rich.box
            import rich.console
            import rich.markup
            import rich.table
        except ImportError:
            pass
        else:
            table = rich.table.Table(title=title, show_header=False, box=rich.box.ROUNDED, title_justify="left")
            for name, value in facts:
                table.add_row(rich.markup.escape(name), rich.markup.escape(value))
            rich.console.Console().print(table)
            return
    width = max(len(name) for name, _ in facts)
    print(title)
    for name, value in facts:
        print(f"  {name:<{width}}  {value}")


def bytes_text(count: int) -> str:
    """A number of bytes as a reader takes it in: three digits and a binary unit."""
    value = float(count)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if value < 1024:
            return f"{value:.0f} {unit}" if unit == "B" else f"{value:.2f} {unit}"
        value /= 1024
    return f"{value:.2f} TiB"

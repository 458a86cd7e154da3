"""A table of facts on stdout: drawn by rich on a terminal, aligned text elsewhere."""

from __future__ import annotations

import sys
from collections.abc import Sequence

__all__ = ["Section", "bytes_text", "print_sections", "print_table"]

Section = tuple[Sequence[str], Sequence[Sequence[str]]]
"""Heads of the columns, and rows of as many cells."""


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


def print_sections(title: str, sections: Sequence[Section], notes: Sequence[str] = ()) -> None:
    """Print one table of several sections, each with its own heads, and notes below.

    The first column is text, the others are numbers.
    """
    columns = max(len(heads) for heads, _ in sections)
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
            for column in range(columns):
                table.add_column(justify="right" if column else "left")
            for heads, rows in sections:
                table.add_row(*(rich.markup.escape(head) for head in heads), style="bold")
                for row in rows:
                    table.add_row(*(rich.markup.escape(cell) for cell in row))
                table.add_section()
            console = rich.console.Console()
            console.print(table)
            for note in notes:
                console.print(rich.markup.escape(note), highlight=False)
            return
    lines = [line for heads, rows in sections for line in (heads, *rows)]
    widths = [max(len(line[n]) for line in lines if len(line) > n) for n in range(columns)]
    print(title)
    for line in lines:
        cells = [f"{cell:>{widths[n]}}" if n else f"{cell:<{widths[n]}}" for n, cell in enumerate(line)]
        print(("  " + "  ".join(cells)).rstrip())
    for note in notes:
        print(f"  {note}")


def bytes_text(count: int) -> str:
    """A number of bytes as a reader takes it in: three digits and a binary unit."""
    value = float(count)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if value < 1024:
            return f"{value:.0f} {unit}" if unit == "B" else f"{value:.2f} {unit}"
        value /= 1024
    return f"{value:.2f} TiB"

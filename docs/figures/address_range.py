"""Draws address-range.svg: one arena through its life, each line one moment. Standard library only.

    python docs/figures/address_range.py    # writes address-range.svg beside this file

What is drawn is computed: rows to granules as an arena does it, for ``out`` of 128 heads (128 KiB a row) on granules of
2 MiB. The same text comes out on every machine, and a test compares it with the file.
"""

from __future__ import annotations

from html import escape
from pathlib import Path

ROW_BYTES = 128 * 512 * 2
GRANULE_BYTES = 2 * 2**20
SHOWN_GRANULES = 8  # of a reservation that is far longer

# (what happened, rows handed out, rows whose memory is mapped)
MOMENTS = (
    ("acquire(rows=10)", 10, 10),
    ("acquire(rows=40): grows in place", 40, 40),
    ("acquire(rows=20): nothing to map", 20, 40),
    ("sleep(): addresses stay", 0, 0),
    ("wake(): mapped again, same place", 0, 40),
    ("trim() while nobody holds a result", 0, 0),
)

CELL = 64  # width of a granule, in pixels
BAR = 26
STEP = 62
LEFT = 24
TOP = 76
WIDTH = LEFT + SHOWN_GRANULES * CELL + 120
HEIGHT = TOP + STEP * len(MOMENTS) + 48

INK = "#263238"
RESERVED = "#90a4ae"
MAPPED = "#b2dfdb"
IN_USE = "#00796b"


def granules(rows: int) -> int:
    """Granules that hold so many rows."""
    return -(-rows * ROW_BYTES // GRANULE_BYTES)


def text(x: float, y: float, words: str, *, size: int = 13, anchor: str = "start", colour: str = INK) -> str:
    return f'<text x="{x:g}" y="{y:g}" font-size="{size}" text-anchor="{anchor}" fill="{colour}">{escape(words)}</text>'


def box(x: float, y: float, width: float, height: float, fill: str, more: str = "") -> str:
    return f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" fill="{fill}"{more}/>'


def moment(y: float, what: str, rows: int, mapped_rows: int) -> list[str]:
    """One line: the reservation, its mapped prefix cell by cell, the rows in use, and their sizes in words."""
    mapped = granules(mapped_rows)
    parts = [text(LEFT + 8, y - 7, what)]
    end = LEFT + SHOWN_GRANULES * CELL
    parts += [box(LEFT + cell * CELL, y, CELL, BAR, MAPPED) for cell in range(mapped)]
    if rows:
        parts.append(box(LEFT, y, CELL * rows * ROW_BYTES / GRANULE_BYTES, BAR, IN_USE))
    edges = [LEFT + cell * CELL for cell in range(1, mapped + 1)]
    parts += [f'<path d="M{x:g} {y:g}v{BAR}" stroke="{INK}" stroke-width="0.6"/>' for x in edges]
    parts.append(
        f'<path d="M{end + 40} {y:g}H{LEFT}v{BAR}H{end + 40}" fill="none" stroke="{RESERVED}" stroke-dasharray="5 4"/>'
    )
    capacity = mapped * GRANULE_BYTES // ROW_BYTES
    sizes = f"mapped {mapped * GRANULE_BYTES >> 20} MiB, capacity {capacity} rows"
    parts.append(text(end + 112, y - 7, sizes, anchor="end"))
    parts.append(text(end + 48, y + 18, "reserved"))
    return parts


def render() -> str:
    """The whole figure as SVG text."""
    label = "One arena: a reserved address range of which a growing prefix is mapped; the base never moves"
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" height="{HEIGHT}" '
        f'font-family="system-ui, sans-serif" role="img" aria-label="{escape(label)}">',
        box(0, 0, WIDTH, HEIGHT, "#ffffff"),
        text(LEFT, 24, "One arena of out [rows, 128, 512] bf16, 128 KiB a row, on granules of 2 MiB", size=15),
    ]
    for number, (what, rows, mapped_rows) in enumerate(MOMENTS):
        parts += moment(TOP + STEP * number, what, rows, mapped_rows)
    bottom = TOP + STEP * (len(MOMENTS) - 1) + BAR
    parts.append(f'<path d="M{LEFT} {TOP - 28}V{bottom + 14}" stroke="{INK}" stroke-width="2"/>')
    parts.append(text(LEFT, TOP - 34, "base: never moves", colour=IN_USE))
    legend = (("in use", IN_USE), ("mapped", MAPPED))
    x: float = LEFT
    for words, colour in legend:
        parts += [box(x, HEIGHT - 28, 16, 14, colour), text(x + 22, HEIGHT - 16, words)]
        x += 110
    parts.append(
        f'<rect x="{x:g}" y="{HEIGHT - 28}" width="16" height="14" fill="none" stroke="{RESERVED}" stroke-dasharray="5 4"/>'
    )
    parts.append(text(x + 22, HEIGHT - 16, "reserved: address space only, no memory"))
    parts.append("</svg>")
    return "\n".join(parts) + "\n"


if __name__ == "__main__":
    Path(__file__).with_name("address-range.svg").write_text(render())

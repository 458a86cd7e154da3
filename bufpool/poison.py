"""Poison: what lies in memory that a kernel has yet to write, and how its places and bits are named.

``BUFPOOL_DEBUG`` and ``assert_write_only`` share the pattern, so that a finding of one reads as one of the other.
"""

from __future__ import annotations

import torch

__all__ = ["BOOL_POISON_BYTES", "GUARD_ROWS", "POISON_BYTES", "bits_text", "column_text", "poison_bytes"]

GUARD_ROWS = 128
"""Poisoned rows beside the active ones: more than a kernel's tile of rows reaches past the end."""

# Every byte of an element gets the same value, and neighbours different ones. As floats of 16 bits
# and more the values are NaN, a large number, a large negative one, and zero; as integers -1 and the like.
POISON_BYTES = (0xFF, 0x7A, 0xFA, 0x00)
BOOL_POISON_BYTES = (0x00, 0x01)  # No other byte is a bool.


def poison_bytes(dtype: torch.dtype) -> tuple[int, ...]:
    """The byte values that elements of ``dtype`` meet, in turn."""
    return BOOL_POISON_BYTES if dtype is torch.bool else POISON_BYTES


def column_text(flat: int, row_shape: tuple[int, ...]) -> str:
    """Place in a row: a number, or one for each dimension of the row shape."""
    if len(row_shape) < 2:
        return str(flat)
    places: list[int] = []
    for size in reversed(row_shape):
        flat, place = divmod(flat, size)
        places.insert(0, place)
    return str(tuple(places))


def bits_text(value: int, nbytes: int) -> str:
    """The bits of an integer of ``nbytes`` bytes, signed or not, in hexadecimal."""
    return f"{value & (1 << 8 * nbytes) - 1:#0{2 + 2 * nbytes}x}"

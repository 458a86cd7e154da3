"""What a kernel writes: named tensors, each a row shape and a dtype."""

from __future__ import annotations

import itertools
import keyword
import operator
from collections import namedtuple
from collections.abc import Iterator, Mapping
from typing import Any

import torch

__all__ = ["Outputs", "OutputSpec", "row_count"]

Outputs = tuple[torch.Tensor, ...]
"""A named tuple of tensors, one field for each entry of the spec, in the order of the spec."""

_MAX_ROW_ELEMENTS = 2**40
_QUANTIZED = (torch.qint8, torch.quint8, torch.qint32, torch.quint4x2, torch.quint2x4)

# Equal specs share one small integer: a lane is found by integers alone, without hashing names and shapes again.
_keys: dict[tuple[Any, ...], int] = {}
_next_key = itertools.count()


class OutputSpec:
    """The outputs of one kernel: ordered, named, each ``(row_shape, dtype)``.

    The tensor handed out for ``rows`` has shape ``[rows, *row_shape]``. A spec is frozen and hashable, and equal to
    another one with the same names in the same order, shapes and dtypes.

    Args:
        **tensors: ``name=(row_shape, dtype)``; ``row_shape`` a tuple of integers >= 1 (empty for one scalar a row),
            ``dtype`` a ``torch.dtype`` of whole bytes.

    Raises:
        TypeError: a row shape or dtype is of another kind.
        ValueError: no tensor is named, a name is not a public identifier, or a size is below 1.

    Example:
        >>> import torch
        >>> spec = OutputSpec(out=((128, 512), torch.bfloat16), lse=((128,), torch.float32))
        >>> spec.nbytes(10)
        1315840
    """

    __slots__ = (
        "_hash",
        "dtypes",
        "key",
        "names",
        "outputs_type",
        "row_bytes",
        "row_nbytes",
        "row_shapes",
    )

    names: tuple[str, ...]
    row_shapes: tuple[tuple[int, ...], ...]
    dtypes: tuple[torch.dtype, ...]
    row_bytes: tuple[int, ...]
    """Bytes of one row, for each tensor."""
    row_nbytes: int
    """Bytes of one row of all tensors together."""
    outputs_type: type[Any]
    key: int

    def __init__(self, /, *unnamed: Any, **tensors: tuple[tuple[int, ...], torch.dtype]) -> None:
        if unnamed:
            raise TypeError(
                f"OutputSpec: expected every tensor as name=(row_shape, dtype), got {unnamed[0]!r} without a name"
            )
        if not tensors:
            raise ValueError("OutputSpec: expected at least one name=(row_shape, dtype), got none")
        names: list[str] = []
        shapes: list[tuple[int, ...]] = []
        dtypes: list[torch.dtype] = []
        for name, entry in tensors.items():
            if name.startswith("_") or keyword.iskeyword(name) or not name.isidentifier():
                raise ValueError(
                    f"OutputSpec: expected names that are identifiers without a leading underscore, got {name!r}"
                )
            if name in ("count", "index"):
                raise ValueError(f"OutputSpec: expected a name that is not a method of tuple, got {name!r}")
            if not isinstance(entry, tuple) or len(entry) != 2:
                raise TypeError(f"{name}: expected (row_shape, dtype), got {entry!r}")
            shape, dtype = entry
            if not isinstance(dtype, torch.dtype):
                raise TypeError(f"{name}: expected a torch.dtype, got {dtype!r}")
            if dtype in _QUANTIZED:
                raise TypeError(f"{name}: expected a dtype that is not quantized, got {dtype}")
            if not isinstance(shape, (tuple, list)):
                raise TypeError(f"{name}: expected a row shape as a tuple of integers, got {shape!r}")
            sizes = tuple(_size(name, size) for size in shape)
            elements = 1
            for size in sizes:
                elements *= size
            if elements > _MAX_ROW_ELEMENTS:
                raise ValueError(f"{name}: expected at most {_MAX_ROW_ELEMENTS} elements a row, got {elements}")
            names.append(name)
            shapes.append(sizes)
            dtypes.append(dtype)
        set_field = object.__setattr__
        set_field(self, "names", tuple(names))
        set_field(self, "row_shapes", tuple(shapes))
        set_field(self, "dtypes", tuple(dtypes))
        set_field(self, "row_bytes", tuple(map(_row_bytes, shapes, dtypes)))
        set_field(self, "row_nbytes", sum(self.row_bytes))
        identity = (self.names, self.row_shapes, self.dtypes)
        set_field(self, "_hash", hash(identity))
        set_field(self, "key", _keys.setdefault(identity, next(_next_key)))
        set_field(self, "outputs_type", _outputs_type(self.names))

    def nbytes(self, rows: int) -> int:
        """Bytes that ``rows`` rows of all tensors take, without rounding to the granule."""
        return row_count(rows) * self.row_nbytes

    def shapes(self, rows: int) -> tuple[tuple[int, ...], ...]:
        """Shape ``[rows, *row_shape]`` of each tensor."""
        rows = row_count(rows)
        return tuple((rows, *shape) for shape in self.row_shapes)

    def __iter__(self) -> Iterator[tuple[str, tuple[int, ...], torch.dtype]]:
        return iter(zip(self.names, self.row_shapes, self.dtypes, strict=True))

    def __len__(self) -> int:
        return len(self.names)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, OutputSpec):
            return NotImplemented
        return self.key == other.key

    def __hash__(self) -> int:
        hash_value: int = self._hash  # type: ignore[attr-defined]
        return hash_value

    def __setattr__(self, name: str, value: object) -> None:
        raise AttributeError(f"OutputSpec: expected no change of a frozen spec, got {name} = {value!r}")

    def __delattr__(self, name: str) -> None:
        raise AttributeError(f"OutputSpec: expected no change of a frozen spec, got del {name}")

    def __repr__(self) -> str:
        tensors = ", ".join(f"{name}=({shape}, {dtype})" for name, shape, dtype in self)
        return f"OutputSpec({tensors})"

    def __reduce__(self) -> tuple[object, ...]:
        # The key belongs to this process: another one makes its own.
        return _restore, ({name: (shape, dtype) for name, shape, dtype in self},)


def _restore(tensors: Mapping[str, tuple[tuple[int, ...], torch.dtype]]) -> OutputSpec:
    return OutputSpec(**tensors)


_outputs_types: dict[tuple[str, ...], type[Any]] = {}


def _outputs_type(names: tuple[str, ...]) -> type[Any]:
    made = _outputs_types.get(names)
    if made is None:
        made = _outputs_types.setdefault(names, _picklable(namedtuple("Outputs", names, module=__name__), names))  # noqa: PYI024
    return made


def _picklable(outputs_type: Any, names: tuple[str, ...]) -> type[Any]:
    """The named tuple, which another process makes anew from its names: a type by this module's name is none."""
    outputs_type.__reduce__ = lambda self: (_restore_outputs, (names, tuple(self)))
    return outputs_type  # type: ignore[no-any-return]


def _restore_outputs(names: tuple[str, ...], tensors: tuple[Any, ...]) -> Any:
    return _outputs_type(names)._make(tensors)


def _row_bytes(shape: tuple[int, ...], dtype: torch.dtype) -> int:
    elements = 1
    for size in shape:
        elements *= size
    return elements * dtype.itemsize


def _size(name: str, size: Any) -> int:
    if isinstance(size, bool):
        raise TypeError(f"{name}: expected integer sizes in the row shape, got {size!r}")
    try:
        value = operator.index(size)
    except TypeError:
        raise TypeError(f"{name}: expected integer sizes in the row shape, got {size!r}") from None
    if value < 1:
        raise ValueError(f"{name}: expected sizes >= 1 in the row shape, got {value}")
    return value


def row_count(rows: Any) -> int:
    """``rows`` as a plain integer >= 0; numpy integers are taken; bool, float and tensors are not.

    Raises:
        TypeError: not an integer.
        ValueError: below 0.
    """
    if type(rows) is not int:
        if isinstance(rows, (bool, torch.Tensor)):
            raise TypeError(f"rows: expected an integer >= 0, got {rows!r}")
        try:
            rows = operator.index(rows)
        except TypeError:
            raise TypeError(f"rows: expected an integer >= 0, got {rows!r}") from None
    if rows < 0:
        raise ValueError(f"rows: expected an integer >= 0, got {rows}")
    return int(rows)

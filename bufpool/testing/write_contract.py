"""Does a function write all of its outputs, nothing else, and whatever lay there before?"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch
import torch.utils.dlpack

from ..allocator import Like, home_device
from ..errors import WriteContractError
from ..poison import GUARD_ROWS, bits_text, column_text, poison_bytes
from ..pool import OutputPool
from ..spec import OutputSpec, row_count

__all__ = ["GUARD_ROWS", "assert_write_only"]

_ALIGNMENT_BYTES = 256  # Of the first active row, as for a pool's result.


def assert_write_only(fn: Callable[[Any], object], spec: OutputSpec, rows: int, like: Like) -> None:
    """Check that ``fn`` overwrites its outputs: every element, nothing else, the same bits whatever was there.

    ``fn`` runs twice on the same memory, with another poison each time: NaN, large numbers of both signs and zero for
    floats, spread so that every element differs between the runs. A correct value that happens to equal the poison of
    one run differs from the other's. Everything is compared as bits, so NaN results are fine. A function whose result
    changes from run to run by itself fails as well.

    On CUDA the memory ends where no memory is mapped, as that of a pool does: a write behind the last guard row of a
    tensor is an illegal access. It is reported as well, but the process has lost its CUDA context then.

    What is not seen: on the host, writes further out than ``GUARD_ROWS`` rows; on CUDA such writes before the first row;
    and reads of old content that leave no trace.

    Args:
        fn: called as ``fn(outputs)`` with the named tuple of ``spec``: contiguous leaf tensors ``[rows, *row_shape]``
            on memory of exactly that size, the first row at a multiple of 256 bytes. What it returns is ignored.
        spec: what ``fn`` writes.
        rows: active rows; 0 only checks that ``fn`` takes empty outputs.
        like: tensor or tensors whose device the outputs share.

    Raises:
        WriteContractError: an active element was not written, depends on former content, or something outside the
            active rows changed. The text names the first such tensor, row and column, and the bits before and after. Or
            CUDA refused an access; then it cannot be said which one.
        TypeError, ValueError: an argument is of the wrong kind.
        DeviceMismatchError: the tensors of ``like`` are on different devices.
        PoolLimitError: no CUDA memory for the rows and the guard rows.
    """
    if not callable(fn):
        raise TypeError(f"fn: expected a function of the outputs, got {fn!r}")
    if not isinstance(spec, OutputSpec):
        raise TypeError(f"spec: expected an OutputSpec, got {spec!r}")
    rows = row_count(rows)
    device = home_device(like)
    with torch.inference_mode(False):
        pool = OutputPool() if device.type == "cuda" else None
        _check(fn, spec, [_Field(name, shape, dtype, rows, device, pool) for name, shape, dtype in spec])
        if pool is not None:  # of what raised, tensors are alive, and maybe no context is left to close it in
            pool.close()


def _check(fn: Callable[[Any], object], spec: OutputSpec, fields: list[_Field]) -> None:
    for run in range(2):
        for field in fields:
            field.poison(run)
        _call(fn, spec.outputs_type(*[field.hand_out() for field in fields]), fields[0].device)
        for field in fields:
            field.keep(run)
    for field in fields:
        field.check()


def _call(fn: Callable[[Any], object], outputs: Any, device: torch.device) -> None:
    """Call ``fn`` and wait for its work, on whatever stream."""
    if device.type != "cuda":
        fn(outputs)
        return
    torch.cuda.synchronize(device)  # what was wrong before is not fn's fault
    try:
        fn(outputs)
        torch.cuda.synchronize(device)
    except RuntimeError as e:
        if "illegal memory access" not in str(e):
            raise
        raise WriteContractError(
            f"{', '.join(outputs._fields)}: expected no access outside the active rows and {GUARD_ROWS} guard rows on both"
            " sides, got an illegal memory access: behind these rows nothing is mapped (or an input was misread); the"
            " CUDA context of this process is lost"
        ) from e


def _memory(name: str, nbytes: int, like: torch.Tensor, pool: OutputPool | None) -> torch.Tensor:
    """At least ``nbytes`` bytes. Of a pool with arenas of kind ``cuda``, nothing is mapped behind the last one."""
    if pool is None:
        return torch.empty(nbytes, dtype=torch.uint8, device=like.device)
    spec = OutputSpec(**{name: ((), torch.uint8)})
    before = pool.stats().mapped_bytes
    pool.acquire(spec, nbytes, like)
    # The slot again, now with all of what was mapped for it.
    memory: torch.Tensor = pool.acquire(spec, pool.stats().mapped_bytes - before, like)[0]
    return memory


class _Field:
    """One output in its guarded memory: ``GUARD_ROWS`` rows, the active rows, ``GUARD_ROWS`` rows."""

    def __init__(
        self,
        name: str,
        row_shape: tuple[int, ...],
        dtype: torch.dtype,
        rows: int,
        device: torch.device,
        pool: OutputPool | None,
    ) -> None:
        self.name = name
        self.row_shape = row_shape
        self.dtype = dtype
        self.rows = rows
        self.device = device
        self.columns = 1
        for size in row_shape:
            self.columns *= size
        self.kept: list[torch.Tensor] = []
        row_bytes = self.columns * dtype.itemsize
        nbytes = (rows + 2 * GUARD_ROWS) * row_bytes
        memory = _memory(name, nbytes + _ALIGNMENT_BYTES, torch.empty(0, device=device), pool)
        start = memory.numel() - nbytes  # at the end, behind which nothing may be mapped
        start -= (memory.data_ptr() + start + GUARD_ROWS * row_bytes) % _ALIGNMENT_BYTES
        guarded = memory[start : start + nbytes]
        self.bits = guarded.view(rows + 2 * GUARD_ROWS, self.columns, dtype.itemsize)
        self.active = guarded[GUARD_ROWS * row_bytes : (GUARD_ROWS + rows) * row_bytes]

    def poison(self, run: int) -> None:
        self.bits.copy_(self._poison(run))

    def hand_out(self) -> torch.Tensor:
        """The active rows as an allocator would give them: a leaf on a storage of exactly its size."""
        if self.rows == 0:
            return torch.empty((0, *self.row_shape), dtype=self.dtype, device=self.device)
        # Through DLPack the slice becomes a storage of its own, which ends where the rows end.
        storage = torch.utils.dlpack.from_dlpack(self.active).untyped_storage()
        strides = [1]
        for size in reversed(self.row_shape):
            strides.insert(0, strides[0] * size)
        tensor = torch.empty((0,), dtype=self.dtype, device=self.device)
        return tensor.set_(storage, 0, (self.rows, *self.row_shape), strides)

    def keep(self, run: int) -> None:
        self.kept.append(self.bits.clone() if run == 0 else self.bits)

    def check(self) -> None:
        first, second = self.kept
        unchanged_first = (first == self._poison(0)).all(-1)
        unchanged_second = (second == self._poison(1)).all(-1)
        unchanged = unchanged_first & unchanged_second
        wrong = ~unchanged
        active = slice(GUARD_ROWS, GUARD_ROWS + self.rows)
        # The poisons differ everywhere, so an element that was not written differs as well.
        wrong[active] = (first[active] != second[active]).any(-1)
        if not bool(wrong.any()):
            return
        row, column = divmod(int(wrong.flatten().to(torch.uint8).argmax()), self.columns)
        place = f"row {row - GUARD_ROWS}, column {column_text(column, self.row_shape)}"
        old = [self._text(self._poison(run)[row, column]) for run in range(2)]
        new = [self._text(bits[row, column]) for bits in self.kept]
        if not active.start <= row < active.stop:
            run = 0 if not bool(unchanged_first[row, column]) else 1
            raise WriteContractError(
                f"{self.name}: expected no write outside rows 0 to {self.rows}, got one at {place}: "
                f"old bits {old[run]}, new bits {new[run]}"
            )
        if bool(unchanged[row, column]):
            raise WriteContractError(
                f"{self.name}: expected every element to be written, got {place} as it was"
                " (not written, or computed from what lay there): "
                f"old bits {old[0]}, new bits {new[0]}; in the second run old bits {old[1]}, new bits {new[1]}"
            )
        raise WriteContractError(
            f"{self.name}: expected a result that does not depend on former content, got two results at {place}: "
            f"old bits {old[0]}, new bits {new[0]}; in the second run old bits {old[1]}, new bits {new[1]}"
        )

    def _poison(self, run: int) -> torch.Tensor:
        """``[guarded rows, columns, 1]`` uint8: the byte that every byte of an element is set to.

        In row r and column c it is value number r + c in the first run and the next one in the second: every element
        meets two values, and every row meets each pair of them.
        """
        values = poison_bytes(self.dtype)
        count = len(values)
        table = torch.tensor(values, dtype=torch.uint8, device=self.device)
        column = torch.arange(self.columns, device=self.device) % count
        first_rows = torch.stack([table[(row + column) % count] for row in range(count)])
        row = torch.arange(self.bits.shape[0], device=self.device)
        return first_rows.index_select(0, (row + run) % count)[:, :, None]

    def _text(self, element: torch.Tensor) -> str:
        itemsize = self.dtype.itemsize
        return bits_text(int.from_bytes(bytes(element.expand(itemsize).tolist()), sys.byteorder), itemsize)

"""What ``BUFPOOL_DEBUG`` asks of a pool: poison in what it hands out, and guard rows behind it.

``poison``: every acquire overwrites the active rows with a pattern that no kernel takes for a result, so whoever reads a
row before writing it computes visible nonsense. In a capture the fills are part of the graph: every replay starts poisoned.

``guard``: that, and ``GUARD_ROWS`` rows behind the active ones get the same kind of pattern. When the slot is found idle
by its next acquire, they are compared; a changed one raises ``WriteContractError``. The acquire that raises is not the
culprit: the text says whose result was overrun, and where that was acquired. The finding is reported once.

Both are slow: up to some twenty launches a tensor for each acquire, no hit path, and for ``guard`` a wait for the device. A
guarded pool maps ``GUARD_ROWS`` rows more in each slot. Not seen: what a slot's last result overran, if nothing is acquired
from that slot afterwards or its memory was given back in between; what is overrun in a capture, or while something
captures, when nothing may wait for the device; spilled results have poison and no guard.

Concurrency: called under the pool's lock.
"""

from __future__ import annotations

import os
import sys

import torch

from .errors import WriteContractError
from .handout import OwnerHandout
from .poison import GUARD_ROWS, bits_text, column_text, poison_bytes
from .slot import Slot
from .spec import Outputs, OutputSpec
from .torch_state import without_modes

__all__ = ["GUARD_ROWS", "Debug"]

_MODES = ("poison", "guard")
_SEED_WORDS = 1024  # A multiple of the patterns' lengths.
_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class Debug:
    """Fills what a pool hands out, and checks what it gets back.

    Args:
        guard: whether there are guard rows.
    """

    def __init__(self, guard: bool) -> None:
        self.guard_rows = GUARD_ROWS if guard else 0
        """Rows behind the active ones that a slot needs room for."""
        self._phase = 0
        self._specs: dict[OutputSpec, OutputSpec] = {}

    @classmethod
    def from_environment(cls) -> Debug | None:
        """What the variable ``BUFPOOL_DEBUG`` asks for; None if it is unset or empty.

        Raises:
            ValueError: it is something else.
        """
        mode = os.environ.get("BUFPOOL_DEBUG", "")
        if not mode:
            return None
        if mode not in _MODES:
            raise ValueError(f"BUFPOOL_DEBUG: expected {' or '.join(_MODES)}, got {mode!r}")
        return cls(guard=mode == "guard")

    def fill(self, slot: Slot, *, is_capture: bool) -> None:
        """Poison the rows just handed out, and put guard rows behind them."""
        self._phase += 1
        rows, guard_rows = slot.rows, 0 if is_capture else self.guard_rows
        with without_modes():
            for (_, _, dtype), memory in zip(slot.spec, self._words(slot, rows + guard_rows), strict=True):
                _poison(memory[:rows], dtype, self._phase)
                _poison(memory[rows:], dtype, self._phase)
        # A replay of a graph may write any number of rows, so what a capture leaves is not compared.
        slot.guard = (rows, self._phase) if guard_rows else None

    def fill_spilled(self, outputs: Outputs) -> None:
        """Poison tensors that do not come from a slot."""
        self._phase += 1
        with without_modes():
            for tensor in outputs:
                word = _WORDS[min(tensor.dtype.itemsize, 8)]
                # Through .data the version counter of the result stays as new.
                _poison(tensor.data.view(-1).view(word), tensor.dtype, self._phase)

    def check(self, slot: Slot) -> None:
        """Compare the guard rows of an idle slot with what ``fill`` left there. Waits for the current stream.

        Raises:
            WriteContractError: one changed.
        """
        if slot.guard is None:
            return
        (rows, phase), slot.guard = slot.guard, None
        text = self._overrun(slot, rows, phase)
        if text is not None:
            raise WriteContractError(text)

    def _overrun(self, slot: Slot, rows: int, phase: int) -> str | None:
        """What was written behind ``rows`` rows; None if nothing was.

        Its tensors are unknown to the slot, so none may outlive it, as in the traceback of an error.
        """
        with without_modes():
            memories = self._words(slot, rows + self.guard_rows)
            for (name, row_shape, dtype), memory in zip(slot.spec, memories, strict=True):
                guard = memory[rows:]
                expected = _pattern(guard, dtype, phase)
                wrong = guard.flatten() != expected
                if not bool(wrong.any()):
                    continue
                place = int(wrong.to(torch.uint8).argmax())
                row, word = divmod(place, guard.shape[1])
                old, new = int(expected[place]), int(guard[row, word])
                size = guard.dtype.itemsize
                column = word // (dtype.itemsize // size)
                return (
                    f"{name}: expected no write outside rows 0 to {rows}, got one at row {rows + row}, column"
                    f" {column_text(column, row_shape)}: old bits {bits_text(old, size)}, new bits {bits_text(new, size)};"
                    f" a result of {rows} rows on {slot.device}, acquired at {slot.site or 'an unknown place'}, was overrun"
                )
        return None

    def _words(self, slot: Slot, rows: int) -> Outputs:
        """The slot's memory as integers, ``[rows, words of a row]`` for each tensor."""
        spec = self._specs.get(slot.spec)
        if spec is None:
            words = {name: _WORDS[min(dtype.itemsize, 8)] for name, _, dtype in slot.spec}
            row_bytes = zip(words.items(), slot.spec.row_bytes, strict=True)
            spec = OutputSpec(**{name: ((nbytes // word.itemsize,), word) for (name, word), nbytes in row_bytes})
            self._specs[slot.spec] = spec
        # A hand-out of its own over the same addresses, of which the slot's knows nothing.
        handout = OwnerHandout(spec, slot.device, slot.addresses)
        handout.capacity = rows
        outputs: Outputs = handout.take(rows)
        return outputs


def _values(memory: torch.Tensor, dtype: torch.dtype) -> list[int]:
    """The pattern's bytes, each repeated over one word of ``memory``. An element meets another one at each acquire."""
    size, is_signed = memory.dtype.itemsize, memory.dtype.is_signed
    return [int.from_bytes(bytes([value] * size), sys.byteorder, signed=is_signed) for value in poison_bytes(dtype)]


def _poison(memory: torch.Tensor, dtype: torch.dtype, phase: int) -> None:
    """Write the pattern, without temporary memory: in a capture that would come from the graph's private pool."""
    values = _values(memory, dtype)
    words = memory.view(-1)
    done = min(words.numel(), _SEED_WORDS)
    for place in range(len(values)):
        words[place : done : len(values)].fill_(values[(place + phase) % len(values)])
    while done < words.numel():  # plain copies are many times quicker than steps of four
        count = min(done, words.numel() - done)
        words[done : done + count].copy_(words[:count])
        done += count


def _pattern(memory: torch.Tensor, dtype: torch.dtype, phase: int) -> torch.Tensor:
    """What ``_poison`` writes, as one flat tensor."""
    values = _values(memory, dtype)
    values = [values[(place + phase) % len(values)] for place in range(len(values))]
    cycle = torch.tensor(values, dtype=memory.dtype, device=memory.device)
    return cycle.repeat(-(-memory.numel() // len(values)))[: memory.numel()]

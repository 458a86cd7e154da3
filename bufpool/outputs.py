"""Outputs that a caller brings: are they what the kernel writes, and is their memory their own?"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

import torch

from .device import parse_device, present_device
from .errors import DeviceMismatchError, OutputMismatchError
from .torch_state import has_no_memory

__all__ = ["check_distinct", "check_output"]


def check_output(
    t: Any, name: str, *, shape: Sequence[int], dtype: torch.dtype, device: torch.device | str
) -> torch.Tensor:
    """Check that a kernel may overwrite ``t``, and return it.

    Host work only: no memory is read and no device is waited for.

    Args:
        t: the tensor that the caller brought.
        name: what the caller calls it; every error starts with it.
        shape: the exact shape, rows first. Rows may be 0.
        dtype: the exact dtype.
        device: where it must live; ``cuda`` without an index means the current device.

    Returns:
        ``t`` itself.

    Raises:
        TypeError, ValueError: ``t`` is not a tensor, or ``shape`` or ``device`` is none.
        DeviceMismatchError: ``t`` lives on another device.
        OutputMismatchError: another dtype or shape, not contiguous, or it requires grad.
    """
    if not isinstance(t, torch.Tensor):
        raise TypeError(f"{name}: expected a tensor, got {type(t).__name__}")
    home = t.device
    if home != device:  # A device never equals a string, so that "cuda" and "cuda:0" are told apart below.
        wanted = _plain_device(device)
        if _plain_device(home) != wanted:
            raise DeviceMismatchError(f"{name} must be on device {wanted}, got {home}")
    if t.dtype is not dtype:
        raise OutputMismatchError(f"{name}: expected dtype {dtype}, got {t.dtype}")
    if t.layout is not torch.strided:
        raise OutputMismatchError(f"{name}: expected a dense tensor, got layout {t.layout}")
    if t.shape != shape:
        wanted_shape = _plain_shape(shape)
        if tuple(t.shape) != wanted_shape:
            raise OutputMismatchError(f"{name}: expected shape {list(wanted_shape)}, got {list(t.shape)}")
    if not t.is_contiguous():
        raise OutputMismatchError(
            f"{name}: expected a contiguous tensor of shape {list(t.shape)}, got strides {list(t.stride())}"
        )
    if t.requires_grad:
        kind = "a leaf that requires grad" if t.is_leaf else f"the result of {_maker(t)} that requires grad"
        raise OutputMismatchError(
            f"{name}: expected a tensor without grad, since a kernel overwrites it in place, got {kind}; "
            f"pass {name}.detach()"
        )
    return t


def check_distinct(outputs: Mapping[str, torch.Tensor], inputs: Mapping[str, torch.Tensor] | None = None) -> None:
    """Check that no output shares a byte range with another output or with an input.

    A tensor's range goes from its first to its last byte, as its strides reach, so a strided input counts with the
    gaps between its rows. Start addresses alone decide nothing: an output that begins in the last row of another one
    is found. Empty tensors own no bytes, and fake and meta tensors no memory.

    Args:
        outputs: the tensors to be written, by name.
        inputs: the tensors to be read, by name; they may share memory with one another.

    Raises:
        OutputMismatchError: two ranges overlap; the text names both tensors and the bytes shared.
    """
    if torch.compiler.is_compiling():  # Addresses are known only when the compiled code runs.
        return
    written: list[tuple[int, int, str, torch.Tensor]] = []
    lowest = highest = 0
    for name, tensor in outputs.items():
        start, end = _byte_range(tensor)
        if start != end:
            for other_start, other_end, other, other_tensor in written:
                if start < other_end and other_start < end and tensor.device == other_tensor.device:
                    _overlap(name, start, end, other, other_start, other_end)
            if not written or start < lowest:
                lowest = start
            if end > highest:
                highest = end
            written.append((start, end, name, tensor))
    if not written or not inputs:
        return
    for name, tensor in inputs.items():
        start, end = _byte_range(tensor)
        if start < highest and lowest < end and start != end:
            for other_start, other_end, other, other_tensor in written:
                if start < other_end and other_start < end and tensor.device == other_tensor.device:
                    _overlap(other, other_start, other_end, name, start, end)


def _plain_shape(shape: Any) -> tuple[Any, ...]:
    try:
        return tuple(shape)
    except TypeError:
        raise TypeError(f"shape: expected integers, got {shape!r}") from None


def _plain_device(device: torch.device | str) -> torch.device:
    device = parse_device("device", device)
    if device.type == "cuda" and device.index is None:
        return present_device("device", device)
    if device.type in ("cpu", "meta"):
        return torch.device(device.type)
    return device


def _maker(t: torch.Tensor) -> str:
    return t.grad_fn.name() if t.grad_fn is not None else "an operation"


def _byte_range(t: torch.Tensor) -> tuple[int, int]:
    """(first byte, byte after the last) of ``t``; equal where it owns no memory."""
    if type(t) is not torch.Tensor and has_no_memory(t):
        return 0, 0
    start = t.data_ptr()
    if start == 0:  # Empty, or meta.
        return 0, 0
    if t.is_contiguous():
        return start, start + t.nbytes
    if t.nbytes == 0:
        return start, start
    last = sum((size - 1) * stride for size, stride in zip(t.shape, t.stride(), strict=True))
    return start, start + (last + 1) * t.dtype.itemsize


def _overlap(name: str, start: int, end: int, other: str, other_start: int, other_end: int) -> NoReturn:
    shared = min(end, other_end) - max(start, other_start)
    raise OutputMismatchError(
        f"{name}: expected memory of its own, got {shared} bytes shared with {other} "
        f"({name} is at {start:#x} to {end:#x}, {other} at {other_start:#x} to {other_end:#x})"
    )

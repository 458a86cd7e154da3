"""Who gives a kernel wrapper its outputs: the protocol, and ``torch.empty`` behind it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

import torch

from .errors import DeviceMismatchError
from .spec import OutputSpec, row_count
from .torch_state import fake_mode_of, is_tracing

__all__ = ["FreshAllocator", "Like", "OutputAllocator", "home_device"]

Like = torch.Tensor | Sequence[torch.Tensor] | Mapping[str, torch.Tensor]
"""The inputs whose device the outputs share: one tensor, several, or several by name."""


@runtime_checkable
class OutputAllocator(Protocol):
    """Anything that hands out the outputs of one kernel call.

    ``acquire`` returns a named tuple of tensors ``[rows, *row_shape]``, contiguous, on the device of ``like``, with
    undefined contents. What it returns is not handed out again while anybody holds it.
    """

    def acquire(self, spec: OutputSpec, rows: int, like: Like) -> Any:
        """Return outputs ``[rows, *row_shape]`` for one kernel call, with undefined contents.

        Args:
            spec: what the kernel writes.
            rows: leading dimension, >= 0.
            like: an input tensor, or several (a sequence, or a mapping of names): the outputs live where they live.

        Returns:
            A named tuple of tensors in the order of the spec.
        """


class FreshAllocator:
    """``torch.empty`` behind the allocator protocol: every call allocates."""

    def acquire(self, spec: OutputSpec, rows: int, like: Like) -> Any:
        """Return new tensors ``[rows, *row_shape]`` on the device of ``like``, with undefined contents.

        Arguments and result: ``OutputAllocator.acquire``.

        Raises:
            DeviceMismatchError: the tensors of ``like`` are on different devices.
            TypeError, ValueError: ``rows`` is not an integer >= 0, or ``like`` holds no tensor.
        """
        if not isinstance(spec, OutputSpec):
            raise TypeError(f"spec: expected an OutputSpec, got {spec!r}")
        if not isinstance(rows, torch.SymInt):
            rows = row_count(rows)
        device = like.device if isinstance(like, torch.Tensor) else home_device(like)
        if type(like) is torch.Tensor or is_tracing():
            return _empty(spec, rows, device)
        with fake_mode_of(like):
            return _empty(spec, rows, device)


def _empty(spec: OutputSpec, rows: int, device: torch.device) -> Any:
    tensors = [
        torch.empty((rows, *shape), dtype=dtype, device=device)
        for shape, dtype in zip(spec.row_shapes, spec.dtypes, strict=True)
    ]
    return spec.outputs_type(*tensors)


def home_device(like: Like) -> torch.device:
    """The one device of all tensors of ``like``.

    Raises:
        TypeError: something in ``like`` is not a tensor.
        ValueError: ``like`` is empty.
        DeviceMismatchError: two of them differ; the text names both tensors and both devices.
    """
    if isinstance(like, torch.Tensor):
        return like.device
    if isinstance(like, Mapping):
        named = list(like.items())
    elif isinstance(like, Sequence) and not isinstance(like, (str, bytes)):
        named = [(f"like[{place}]", tensor) for place, tensor in enumerate(like)]
    else:
        raise TypeError(f"like: expected a tensor or several, got {like!r}")
    if not named:
        raise ValueError("like: expected at least one tensor, got none")
    for name, tensor in named:
        if not isinstance(tensor, torch.Tensor):
            raise TypeError(f"{name}: expected a tensor, got {tensor!r}")
    first_name, first = named[0]
    for name, tensor in named[1:]:
        if tensor.device != first.device:
            raise DeviceMismatchError(
                f"{name} must be on device {first.device}, got {tensor.device} ({first_name} is on {first.device})"
            )
    return first.device

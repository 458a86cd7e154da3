"""Devices as arguments: which one is meant, and is it here?"""

from __future__ import annotations

from typing import Any

import torch

__all__ = ["parse_device", "present_device"]


def parse_device(name: str, device: Any) -> torch.device:
    """An argument as a device.

    Raises:
        TypeError, ValueError: it names none.
    """
    if not isinstance(device, (str, torch.device)):
        raise TypeError(f"{name}: expected a device, got {device!r}")
    try:
        return torch.device(device)
    except RuntimeError as e:
        raise ValueError(f"{name}: expected a device, got {device!r}") from e


def present_device(name: str, device: Any) -> torch.device:
    """An argument as a device that is here, ``cuda`` with its index.

    Raises:
        TypeError, ValueError: it names none, or none that is here.
    """
    found = parse_device(name, device)
    if found.type == "cpu":
        return torch.device("cpu")  # as tensors say, also of "cpu:0"
    if found.type != "cuda":
        return found
    try:
        torch.cuda.init()  # type: ignore[no-untyped-call]
    except (AssertionError, RuntimeError) as e:
        raise ValueError(f"{name}: expected a device that is here, got {found} ({e})") from e
    if found.index is None:
        return torch.device("cuda", torch.cuda.current_device())
    if found.index >= torch.cuda.device_count():
        raise ValueError(f"{name}: expected one of {torch.cuda.device_count()} CUDA devices, got {found}")
    return found

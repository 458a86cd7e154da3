"""What torch is doing right now: current stream, capture, modes, tracing. Every private torch call stands here.

Each is looked up once, at import, by name only; where a torch version lacks one, a public call of the same meaning takes
its place, at a higher cost. Looking a name up starts nothing: no CUDA context is made.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

__all__ = [
    "PER_THREAD_STREAM",
    "current_device",
    "dispatch_depth",
    "fake_mode_of",
    "from_dlpack",
    "has_context",
    "has_no_memory",
    "is_capturing_on",
    "is_current_stream_capturing",
    "is_inference",
    "is_jit_tracing",
    "is_pre_dispatch_tracing",
    "is_recording",
    "is_tracing",
    "normal_mode",
    "raw_stream",
    "storage_of_weak",
    "to_dlpack",
    "tracing_mode",
    "transform_level",
    "without_modes",
]


PER_THREAD_STREAM = 2
"""Raw handle of the default stream that each thread has for itself."""


def _public_raw_stream(index: int) -> int:
    return int(torch.cuda.current_stream(index).cuda_stream)


def _public_capturing() -> bool:
    return bool(torch.cuda.is_current_stream_capturing())


def _public_dispatch_depth() -> int:
    return 1  # unknown: look closer each time


raw_stream: Callable[[int], int] = getattr(torch._C, "_cuda_getCurrentRawStream", _public_raw_stream)
"""Raw handle of the current stream of a CUDA device; 0 is the legacy default stream, 2 the per-thread one."""

current_device: Callable[[], int] = getattr(torch._C, "_cuda_getDevice", torch.cuda.current_device)
"""Index of the current CUDA device."""

is_current_stream_capturing: Callable[[], bool] = getattr(torch._C, "_cuda_isCurrentStreamCapturing", _public_capturing)
"""Whether the current stream of the current device captures."""


def is_capturing_on(device: torch.device) -> bool:
    """Whether the current stream of a CUDA device (with its index) captures, whatever device is current."""
    if raw_stream(device.index) == 0:
        return False  # the legacy default stream cannot
    if current_device() == device.index:
        return is_current_stream_capturing()
    with torch.cuda.device(device):
        return is_current_stream_capturing()


dispatch_depth: Callable[[], int] = getattr(torch._C, "_len_torch_dispatch_stack", _public_dispatch_depth)
"""How many torch dispatch modes are active."""

has_context: Callable[[int], bool] = getattr(torch._C, "_cuda_hasPrimaryContext", lambda index: True)
"""Whether this process has started a CUDA device; where torch does not say, as if it had."""

from_dlpack: Callable[[Any], torch.Tensor] = getattr(torch._C, "_from_dlpack", torch.utils.dlpack.from_dlpack)
"""Tensor over the memory of a DLPack capsule, which it uses up."""

to_dlpack: Callable[[torch.Tensor], Any] = torch._C._to_dlpack
"""Unversioned DLPack capsule of a tensor; the public name of this very function is torch.utils.dlpack.to_dlpack."""

storage_of_weak: Callable[[int], torch.UntypedStorage | None] = torch.UntypedStorage._new_with_weak_ptr
"""The storage that ``cdata`` of a ``StorageWeakRef`` points to; None if it has ended."""


def _no_level() -> None:
    return None


def _never(*_: Any) -> bool:
    return False


transform_level: Callable[[], int | None] = getattr(torch._C._functorch, "maybe_current_level", _no_level)
"""Depth of the torch.func transforms (grad, vmap, functionalize, ...) that run this very code; None outside of all."""

is_jit_tracing: Callable[[], bool] = getattr(torch._C, "_is_tracing", _never)
"""Whether torch.jit.trace records operations."""

_is_key_included: Callable[[Any], bool] = getattr(torch._C, "_dispatch_tls_is_dispatch_key_included", _never)

_PRE_DISPATCH = getattr(torch._C.DispatchKey, "PreDispatch", None)
is_pre_dispatch_tracing: Callable[[], bool] = (
    functools.partial(_is_key_included, _PRE_DISPATCH) if _PRE_DISPATCH is not None else _never
)
"""Whether make_fx(pre_dispatch=True) records; its mode has a stack of its own, which ``dispatch_depth`` leaves out."""

normal_mode: Callable[[bool], Any] = getattr(torch._C, "_InferenceMode", torch.inference_mode)
"""``with normal_mode(False):`` tensors made inside are no inference tensors."""

_no_dispatch: Callable[[], Any] = getattr(torch._C, "_DisableTorchDispatch", contextlib.nullcontext)
_no_function: Callable[[], Any] = getattr(torch._C, "DisableTorchFunction", contextlib.nullcontext)


@contextlib.contextmanager
def without_modes() -> Iterator[None]:
    """Operations inside are seen by no dispatch mode and no torch-function mode: no user code runs."""
    with _no_function(), _no_dispatch():
        yield


is_inference: Callable[[], bool] = torch.is_inference_mode_enabled

is_tracing: Callable[[], bool] = torch.compiler.is_dynamo_compiling
"""Whether torch.compile is reading this very code; it takes the value as a constant."""


def _is_fake(tensor: torch.Tensor) -> bool:
    if type(tensor) in (torch.Tensor, torch.nn.Parameter):
        return False
    from torch._subclasses.fake_tensor import FakeTensor
    from torch._subclasses.functional_tensor import FunctionalTensor

    return isinstance(tensor, (FakeTensor, FunctionalTensor))


def has_no_memory(like: Any) -> bool:
    """Whether a tensor of ``like`` (one, a sequence or a mapping) is fake, functional or on the meta device."""
    if isinstance(like, torch.Tensor):
        return like.device.type == "meta" or _is_fake(like)
    return any(map(has_no_memory, like.values() if isinstance(like, Mapping) else like))


def fake_mode_of(like: Any) -> Any:
    """Context in which a fake tensor of ``like`` was made: new tensors are fake too. Empty context if none is fake."""
    if type(like) is torch.Tensor:
        return contextlib.nullcontext()
    for tensor in [like] if isinstance(like, torch.Tensor) else like.values() if isinstance(like, Mapping) else like:
        if _is_fake(tensor) and hasattr(tensor, "fake_mode"):
            return tensor.fake_mode
    return contextlib.nullcontext()


def tracing_mode() -> bool:
    """Whether operations are recorded, transformed or replaced by fakes, so that memory of the pool would be a constant."""
    if transform_level() is not None or is_jit_tracing() or is_pre_dispatch_tracing():
        return True
    if dispatch_depth() == 0:
        return False
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch._subclasses.functional_tensor import FunctionalTensorMode
    from torch.fx.experimental.proxy_tensor import ProxyTorchDispatchMode
    from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

    kinds = (FakeTensorMode, FunctionalTensorMode, ProxyTorchDispatchMode)
    return any(isinstance(mode, kinds) for mode in _get_current_dispatch_mode_stack())


def _no_pre_dispatch_modes() -> int:
    return 0


_pre_dispatch_depth: Callable[[], int] = getattr(
    torch._ops, "_len_torch_dispatch_stack_pre_dispatch", _no_pre_dispatch_modes
)


def is_recording() -> bool:
    """Whether an active dispatch mode records operations for a compiler or an exporter; fakes alone record nothing."""
    if is_pre_dispatch_tracing():  # its recorder has a stack of its own
        return True
    if dispatch_depth() == 0:
        return False
    from torch._subclasses.functional_tensor import FunctionalTensorMode
    from torch.fx.experimental.proxy_tensor import ProxyTorchDispatchMode
    from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

    return any(
        isinstance(mode, (FunctionalTensorMode, ProxyTorchDispatchMode)) for mode in _get_current_dispatch_mode_stack()
    )

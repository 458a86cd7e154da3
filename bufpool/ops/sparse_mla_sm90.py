"""The SM90 backend of sparse MLA prefill: plans once a shape, then launches the kernel of ``csrc/``.

A thin layer: inputs and outputs arrive validated. It reads nothing from the device and never synchronises, so every
call can be captured in a CUDA graph.

*Concurrency*: safe from several threads; every thread has its own plans, at most ``MAX_PLANS`` of them.
"""

from __future__ import annotations

import functools
import importlib.util
import struct
import threading
from typing import Any

import torch

from ..errors import OutputMismatchError
from ..jit.compiler import Source
from ..jit.kernel import load_kernel
from ..jit.launch import Launch
from ..torch_state import current_device, raw_stream

__all__ = ["ARCH", "VARIANTS", "is_available", "launch", "unavailable_reason"]

CAPABILITY = (9, 0)
ARCH = "sm_90a"
D_QK = (512, 576)
HEADS = 64
MAX_PLANS = 256

_STAGES = 5
_SLOTS = 2
_DIRECT_COLUMNS = {512: 0, 576: 256}
"""Columns of q that never are in shared memory."""


def _shared_bytes(d_qk: int) -> int:
    """Size of ``SharedPlan<d_qk>``, which the kernel asserts against this figure."""
    rows = 64 * (_STAGES * d_qk + d_qk - _DIRECT_COLUMNS[d_qk])
    per_stage = 4 * 2
    per_slot = 2 * HEADS * 64 + 2 * 4 * HEADS + 4
    staging = 8 * 2 * 4 * 64 * 2
    barriers = 8 * (2 + 2 * _STAGES + 3 * _SLOTS)
    return -(-(rows + _STAGES * per_stage + _SLOTS * per_slot + staging + barriers) // 1024) * 1024


VARIANTS: dict[int, Source] = {
    d_qk: Source(
        name=f"sparse_mla_prefill_d{d_qk}",
        file="sparse_mla_prefill.cu",
        entry="sparse_mla_prefill",
        defines=(
            ("BUFPOOL_D_QK", str(d_qk)),
            ("BUFPOOL_SHARED_BYTES", str(_shared_bytes(d_qk))),
            ("BUFPOOL_ARRIVING_LANES", "1"),
        ),
        threads=512,
        shared_bytes=_shared_bytes(d_qk),
    )
    for d_qk in D_QK
}

# Params of csrc/sparse_mla_plan.cuh: what changes from call to call, then what the shape fixes.
_CHANGING = struct.Struct("<10Q3fi")
_FIXED = struct.Struct("<3qI7i")
_PARAMS_BYTES = _CHANGING.size + _FIXED.size
_pack_changing = _CHANGING.pack_into

_INT32_MAX = 2**31 - 1


class _Plans(threading.local):
    def __init__(self) -> None:
        self.by_shape: dict[tuple[Any, ...], _Plan] = {}


_plans = _Plans()


def unavailable_reason(device: torch.device) -> str | None:
    """Why the backend cannot serve ``device``; None if it can."""
    if device.type != "cuda":
        return f"device: expected a CUDA device, got {device}"
    index = device.index if device.index is not None else torch.cuda.current_device()
    return _reason(index)


def is_available(device: torch.device) -> bool:
    """Whether the backend can serve ``device``: compute capability 9.0, and cuda.core to compile with."""
    return unavailable_reason(device) is None


@functools.lru_cache(maxsize=64)
def _reason(index: int) -> str | None:
    capability = torch.cuda.get_device_capability(index)
    if capability != CAPABILITY:
        return f"cuda:{index}: expected compute capability 9.0, got {capability[0]}.{capability[1]}"
    try:
        is_found = importlib.util.find_spec("cuda.core") is not None
    except ModuleNotFoundError:
        is_found = False
    if not is_found:
        return "cuda.core: expected it to be installed (pip install bufpool[cuda13]), got nothing"
    return None


def launch(
    q: torch.Tensor,
    kv: torch.Tensor,
    indices: torch.Tensor,
    sm_scale: float,
    q_scale: float | torch.Tensor,
    kv_scale: float | torch.Tensor,
    attn_sink: torch.Tensor | None,
    topk_length: torch.Tensor | None,
    out: torch.Tensor,
    max_logits: torch.Tensor,
    lse: torch.Tensor,
) -> None:
    """Launch the kernel on the current stream of the tensors' device; returns at once.

    The caller guarantees everything below; nothing is checked here.

    Args:
        q: [s_q, h_q, d_qk] float8_e4m3fn, d_qk 576 or 512. Last dimension contiguous; base address and the strides of
            the first two dimensions are multiples of 16 bytes.
        kv: [s_kv, d_qk] float8_e4m3fn. Last dimension contiguous; base address and row stride multiples of 16 bytes, the
            row stride below 2^32 bytes.
        indices: [s_q, topk] int32, topk >= 1, last dimension contiguous.
        sm_scale: finite.
        q_scale, kv_scale: a finite number, or a float32 tensor of one element on the device.
        attn_sink: [h_q] float32, contiguous.
        topk_length: [s_q] int32, contiguous.
        out: [s_q, h_q, 512] bfloat16, contiguous, base address a multiple of 16 bytes.
        max_logits, lse: [s_q, h_q] float32, contiguous. Natural logarithm.

    All tensors are on one device. Strides of dimensions of size 1 do not count. s_q may be 0: nothing is launched. s_q
    times the head groups of 64 is below 2^31.

    Raises:
        CompileError, DriverError: at the first call of a variant, or if the driver refuses the launch.
        OutputMismatchError: the row stride of kv is 2^32 bytes or more.
    """
    s_q, h_q, d_qk = q.shape
    if s_q == 0:
        return
    device = q.get_device()
    key = (device, h_q, d_qk, indices.shape[1], kv.shape[0], q.stride(), kv.stride(0), indices.stride(0))
    by_shape = _plans.by_shape
    plan = by_shape.get(key)
    if plan is None:
        plan = _Plan(*key)
        if len(by_shape) >= MAX_PLANS:
            del by_shape[next(iter(by_shape))]
        by_shape[key] = plan
    q_scale_at = kv_scale_at = 0
    if isinstance(q_scale, torch.Tensor):
        q_scale_at, q_scale = q_scale.data_ptr(), 1.0
    if isinstance(kv_scale, torch.Tensor):
        kv_scale_at, kv_scale = kv_scale.data_ptr(), 1.0
    items = s_q * plan.head_groups
    # One buffer a call: a finalizer may launch the same shape between here and the end.
    launches = plan.launches
    launch = launches.pop() if launches else plan.new_launch()
    _pack_changing(
        launch.params,
        0,
        q.data_ptr(),
        kv.data_ptr(),
        indices.data_ptr(),
        0 if attn_sink is None else attn_sink.data_ptr(),
        0 if topk_length is None else topk_length.data_ptr(),
        q_scale_at,
        kv_scale_at,
        out.data_ptr(),
        max_logits.data_ptr(),
        lse.data_ptr(),
        sm_scale,
        q_scale,
        kv_scale,
        items,
    )
    grid = items if items < plan.sms else plan.sms
    if current_device() == device:
        launch(grid, raw_stream(device))
    else:
        with torch.cuda.device(device):
            launch(grid, raw_stream(device))
    launches.append(launch)


def _prefetches_keys(d_qk: int, kv_bytes: int, l2_bytes: int) -> bool:
    """Whether the kernel asks for rows of kv in L2 a block ahead (docs/kernel-notes.md, version 8).

    Each half of L2 keeps its own copy of what its SMs read. What does not fit in one comes from DRAM again and again,
    and asking early hides that; what fits is asked for in vain, which costs up to 3 %. With d_qk 576 it costs more than
    it hides.
    """
    return d_qk == 512 and kv_bytes > l2_bytes // 2


class _Plan:
    """The launch of one shape, with the fields of Params that the shape fixes; any s_q.

    Raises:
        OutputMismatchError: the row stride of kv is 2^32 bytes or more.
    """

    __slots__ = ("_device", "_fixed", "_kernel", "head_groups", "launches", "sms")

    def __init__(
        self,
        device: int,
        h_q: int,
        d_qk: int,
        topk: int,
        s_kv: int,
        q_strides: tuple[int, ...],
        kv_row: int,
        indices_row: int,
    ) -> None:
        if kv_row >= 2**32 and s_kv > 1:
            raise OutputMismatchError(f"kv: expected a row stride below 2^32 bytes, got {kv_row}")
        self.head_groups = -(-h_q // HEADS)
        properties = torch.cuda.get_device_properties(device)
        self.sms = properties.multi_processor_count
        self._device = device
        self._fixed = (
            q_strides[0],
            q_strides[1],
            indices_row,
            kv_row if s_kv > 1 else 0,
            min(s_kv, _INT32_MAX),
            h_q,
            self.head_groups,
            topk,
            self.sms // self.head_groups,
            self.sms % self.head_groups * HEADS,
            _prefetches_keys(d_qk, s_kv * d_qk, properties.L2_cache_size),
        )
        with torch.cuda.device(device):
            self._kernel = load_kernel(VARIANTS[d_qk], ARCH)
        self.launches = [self.new_launch()]
        """Those that no call is using; nearly always one."""

    def new_launch(self) -> Launch:
        """One more buffer with the fields that the shape fixes."""
        with torch.cuda.device(self._device):
            launch = Launch(self._kernel, self._device, _PARAMS_BYTES)
        _FIXED.pack_into(launch.params, _CHANGING.size, *self._fixed)
        return launch

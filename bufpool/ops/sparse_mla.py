"""The sparse-MLA prefill operator: validate, acquire, launch.

Everything the caller gives is checked before anything happens, from shapes, dtypes, devices and strides alone: no
memory is read and no device is waited for, so that a whole call can be captured in a CUDA graph. The checks run in
one pass of plain comparisons; texts are put together only for an error.
"""

from __future__ import annotations

import importlib
import logging
import operator
from collections.abc import Callable
from numbers import Real
from typing import Any, NoReturn

import torch

from ..allocator import OutputAllocator
from ..errors import BufpoolError, DeviceMismatchError, OutputMismatchError
from ..outputs import check_distinct, check_output
from ..pool import default_pool
from ..spec import OutputSpec
from ..torch_state import has_no_memory, is_recording, is_tracing
from .reference import D_V, sparse_mla_prefill_reference

__all__ = ["sparse_mla_prefill", "sparse_mla_spec"]

_logger = logging.getLogger("bufpool")

_BACKENDS = ("auto", "reference", "sm90")
_SM90_MODULE = ".sparse_mla_sm90"
_ALIGNMENT_BYTES = 16  # Of base addresses and strides of q and kv, in the SM90 kernel.
_OUT_ALIGNMENT_BYTES = 16
_FLOAT32_MAX = torch.finfo(torch.float32).max

_Tensor = torch.Tensor
_E4M3 = torch.float8_e4m3fn
_FLOAT32 = torch.float32
_INT32 = torch.int32

Launch = Callable[..., None]
"""(q, kv, indices, sm_scale, q_scale, kv_scale, attn_sink, topk_length, out, max_logits, lse), all but the scales and
None tensors; overwrites the last three."""


def sparse_mla_prefill(
    q: torch.Tensor,
    kv: torch.Tensor,
    indices: torch.Tensor,
    sm_scale: float,
    q_scale: float | torch.Tensor,
    kv_scale: float | torch.Tensor,
    d_v: int = D_V,
    attn_sink: torch.Tensor | None = None,
    topk_length: torch.Tensor | None = None,
    *,
    out: torch.Tensor | None = None,
    max_logits: torch.Tensor | None = None,
    lse: torch.Tensor | None = None,
    allocator: OutputAllocator | None = None,
    backend: str = "auto",
) -> Any:
    """Sparse multi-head latent attention of every row of q over the kv rows that its indices name.

    For the valid places j of a row, ``s_j = sm_scale q_scale kv_scale (q . kv_j)``, natural log throughout::

        max_logits = max_j s_j
        lse        = ln sum_j exp(s_j)                                        (without the sink)
        out        = kv_scale sum_j exp(s_j - m) kv_j[:512] / (sum_j exp(s_j - m) + exp(attn_sink - m)),  m = max_logits

    A row without valid places gives out 0, max_logits -inf, lse +inf. A row's result is the same bits alone or in any
    batch. kv rows that no valid place names may hold anything, NaN included. No gradient flows.

    Args:
        q: ``[s_q, h_q, d_qk]`` float8_e4m3fn, d_qk 576 or 512, last dimension contiguous; s_q may be 0.
        kv: ``[s_kv, d_qk]`` or ``[s_kv, 1, d_qk]`` float8_e4m3fn, last dimension contiguous; V is its first 512
            columns; s_kv may be 0.
        indices: ``[s_q, topk]`` or ``[s_q, 1, topk]`` int32. A value below 0 or at least s_kv marks an empty place,
            anywhere in the row; a kv row named twice counts twice.
        sm_scale: finite number, scale of the scores in natural-log units.
        q_scale, kv_scale: finite number, or float32 tensor of one element on the device of q, never read on the host.
        d_v: columns of V; 512.
        attn_sink: ``[h_q]`` float32 in natural-log units, +-inf allowed, with or without ``topk_length``.
        topk_length: ``[s_q]`` int32; places at and behind it are empty. Below 0 counts as 0, above topk as topk.
        out, max_logits, lse: outputs the caller brings, any of them: exact shape, dtype and device, contiguous,
            without grad, apart in memory from each other and from every input. The allocator gives the others.
        allocator: who gives the outputs; None means ``bufpool.default_pool()``.
        backend: ``"sm90"`` (the CUDA kernel for compute capability 9.0), ``"reference"`` (plain PyTorch, any device),
            or ``"auto"``: sm90 where it is available, else the reference. Which one serves, and why, is logged once.

    Returns:
        A named tuple: ``out`` ``[s_q, h_q, 512]`` bfloat16, ``max_logits`` and ``lse`` ``[s_q, h_q]`` float32. Memory
        of the allocator is the caller's until nothing refers to it any more.

    Raises:
        TypeError: an argument is of the wrong kind.
        OutputMismatchError: a tensor has the wrong shape, dtype or layout, or an output shares memory.
        DeviceMismatchError: a tensor is not on the device of q.
        ValueError: a number is NaN or infinite, d_v is not 512, the backend is unknown.
        BufpoolError: ``backend="sm90"`` is not available; the text says why.
        PoolLimitError: the allocator has no memory for the outputs.
    """
    if is_tracing() or is_recording():
        return _traced(
            q, kv, indices, sm_scale, q_scale, kv_scale, d_v, attn_sink, topk_length, out, max_logits, lse, backend
        )
    if not isinstance(q, _Tensor):
        _not_a_tensor("q", q)
    q_shape = q.shape
    if q.dtype is not _E4M3 or len(q_shape) != 3:
        _mismatch("q", "float8_e4m3fn [s_q, h_q, 576 or 512]", q)
    s_q, h_q, d_qk = q_shape
    if (d_qk != 576 and d_qk != 512) or h_q < 1:
        _mismatch("q", "float8_e4m3fn [s_q, h_q >= 1, 576 or 512]", q)
    if not q.is_contiguous() and q.stride(2) != 1:
        _strided("q", q)
    device = q.device

    if not isinstance(kv, _Tensor):
        _not_a_tensor("kv", kv)
    kv_shape = kv.shape
    kv_rank = len(kv_shape)
    if kv.dtype is not _E4M3 or (kv_rank != 2 and (kv_rank != 3 or kv_shape[1] != 1)) or kv_shape[-1] != d_qk:
        _mismatch("kv", f"float8_e4m3fn [s_kv, {d_qk}] or [s_kv, 1, {d_qk}], d_qk as in q", kv)
    if not kv.is_contiguous() and kv.stride(-1) != 1:
        _strided("kv", kv)
    if kv.device != device:
        _elsewhere("kv", kv, device)

    if not isinstance(indices, _Tensor):
        _not_a_tensor("indices", indices)
    indices_shape = indices.shape
    indices_rank = len(indices_shape)
    if (
        indices.dtype is not _INT32
        or (indices_rank != 2 and (indices_rank != 3 or indices_shape[1] != 1))
        or indices_shape[0] != s_q
        or indices_shape[-1] < 1
    ):
        _mismatch("indices", f"int32 [{s_q}, topk >= 1] or [{s_q}, 1, topk >= 1], rows as in q", indices)
    if indices.device != device:
        _elsewhere("indices", indices, device)

    if type(sm_scale) is not float or not -_FLOAT32_MAX <= sm_scale <= _FLOAT32_MAX:
        sm_scale = _number("sm_scale", sm_scale, "a finite number")
    if isinstance(q_scale, _Tensor):
        _check_scale("q_scale", q_scale, device)
    elif type(q_scale) is not float or not -_FLOAT32_MAX <= q_scale <= _FLOAT32_MAX:
        q_scale = _number("q_scale", q_scale, "a finite number or a float32 tensor of one element")
    if isinstance(kv_scale, _Tensor):
        _check_scale("kv_scale", kv_scale, device)
    elif type(kv_scale) is not float or not -_FLOAT32_MAX <= kv_scale <= _FLOAT32_MAX:
        kv_scale = _number("kv_scale", kv_scale, "a finite number or a float32 tensor of one element")
    if type(d_v) is not int or d_v != D_V:
        _check_d_v(d_v)

    if attn_sink is not None:
        if not isinstance(attn_sink, _Tensor):
            _not_a_tensor("attn_sink", attn_sink)
        if attn_sink.dtype is not _FLOAT32 or attn_sink.shape != (h_q,):
            _mismatch("attn_sink", f"float32 [{h_q}], heads as in q", attn_sink)
        if attn_sink.device != device:
            _elsewhere("attn_sink", attn_sink, device)
    if topk_length is not None:
        if not isinstance(topk_length, _Tensor):
            _not_a_tensor("topk_length", topk_length)
        if topk_length.dtype is not _INT32 or topk_length.shape != (s_q,):
            _mismatch("topk_length", f"int32 [{s_q}], rows as in q", topk_length)
        if topk_length.device != device:
            _elsewhere("topk_length", topk_length, device)

    try:
        launch = _launches[backend, device]
    except (KeyError, TypeError):
        launch = _find_launch(backend, device)
    if allocator is None:
        allocator = default_pool()
    try:
        acquire = allocator.acquire
    except AttributeError:
        raise TypeError(f"allocator: expected an object with acquire(spec, rows, like), got {allocator!r}") from None

    try:
        spec = _specs[h_q, D_V]
    except KeyError:
        spec = sparse_mla_spec(h_q, D_V)
    if out is None and max_logits is None and lse is None:
        outputs = acquire(spec, s_q, q)
    else:
        inputs = {"q": q, "kv": kv, "indices": indices}
        if type(q_scale) is not float:
            inputs["q_scale"] = q_scale  # type: ignore[assignment]
        if type(kv_scale) is not float:
            inputs["kv_scale"] = kv_scale  # type: ignore[assignment]
        if attn_sink is not None:
            inputs["attn_sink"] = attn_sink
        if topk_length is not None:
            inputs["topk_length"] = topk_length
        outputs = _complete(spec, s_q, device, (out, max_logits, lse), inputs, acquire)

    if s_q > 0 and (type(outputs[0]) is _Tensor or not has_no_memory(outputs[0])):
        launch(q, kv, indices, sm_scale, q_scale, kv_scale, attn_sink, topk_length, *outputs)
    return outputs


_specs: dict[tuple[int, int], OutputSpec] = {}


def sparse_mla_spec(h_q: int, d_v: int = D_V) -> OutputSpec:
    """What the operator writes for ``h_q`` heads: the spec to ``reserve`` with. The same object every time.

    Args:
        h_q: heads, at least 1.
        d_v: columns of V, at least 1 (the operator takes 512).

    Returns:
        ``out`` ``[rows, h_q, d_v]`` bfloat16, ``max_logits`` and ``lse`` ``[rows, h_q]`` float32.

    Raises:
        TypeError, ValueError: a size is not an integer >= 1.
    """
    spec = _specs.get((h_q, d_v)) if type(h_q) is int and type(d_v) is int else None
    if spec is None:
        spec = OutputSpec(
            out=((h_q, d_v), torch.bfloat16),
            max_logits=((h_q,), torch.float32),
            lse=((h_q,), torch.float32),
        )
        sizes = spec.row_shapes[0]
        spec = _specs.setdefault((sizes[0], sizes[1]), spec)
    return spec


# --- While a compiler traces ---

_outputs_type: Any = sparse_mla_spec(1).outputs_type


def _traced(
    q: torch.Tensor,
    kv: torch.Tensor,
    indices: torch.Tensor,
    sm_scale: float,
    q_scale: float | torch.Tensor,
    kv_scale: float | torch.Tensor,
    d_v: int,
    attn_sink: torch.Tensor | None,
    topk_length: torch.Tensor | None,
    out: torch.Tensor | None,
    max_logits: torch.Tensor | None,
    lse: torch.Tensor | None,
    backend: str,
) -> Any:
    """The call as an op of ``library.py``: the compiler owns the memory, and the arguments are checked when it runs."""
    if type(d_v) is not int or d_v != D_V:
        _check_d_v(d_v)
    q_scale_tensor = kv_scale_tensor = None
    if isinstance(q_scale, _Tensor):
        q_scale, q_scale_tensor = 1.0, q_scale
    if isinstance(kv_scale, _Tensor):
        kv_scale, kv_scale_tensor = 1.0, kv_scale
    inputs = (q, kv, indices, sm_scale, q_scale, kv_scale)
    options = {
        "q_scale_tensor": q_scale_tensor,
        "kv_scale_tensor": kv_scale_tensor,
        "attn_sink": attn_sink,
        "topk_length": topk_length,
        "backend": backend,
    }
    op = torch.ops.bufpool.sparse_mla_prefill
    if out is None and max_logits is None and lse is None:
        return _outputs_type(*op.default(*inputs, **options))
    s_q, h_q = q.shape[0], q.shape[1]
    if out is None:
        out = torch.empty((s_q, h_q, D_V), dtype=torch.bfloat16, device=q.device)
    if max_logits is None:
        max_logits = torch.empty((s_q, h_q), dtype=_FLOAT32, device=q.device)
    if lse is None:
        lse = torch.empty((s_q, h_q), dtype=_FLOAT32, device=q.device)
    op.out(*inputs, **options, out=out, max_logits=max_logits, lse=lse)
    return _outputs_type(out, max_logits, lse)


# --- Outputs that the caller brings ---

_partial_specs: dict[tuple[OutputSpec, tuple[str, ...]], OutputSpec] = {}


def _complete(
    spec: OutputSpec,
    rows: int,
    device: torch.device,
    given: tuple[torch.Tensor | None, ...],
    inputs: dict[str, torch.Tensor],
    acquire: Callable[[OutputSpec, int, torch.Tensor], Any],
) -> Any:
    """All outputs: those given, checked, and the others from the allocator, as a lane of their own."""
    mine: dict[str, torch.Tensor] = {}
    for name, tensor, shape, dtype in zip(spec.names, given, spec.row_shapes, spec.dtypes, strict=True):
        if tensor is not None:
            mine[name] = check_output(tensor, name, shape=(rows, *shape), dtype=dtype, device=device)
    check_distinct(mine, inputs)
    if len(mine) == len(given):
        return spec.outputs_type._make(given)
    missing = tuple(name for name in spec.names if name not in mine)
    partial = _partial_specs.get((spec, missing))
    if partial is None:
        partial = OutputSpec(**{name: (shape, dtype) for name, shape, dtype in spec if name in missing})
        _partial_specs[spec, missing] = partial
    mine.update(zip(missing, acquire(partial, rows, inputs["q"]), strict=True))
    return spec.outputs_type(**mine)


# --- Backends ---

_launches: dict[tuple[str, torch.device], Launch] = {}
_logged: set[str] = set()


def _find_launch(backend: Any, device: torch.device) -> Launch:
    if not isinstance(backend, str):
        raise TypeError(f"backend: expected one of {', '.join(_BACKENDS)}, got {backend!r}")
    if backend not in _BACKENDS:
        raise ValueError(f"backend: expected one of {', '.join(_BACKENDS)}, got {backend!r}")
    launch: Launch = sparse_mla_prefill_reference
    if device.type == "meta":
        return _no_launch
    if backend == "reference":
        why = "it was asked for"
    else:
        kernel, reason = _sm90(device)
        if kernel is not None:
            launch = _Sm90(kernel)
            why = "the kernel is available"
        elif backend == "sm90":
            raise BufpoolError(f"backend: expected sm90 to be available on {device}, got none: {reason}")
        else:
            why = f"sm90 is not available: {reason}"
    serving = "sm90" if isinstance(launch, _Sm90) else "the reference"
    text = f"sparse_mla_prefill: {serving} serves backend={backend!r} on {device}: {why}"
    _log_once(text, text)
    _launches[backend, device] = launch
    return launch


def _no_launch(*arguments: object) -> None:
    """Meta tensors have shapes and nothing to compute."""


def _sm90(device: torch.device) -> tuple[Launch | None, str]:
    """The kernel's launch function, or None and the reason."""
    if device.type != "cuda":
        return None, f"it needs a CUDA device, got {device}"
    try:
        module: Any = importlib.import_module(_SM90_MODULE, __package__)
    except ImportError as error:
        return None, f"the kernel cannot be imported ({error})"
    reason = module.unavailable_reason(device)
    return (module.launch, "") if reason is None else (None, str(reason))


class _Sm90:
    """Launches the kernel, with a copy of what it cannot address."""

    def __init__(self, launch: Launch) -> None:
        self._launch = launch

    def __call__(
        self,
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
        # What is whole and starts aligned, the common case, passes on two questions.
        if q.data_ptr() % _ALIGNMENT_BYTES or not q.is_contiguous():
            q = _addressable("q", q, 2)
        if kv.dim() == 3:
            kv = kv.select(1, 0)
        if kv.data_ptr() % _ALIGNMENT_BYTES or not kv.is_contiguous():
            kv = _addressable("kv", kv, 1)
        if indices.dim() == 3:
            indices = indices.select(1, 0)
        if not indices.is_contiguous() and indices.stride(1) != 1:
            indices = _copied("indices", indices)
        if attn_sink is not None and not attn_sink.is_contiguous():
            attn_sink = _copied("attn_sink", attn_sink)
        if topk_length is not None and not topk_length.is_contiguous():
            topk_length = _copied("topk_length", topk_length)
        written = out if out.data_ptr() % _OUT_ALIGNMENT_BYTES == 0 else _copied("out", out)
        self._launch(q, kv, indices, sm_scale, q_scale, kv_scale, attn_sink, topk_length, written, max_logits, lse)
        if written is not out:
            out.copy_(written)


def _addressable(name: str, tensor: torch.Tensor, leading: int) -> torch.Tensor:
    """``tensor`` of one-byte elements, or a copy if its base or one of its ``leading`` strides is out of step."""
    is_out_of_step = tensor.data_ptr() % _ALIGNMENT_BYTES != 0
    for size, stride in zip(tensor.shape[:leading], tensor.stride(), strict=False):
        is_out_of_step |= size > 1 and stride % _ALIGNMENT_BYTES != 0
    return _copied(name, tensor) if is_out_of_step else tensor


def _copied(name: str, tensor: torch.Tensor) -> torch.Tensor:
    _log_once(
        name,
        f"sparse_mla_prefill: {name} is copied at every call like this one, since sm90 cannot address it: got strides "
        f"{list(tensor.stride())} in elements of {tensor.dtype.itemsize} bytes, {tensor.data_ptr() % 256} bytes past a "
        f"multiple of 256",
    )
    return tensor.clone(memory_format=torch.contiguous_format)


def _log_once(reason: str, text: str) -> None:
    if reason not in _logged:
        _logged.add(reason)
        _logger.info("%s", text)


# --- Errors, and the rare arguments behind them ---


def _not_a_tensor(name: str, value: Any) -> NoReturn:
    raise TypeError(f"{name}: expected a tensor, got {value!r}")


def _mismatch(name: str, rule: str, tensor: torch.Tensor) -> NoReturn:
    dtype = str(tensor.dtype).removeprefix("torch.")
    raise OutputMismatchError(f"{name}: expected {rule}, got {dtype} {list(tensor.shape)}")


def _strided(name: str, tensor: torch.Tensor) -> NoReturn:
    raise OutputMismatchError(
        f"{name}: expected a contiguous last dimension, got strides {list(tensor.stride())} of shape {list(tensor.shape)}"
    )


def _elsewhere(name: str, tensor: torch.Tensor, device: torch.device) -> NoReturn:
    raise DeviceMismatchError(f"{name} must be on device {device}, got {tensor.device} (q is on {device})")


def _check_scale(name: str, scale: torch.Tensor, device: torch.device) -> None:
    if scale.dtype is not _FLOAT32 or scale.numel() != 1:
        _mismatch(name, "a finite number or a float32 tensor of one element", scale)
    if scale.device != device:
        _elsewhere(name, scale, device)


def _number(name: str, value: Any, rule: str) -> float:
    """``value`` as a float that float32 can hold; NumPy's numbers are taken, booleans and tensors are not."""
    if isinstance(value, bool) or not isinstance(value, Real):
        raise TypeError(f"{name}: expected {rule}, got {value!r}")
    try:
        number = float(value)
    except OverflowError:
        raise ValueError(f"{name}: expected {rule}, got an integer of {len(str(value))} digits") from None
    if not -_FLOAT32_MAX <= number <= _FLOAT32_MAX:
        raise ValueError(f"{name}: expected {rule} that float32 can hold, got {number}")
    return number


def _check_d_v(d_v: Any) -> None:
    if isinstance(d_v, (bool, torch.Tensor)):
        raise TypeError(f"d_v: expected {D_V}, got {d_v!r}")
    try:
        value = operator.index(d_v)
    except TypeError:
        raise TypeError(f"d_v: expected {D_V}, got {d_v!r}") from None
    if value != D_V:
        raise ValueError(f"d_v: expected {D_V}, got {value}")

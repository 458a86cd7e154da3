"""Stand-ins for SGLang's Q8KV8 sparse-prefill wrapper and the buffers around it, on the pool.

Same names, arguments, results and errors as in ``sparse_mla_q8kv8_prefill_sm90`` and ``dsv4`` there, so that replacing an
import is all there is to do. Each takes ``allocator=`` on top; left out, ``bufpool.default_pool()`` serves.

Note [Empty places]
    Rationale: there, a place of -1 without ``topk_length`` is loaded from one of ``topk`` zero rows that the caller appends
    to kv, so that every load is legal, and masked. Here an empty place is not loaded at all.
    Approach: indices are passed on as they are. Below 0 means empty, with and without ``topk_length``. The appended
    rows are kv rows like others that no index names: they may stay, be left out, and hold anything.
    Limits: a caller who writes the numbers of appended rows into ``indices`` himself names real rows. Their scores are
    0, and each adds ``exp(0 - max)`` to the sum, here as there. Leave -1.
"""

from __future__ import annotations

import operator
from typing import Any

import torch

from ..allocator import OutputAllocator
from ..errors import OutputMismatchError
from ..ops import sparse_mla_prefill
from ..outputs import check_distinct, check_output
from ..pool import default_pool
from ..spec import OutputSpec

__all__ = [
    "SparsePrefillWorkspace",
    "cast_q_fp8_for_q8kv8_prefill",
    "q8kv8_padded_num_heads",
    "sparse_mla_q8kv8_prefill_fwd",
]

_PADDED_HEADS = (64, 128)
_HEADS_STEP = 64
_TOPK_STEP = 128
_WIDTH = 512
_E4M3 = torch.float8_e4m3fn


def sparse_mla_q8kv8_prefill_fwd(
    q: torch.Tensor,
    kv: torch.Tensor,
    indices: torch.Tensor,
    sm_scale: float,
    q_scale: torch.Tensor,
    kv_scale: torch.Tensor,
    d_v: int = _WIDTH,
    attn_sink: torch.Tensor | None = None,
    topk_length: torch.Tensor | None = None,
    *,
    out: torch.Tensor | None = None,
    max_logits: torch.Tensor | None = None,
    lse: torch.Tensor | None = None,
    allocator: OutputAllocator | None = None,
) -> Any:
    """``bufpool.ops.sparse_mla_prefill`` under the name and the rules of SGLang's wrapper.

    What is refused there is refused here, with two exceptions: tensors of any device are taken, and the values of
    ``topk_length`` are not read (that needs a wait for the device): below 0 they count as 0, above topk as topk.

    Args:
        q: ``[s_q, h_q, d_qk]`` float8_e4m3fn, contiguous, h_q a multiple of 64, d_qk 512 or 576.
        kv: ``[s_kv, 1, d_qk]`` float8_e4m3fn, contiguous; may end in rows for empty places (Note [Empty places]).
        indices: ``[s_q, 1, topk]`` int32, contiguous, topk a multiple of 128; below 0: an empty place.
        sm_scale: finite number, natural-log units.
        q_scale, kv_scale: float32 tensor of one element.
        d_v: 512.
        attn_sink: ``[h_q]`` float32, contiguous; only with ``topk_length``.
        topk_length: ``[s_q]`` int32, contiguous.
        out, max_logits, lse: outputs the caller brings, any of them.
        allocator: who gives the others.

    Returns:
        A named tuple (out, max_logits, lse): ``[s_q, h_q, 512]`` bfloat16, ``[s_q, h_q]`` float32 twice, natural log.
        Two calls never share memory as long as the first result, or a view such as ``out[:, :num_heads]``, is held.

    Raises:
        ValueError: whatever is wrong with a tensor or a number; all errors about tensors are ``OutputMismatchError``.
        PoolLimitError: no memory for the outputs.
    """
    for name, tensor in (("q", q), ("kv", kv), ("indices", indices)):
        if tensor.dim() != 3:
            raise OutputMismatchError(f"{name}: expected 3 dimensions, got shape {list(tensor.shape)}")
        _check_contiguous(name, tensor)
    h_q, topk = q.shape[1], indices.shape[2]
    if h_q == 0 or h_q % _HEADS_STEP:
        raise OutputMismatchError(f"q: expected heads padded to a multiple of {_HEADS_STEP}, got {h_q}")
    if topk == 0 or topk % _TOPK_STEP:
        raise OutputMismatchError(f"indices: expected topk as a multiple of {_TOPK_STEP}, got {topk}")
    if kv.shape[1] != 1:
        raise OutputMismatchError(f"kv: expected one kv head, got {kv.shape[1]}")
    if d_v != _WIDTH:
        raise ValueError(f"d_v: expected {_WIDTH}, got {d_v}")
    if attn_sink is not None:
        if topk_length is None:
            raise ValueError("attn_sink: expected topk_length with it, got none")
        _check_contiguous("attn_sink", attn_sink)
    if topk_length is not None:
        _check_contiguous("topk_length", topk_length)
    for name, scale in (("q_scale", q_scale), ("kv_scale", kv_scale)):
        if not isinstance(scale, torch.Tensor):
            raise OutputMismatchError(f"{name}: expected a float32 tensor of one element, got {scale!r}")
    return sparse_mla_prefill(
        q,
        kv,
        indices,
        sm_scale,
        q_scale,
        kv_scale,
        attn_sink=attn_sink,
        topk_length=topk_length,
        out=out,
        max_logits=max_logits,
        lse=lse,
        allocator=allocator,
    )


def q8kv8_padded_num_heads(num_heads: int) -> int:
    """The head count, 64 or 128, to which ``num_heads`` heads are padded.

    Raises:
        ValueError: below 1 or above 128.
    """
    for padded in _PADDED_HEADS:
        if 1 <= operator.index(num_heads) <= padded:
            return padded
    raise ValueError(f"num_heads: expected 1 to {_PADDED_HEADS[-1]}, got {num_heads}")


def cast_q_fp8_for_q8kv8_prefill(
    q: torch.Tensor,
    padded_num_heads: int | None = None,
    out: torch.Tensor | None = None,
    *,
    allocator: OutputAllocator | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Cast queries to float8_e4m3fn with scale 1, and pad their heads with zeros.

    Args:
        q: ``[n, num_heads, 512]``, bfloat16 or float16.
        padded_num_heads: 64 or 128, not below num_heads; None for the smaller one that fits.
        out: ``[n, padded_num_heads, 512]`` float8_e4m3fn that the caller brings; it is overwritten whole.
        allocator: who gives it otherwise.

    Returns:
        ``(q_fp8, q_scale)``: ``[n, padded_num_heads, 512]``, and 1.0 as a float32 tensor without dimensions, made new by
        torch at each call. No gradient flows.

    Raises:
        ValueError: a shape, a head count or something about ``out`` is wrong.
        PoolLimitError: no memory for the result.
    """
    if q.dim() != 3 or q.shape[2] != _WIDTH:
        raise OutputMismatchError(f"q: expected shape [n, num_heads, {_WIDTH}], got {list(q.shape)}")
    rows, num_heads, _ = q.shape
    if padded_num_heads is None:
        padded_num_heads = q8kv8_padded_num_heads(num_heads)
    if padded_num_heads not in _PADDED_HEADS or padded_num_heads < num_heads:
        raise ValueError(f"padded_num_heads: expected 64 or 128, and at least {num_heads}, got {padded_num_heads}")
    if out is None:
        spec = _spec("q_fp8", (padded_num_heads, _WIDTH), _E4M3)
        (q_fp8,) = _or_default(allocator).acquire(spec, rows, q)
    else:
        shape = (rows, padded_num_heads, _WIDTH)
        q_fp8 = check_output(out, "out", shape=shape, dtype=_E4M3, device=q.device)
        check_distinct({"out": out}, {"q": q})
    q_fp8[:, :num_heads].copy_(q.detach())
    if padded_num_heads > num_heads:
        q_fp8[:, num_heads:].zero_()
    return q_fp8, torch.ones((), dtype=torch.float32, device=q.device)


class SparsePrefillWorkspace:
    """Scratch for dequantised kv rows: ``get(num_tokens, dtype)`` gives ``[num_tokens, 1, width]`` to be overwritten whole.

    Args:
        device: where; ``cuda`` without an index means the current device at the first ``get``.
        width: columns of a row.
        allocator: who gives the memory; None means ``bufpool.default_pool()``.
    """

    def __init__(
        self, device: torch.device | str, width: int = _WIDTH, *, allocator: OutputAllocator | None = None
    ) -> None:
        self.device = torch.device(device)
        self.width = width
        self._allocator = allocator
        self._like: torch.Tensor | None = None

    def get(self, num_tokens: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
        """Rows with undefined contents. Rows of an earlier call that somebody still holds are left alone.

        Each dtype has memory of its own, so alternating between two costs nothing.

        Raises:
            TypeError, ValueError: ``num_tokens`` is not an integer >= 0.
            PoolLimitError: no memory.
        """
        if self._like is None:
            self._like = torch.empty(0, device=self.device)
        spec = _spec("workspace", (1, self.width), dtype)
        (workspace,) = _or_default(self._allocator).acquire(spec, num_tokens, self._like)
        return workspace  # type: ignore[no-any-return]


_specs: dict[tuple[str, tuple[int, ...], torch.dtype], OutputSpec] = {}


def _spec(name: str, row_shape: tuple[int, ...], dtype: torch.dtype) -> OutputSpec:
    key = name, row_shape, dtype
    spec = _specs.get(key)
    if spec is None:
        spec = _specs.setdefault(key, OutputSpec(**{name: (row_shape, dtype)}))
    return spec


def _or_default(allocator: OutputAllocator | None) -> OutputAllocator:
    return default_pool() if allocator is None else allocator


def _check_contiguous(name: str, tensor: torch.Tensor) -> None:
    if not tensor.is_contiguous():
        raise OutputMismatchError(
            f"{name}: expected a contiguous tensor, got strides {list(tensor.stride())} of shape {list(tensor.shape)}"
        )

"""What the sparse-MLA prefill kernel computes: the definition, in plain PyTorch, on any device.

Bit for bit, a row's result depends on that row's inputs alone: not on ``s_q``, not on its place in the batch, not on
the chunking. Libraries of matrix products and vector functions give no such promise across shapes and alignments, so
whatever they may round differently (products, sums, exp, log) runs row by row: always the same call, on operands of
the same shape and the same alignment. What IEEE arithmetic or selection makes exact (scaling, maximum, difference,
quotient, masks, casts) runs for a whole chunk of rows at once.
"""

from __future__ import annotations

from math import inf

import torch

__all__ = ["D_V", "TEMPORARY_BYTES", "sparse_mla_prefill_reference"]

D_V = 512
"""Columns of V, and of a head's output: the first 512 of a kv row."""

TEMPORARY_BYTES = 256 * 2**20
"""Bound on the temporary memory of one call, in bytes. One row is the smallest piece of work, whatever it takes."""

_CHUNK_ROWS = 64  # Above this a chunk only falls out of the cache: 64 rows of 64 places are 9 MiB.
_ALIGNMENT_BYTES = 64  # Of every row of every buffer; torch aligns the first one to as much.
_LAST_INT32 = 2**31 - 1


def sparse_mla_prefill_reference(
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
    *,
    dtype: torch.dtype = torch.float32,
    max_bytes: int = TEMPORARY_BYTES,
) -> None:
    """Overwrite ``out``, ``max_logits`` and ``lse`` with sparse MLA attention of every row over its own places.

    For the valid places j of a row, ``s_j = sm_scale q_scale kv_scale (q . kv_j)``::

        max_logits = max_j s_j
        lse        = ln sum_j exp(s_j)
        out        = kv_scale sum_j exp(s_j - m) kv_j[:512] / (sum_j exp(s_j - m) + exp(attn_sink - m)),  m = max_logits

    A place is valid if its index is in ``[0, s_kv)`` and it lies before ``topk_length``; a place listed twice counts
    twice. A row without valid places gives out 0, max_logits -inf, lse +inf. kv rows that no valid place names are
    never read into a result, whatever they hold. e4m3 values are widened exactly.

    The arguments are trusted; ``sparse_mla_prefill`` checks them. No gradient flows. Nothing is read on the host, so
    the call does not wait for the device and can be captured. Where TF32 is allowed on a CUDA device, float32 products
    are rounded to it; the score of e4m3 operands stays exact, the product with V does not.

    Args:
        q: ``[s_q, h_q, d_qk]`` float8_e4m3fn, any strides.
        kv: ``[s_kv, d_qk]`` or ``[s_kv, 1, d_qk]`` float8_e4m3fn, any row stride; s_kv may be 0.
        indices: ``[s_q, topk]`` or ``[s_q, 1, topk]`` int32, any strides.
        sm_scale: scale of the scores, in natural-log units.
        q_scale, kv_scale: number, or float32 tensor of one element on the device of q. Zero and below are allowed.
        attn_sink: ``[h_q]`` float32 in natural-log units, +-inf allowed; None adds nothing to the denominator.
        topk_length: ``[s_q]`` int32, places at and behind it are empty; below 0 counts as 0. None: all ``topk``.
        out: ``[s_q, h_q, 512]``, written whole, rounded to its dtype (bfloat16 in the operator).
        max_logits, lse: ``[s_q, h_q]``, written whole (float32 in the operator), natural log.
        dtype: of the arithmetic: float32, or float64 for a reference to measure errors against.
        max_bytes: bound on temporary memory, in bytes; results do not depend on it.
    """
    s_q, h_q, d_qk = q.shape
    if s_q == 0:
        return
    with torch.inference_mode():
        if kv.dim() == 3:
            kv = kv[:, 0]
        if indices.dim() == 3:
            indices = indices[:, 0]
        s_kv, topk = kv.shape[0], indices.shape[1]
        device = q.device
        kv_factor = _scalar(kv_scale, dtype, device)
        score_factor = _scalar(sm_scale, dtype, device) * _scalar(q_scale, dtype, device) * kv_factor
        last = min(s_kv - 1, _LAST_INT32)

        # kv is widened once where that fits and where there are fewer kv rows than places, else place by place. Both
        # are exact, so the choice does not show in the result.
        size = dtype.itemsize
        widened_bytes = (s_kv + 1) * d_qk * size
        widened: torch.Tensor | None = None
        if s_kv == 0 or (2 * widened_bytes <= max_bytes and s_kv < s_q * topk):
            widened = torch.empty((s_kv + 1, d_qk), dtype=dtype, device=device)
            widened[:s_kv].copy_(kv)
            widened[s_kv].zero_()  # Empty places read this row: any finite one would do, at weight 0.
            max_bytes -= widened_bytes
        row_bytes = size * (d_qk * (h_q + topk) + h_q * (topk + D_V + 12)) + topk * (16 + d_qk * (widened is None))
        chunk = max(1, min(s_q, _CHUNK_ROWS, max_bytes // row_bytes))

        q_rows = torch.empty((chunk, h_q, d_qk), dtype=dtype, device=device)
        kv_rows = torch.empty((chunk, topk, d_qk), dtype=dtype, device=device)
        kv_bits = None
        if widened is None:
            kv_bits = torch.empty((chunk, topk, d_qk), dtype=torch.uint8, device=device)
        scores = _aligned_rows(chunk, (h_q, topk), dtype, device)
        sums = _aligned_rows(chunk, (h_q,), dtype, device)
        logs = _aligned_rows(chunk, (h_q,), dtype, device)
        products = torch.empty((chunk, h_q, D_V), dtype=dtype, device=device)
        sinks = None
        if attn_sink is not None:
            sinks = _aligned_rows(chunk, (h_q,), dtype, device)
            attn_sink = attn_sink.to(dtype)
        place = torch.arange(topk, device=device)

        for start in range(0, s_q, chunk):
            stop = min(start + chunk, s_q)
            n = stop - start
            q_n, kv_n, scores_n = q_rows[:n], kv_rows[:n], scores[:n]
            sums_n, logs_n, products_n = sums[:n], logs[:n], products[:n]

            # Fetch the rows that the valid places name, zeros for the others.
            index = indices[start:stop]
            valid = (index >= 0) & (index <= last)
            if topk_length is not None:
                valid &= place < topk_length[start:stop, None]
            q_n.copy_(q[start:stop])
            if widened is not None:
                row_of = torch.where(valid, index, s_kv).flatten()
                torch.index_select(widened, 0, row_of, out=kv_n.view(-1, d_qk))
            else:
                assert kv_bits is not None
                bits_n = kv_bits[:n]
                row_of = torch.where(valid, index, 0).flatten()
                torch.index_select(kv.view(torch.uint8), 0, row_of, out=bits_n.view(-1, d_qk))
                bits_n.masked_fill_(~valid[:, :, None], 0)
                kv_n.copy_(bits_n.view(kv.dtype))

            # Score every place, relative to the largest score of its row.
            for row_q, row_k, row_s in zip(q_n.unbind(), kv_n.mT.unbind(), scores_n.unbind(), strict=True):
                torch.mm(row_q, row_k, out=row_s)
            scores_n.mul_(score_factor).masked_fill_(~valid[:, None], -inf)
            largest = scores_n.amax(-1)
            empty = largest == -inf
            base = largest.masked_fill(empty, 0)
            scores_n.sub_(base[:, :, None])

            # Weigh V.
            for row_s, row_v, row_sum, row_log, row_o in zip(
                scores_n.unbind(),
                kv_n[:, :, :D_V].unbind(),
                sums_n.unbind(),
                logs_n.unbind(),
                products_n.unbind(),
                strict=True,
            ):
                torch.exp(row_s, out=row_s)
                torch.sum(row_s, -1, out=row_sum)
                torch.log(row_sum, out=row_log)
                torch.mm(row_s, row_v, out=row_o)
            lse[start:stop].copy_(logs_n.add_(base).masked_fill_(empty, inf))
            max_logits[start:stop].copy_(largest)
            if attn_sink is not None:
                assert sinks is not None
                for row_sink in torch.sub(attn_sink, base, out=sinks[:n]).unbind():
                    torch.exp(row_sink, out=row_sink)
                sums_n.add_(sinks[:n])
            products_n.div_(sums_n[:, :, None]).mul_(kv_factor).masked_fill_(empty[:, :, None], 0)
            out[start:stop].copy_(products_n)


def _scalar(value: float | torch.Tensor, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """``value`` as a tensor without dimensions; the host never reads it back."""
    if isinstance(value, torch.Tensor):
        return value.reshape(()).to(dtype)
    return torch.full((), value, dtype=dtype, device=device)


def _aligned_rows(rows: int, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """``[rows, *shape]``, undefined, each row contiguous and at the alignment of every other."""
    unit = _ALIGNMENT_BYTES // dtype.itemsize
    count = 1
    for size in shape:
        count *= size
    padded = -(-count // unit) * unit
    return torch.empty((rows, padded), dtype=dtype, device=device)[:, :count].view(rows, *shape)

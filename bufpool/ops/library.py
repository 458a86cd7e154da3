"""The operator as ``torch.ops.bufpool.sparse_mla_prefill``: what torch.compile and torch.export see.

A compiler must not look inside a kernel launch, and it owns the memory of what it compiles. So while something traces,
``bufpool.ops.sparse_mla_prefill`` is one of two opaque ops: a functional one, which makes its outputs with
``torch.empty``, and ``.out``, which overwrites three given ones. Eager calls do not come here: a dispatcher call costs
more than all checks together.

The ops are defined with the low-level calls (``define``, ``impl``), not with ``custom_op``, whose wrapper costs 20.8 us a
call against 3.2 us (measured with torch 2.11). Scales are numbers or one-element tensors: each has a number argument and
an optional tensor argument that wins, since turning a number into a tensor would launch a kernel.

They have no backward: gradients stop there, as in eager mode.

Registration happens once in a process, at import, and starts nothing; importing or reloading again keeps it.
"""

from __future__ import annotations

from typing import Any

import torch

from ..allocator import FreshAllocator
from ..errors import OutputMismatchError
from .reference import D_V
from .sparse_mla import sparse_mla_prefill

__all__ = ["NAME"]

NAME = "bufpool::sparse_mla_prefill"

_INPUTS = (
    "Tensor q, Tensor kv, Tensor indices, float sm_scale, float q_scale, float kv_scale, *, Tensor? q_scale_tensor=None, "
    "Tensor? kv_scale_tensor=None, Tensor? attn_sink=None, Tensor? topk_length=None, str backend='auto'"
)
# A default more, and inductor, which compares the two schemas, takes the out form for no out variant of the functional one.
# A variant it would call by itself, in torch 2.13 also with outputs that it dropped because nobody uses them: a NameError.
_OUT_INPUTS = _INPUTS.replace("float kv_scale,", "float kv_scale=1.0,")
_OUTPUTS = "Tensor(a!) out, Tensor(b!) max_logits, Tensor(c!) lse"

_fresh = FreshAllocator()

# From torch 2.13 on, an op with Tag.out returns what it wrote, and the compiler knows that it reads none of it. Before, the
# compiler takes no op that returns its arguments; the tag of 2.10 to 2.12 only links it to the functional form.
_returns_outputs = hasattr(torch.Tag, "out")
_out_tag: Any = getattr(torch.Tag, "out", None) or getattr(torch.Tag, "out_variant", None)


def _functional(
    q: torch.Tensor,
    kv: torch.Tensor,
    indices: torch.Tensor,
    sm_scale: float,
    q_scale: float,
    kv_scale: float = 1.0,  # the dispatcher leaves out what equals the default of the out form
    *,
    q_scale_tensor: torch.Tensor | None = None,
    kv_scale_tensor: torch.Tensor | None = None,
    attn_sink: torch.Tensor | None = None,
    topk_length: torch.Tensor | None = None,
    backend: str = "auto",
    out: torch.Tensor | None = None,
    max_logits: torch.Tensor | None = None,
    lse: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The eager operator, on memory of torch. Checks everything anew: shapes may differ from those that were traced."""
    outputs = sparse_mla_prefill(
        q,
        kv,
        indices,
        sm_scale,
        q_scale if q_scale_tensor is None else q_scale_tensor,
        kv_scale if kv_scale_tensor is None else kv_scale_tensor,
        D_V,
        attn_sink,
        topk_length,
        out=out,
        max_logits=max_logits,
        lse=lse,
        allocator=_fresh,
        backend=backend,
    )
    return tuple(outputs)


def _out(*args: Any, **kwargs: Any) -> Any:
    outputs = _functional(*args, **kwargs)
    return outputs if _returns_outputs else None


def _functional_fake(q: torch.Tensor, *args: Any, **kwargs: Any) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Shapes alone. What else is wrong with the arguments is said when the compiled code runs, in the eager words."""
    if q.dim() != 3:
        raise OutputMismatchError(f"q: expected [s_q, h_q, 576 or 512], got {list(q.shape)}")
    s_q, h_q = q.shape[0], q.shape[1]
    return (
        q.new_empty((s_q, h_q, D_V), dtype=torch.bfloat16),
        q.new_empty((s_q, h_q), dtype=torch.float32),
        q.new_empty((s_q, h_q), dtype=torch.float32),
    )


def _out_fake(
    *args: Any, out: torch.Tensor, max_logits: torch.Tensor, lse: torch.Tensor, **kwargs: Any
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None:
    return (out, max_logits, lse) if _returns_outputs else None


def _register() -> None:
    written = _OUTPUTS if _returns_outputs else ""
    compliant = torch.Tag.pt2_compliant_tag
    forms = (
        (NAME, f"({_INPUTS}) -> (Tensor, Tensor, Tensor)", (compliant,), _functional, _functional_fake),
        (f"{NAME}.out", f"({_OUT_INPUTS}, {_OUTPUTS}) -> ({written})", (compliant, _out_tag), _out, _out_fake),
    )
    for name, schema, tags, kernel, fake in forms:
        torch.library.define(name, schema, tags=[tag for tag in tags if tag is not None])
        torch.library.impl(name, "CompositeExplicitAutograd", kernel)
        torch.library.impl(name, "Autograd", torch.library.fallthrough_kernel)
        torch.library.register_fake(name, fake)


if not hasattr(torch.ops.bufpool, "sparse_mla_prefill"):
    _register()

"""The sparse-MLA kernel at the shapes of large models, and the FP8 matrix product that it is held against.

``bufpool bench`` and ``benchmarks/bench_sparse_mla.py`` take shapes, inputs and checks from here.
"""

from __future__ import annotations

import statistics
from dataclasses import dataclass

import torch

from ..ops.reference import D_V, sparse_mla_prefill_reference
from ..ops.sparse_mla import sparse_mla_prefill
from ..pool import OutputPool
from .device_clock import input_sets, time_launches

__all__ = ["GEMM_SIZE", "S_Q", "SHAPES", "Gemm", "KernelCase", "KernelShape", "KernelTimes", "time_kernel"]

S_Q = 4096
GEMM_SIZE = 8192

_E4M3 = torch.float8_e4m3fn
_CHECKED_ROWS = 16
_INDEX_ROWS = 256  # drawn at a time

# Against float64, for rows of more than 64 places.
_OUT_RELATIVE = 2.2e-2  # the kernel rounds P to e4m3: 1.7e-2 of a long row, 2.1e-2 of 512 places
_LOGIT_ABSOLUTE, _LOGIT_RELATIVE = 1.2e-2, 2e-3  # FP8 tensor cores keep about 14 bits while they add
_GEMM_RELATIVE = 5e-2  # the same adding, 8192 times: a product of the wrong matrices is off by more than 1


@dataclass(frozen=True)
class KernelShape:
    """Sizes of one call but for its rows."""

    d_qk: int
    h_q: int
    topk: int
    s_kv: int

    def flops(self, s_q: int) -> int:
        """Multiplications and additions of both products of one call."""
        return 2 * s_q * self.h_q * self.topk * (self.d_qk + D_V)


SHAPES = (
    KernelShape(576, 128, 2048, 8192),
    KernelShape(576, 128, 2048, 32768),
    KernelShape(576, 128, 2048, 65536),
    KernelShape(576, 128, 2048, 131072),
    KernelShape(576, 64, 2048, 32768),
    KernelShape(512, 64, 512, 8192),
    KernelShape(512, 64, 512, 65536),
    KernelShape(512, 128, 1024, 8192),
    KernelShape(512, 128, 1024, 65536),
)
"""Of DeepSeek-V3.2 (d_qk 576) and of its kind with fewer places; s_kv is the length of the context."""


class KernelCase:
    """One shape with random inputs, several sets of them, and the outputs of a pool.

    Args:
        shape: sizes.
        s_q: rows of q.
        device: home of the inputs.
        seed: of the inputs.
        sets: sets of inputs that take turns; by default as many as it takes to be out of L2.
        backend: of the operator.
    """

    def __init__(
        self,
        shape: KernelShape,
        s_q: int,
        device: torch.device,
        seed: int,
        *,
        sets: int | None = None,
        backend: str = "sm90",
    ) -> None:
        self.shape = shape
        self.s_q = s_q
        self._device = device
        self._backend = backend
        self._pool = OutputPool()
        self._source = torch.Generator(device).manual_seed(seed)
        set_bytes = (s_q * shape.h_q + shape.s_kv) * shape.d_qk + s_q * shape.topk * 4
        self.sets = input_sets(set_bytes, device) if sets is None else sets
        self._inputs = [(self._e4m3(s_q, shape.h_q), self._e4m3(shape.s_kv), self._indices()) for _ in range(self.sets)]

    def _e4m3(self, *rows: int) -> torch.Tensor:
        values = torch.randn(*rows, self.shape.d_qk, generator=self._source, device=self._device)
        return values.to(_E4M3)

    def _indices(self) -> torch.Tensor:
        """``[s_q, topk]`` int32: random places, none twice in a row."""
        parts = []
        for start in range(0, self.s_q, _INDEX_ROWS):
            rows = min(_INDEX_ROWS, self.s_q - start)
            draws = torch.rand(rows, self.shape.s_kv, generator=self._source, device=self._device)
            parts.append(draws.topk(self.shape.topk, dim=1).indices.int())
        return torch.cat(parts)

    def launch(self, number: int) -> tuple[torch.Tensor, ...]:
        """``out``, ``max_logits`` and ``lse`` of the inputs whose turn it is."""
        q, kv, indices = self._inputs[number % self.sets]
        outputs: tuple[torch.Tensor, ...] = sparse_mla_prefill(
            q, kv, indices, self.shape.d_qk**-0.5, 1.0, 1.0, allocator=self._pool, backend=self._backend
        )
        return outputs

    def error(self) -> tuple[float, str | None]:
        """Relative error of ``out`` against float64 in a few rows, and the first fault of the three outputs, or None."""
        outputs = self.launch(0)
        q, kv, indices = self._inputs[0]
        count = min(_CHECKED_ROWS, self.s_q)
        rows = torch.arange(count, device=self._device) * (self.s_q - 1) // max(count - 1, 1)
        # Gathered as bytes: not every torch indexes float8.
        q_rows = q.view(torch.uint8)[rows].view(_E4M3)
        like = {"dtype": torch.float64, "device": self._device}
        out, max_logits, lse = wanted = (
            torch.empty(len(rows), self.shape.h_q, D_V, **like),  # type: ignore[call-overload]
            *(torch.empty(len(rows), self.shape.h_q, **like) for _ in range(2)),  # type: ignore[call-overload]
        )
        scale = self.shape.d_qk**-0.5
        sparse_mla_prefill_reference(q_rows, kv, indices[rows], scale, 1.0, 1.0, None, None, *wanted, dtype=torch.float64)
        error = float((outputs[0][rows].double() - out).norm() / out.norm())
        fault = None if error <= _OUT_RELATIVE else f"out: expected an error of at most {_OUT_RELATIVE}, got {error:.3g}"
        for name, got, want in (("max_logits", outputs[1], max_logits), ("lse", outputs[2], lse)):
            excess = (got[rows].double() - want).abs() - (_LOGIT_ABSOLUTE + _LOGIT_RELATIVE * want.abs())
            if fault is None and not bool((excess <= 0).all()):
                fault = f"{name}: expected float64's within {_LOGIT_ABSOLUTE}, got {float(excess.max()):.3g} beyond"
        return error, fault

    def close(self) -> None:
        """Give inputs and outputs back."""
        self._inputs.clear()
        self._pool.close()


class Gemm:
    """The machine's FP8 rate: torch's product of two e4m3 matrices, ``size`` on each side, into bfloat16.

    Raises:
        RuntimeError, AttributeError, NotImplementedError: this torch cannot do that here.
    """

    def __init__(self, device: torch.device, seed: int, size: int = GEMM_SIZE) -> None:
        source = torch.Generator(device).manual_seed(seed)
        self._size = size
        self._one = torch.ones((), device=device)
        self._inputs = [
            [torch.randn(size, size, generator=source, device=device).to(_E4M3) for _ in range(2)]
            for _ in range(input_sets(2 * size * size, device))
        ]
        self._check()

    @property
    def flops(self) -> int:
        """Multiplications and additions of one product."""
        return 2 * self._size**3

    def launch(self, number: int) -> torch.Tensor:
        """``a @ b.T`` of the matrices whose turn it is."""
        a, b = self._inputs[number % len(self._inputs)]
        product: torch.Tensor = torch._scaled_mm(
            a, b.t(), scale_a=self._one, scale_b=self._one, out_dtype=torch.bfloat16, use_fast_accum=True
        )
        return product

    def _check(self) -> None:
        a, b = self._inputs[0]
        rows = a[:_CHECKED_ROWS].double() @ b.double().t()
        error = float((self.launch(0)[:_CHECKED_ROWS].double() - rows).norm() / rows.norm())
        if not error <= _GEMM_RELATIVE:
            raise RuntimeError(f"torch._scaled_mm: expected an error of at most {_GEMM_RELATIVE}, got {error:.3g}")


@dataclass(frozen=True)
class KernelTimes:
    """Median device milliseconds of the kernel and of the matrix product beside it, and launches of the kernel."""

    ms: float
    gemm_ms: float | None
    launches: int


def time_kernel(case: KernelCase, gemm: Gemm | None, device: torch.device, seconds: float) -> KernelTimes:
    """Device time of both, in turns, so that the ratio is of one run at one temperature."""
    launches = {"kernel": case.launch, **({} if gemm is None else {"gemm": gemm.launch})}
    ms = time_launches(launches, device, seconds)
    return KernelTimes(
        statistics.median(ms["kernel"]),
        None if gemm is None else statistics.median(ms["gemm"]),
        len(ms["kernel"]),
    )

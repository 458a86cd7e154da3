"""Operators that write their outputs into memory from an allocator."""

from . import library  # noqa: F401 (defines the ops that a compiler sees)
from .reference import sparse_mla_prefill_reference
from .sparse_mla import sparse_mla_prefill, sparse_mla_spec

__all__ = ["sparse_mla_prefill", "sparse_mla_prefill_reference", "sparse_mla_spec"]

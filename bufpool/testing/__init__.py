"""Checks for kernel wrappers that write into memory they are given."""

from .write_contract import GUARD_ROWS, assert_write_only

__all__ = ["GUARD_ROWS", "assert_write_only"]

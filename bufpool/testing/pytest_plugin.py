"""The fixture ``write_only``: ``assert_write_only`` for a test suite that has bufpool installed.

pytest loads this module in every run once bufpool is installed; ``-p no:bufpool`` leaves it out.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from ..allocator import Like
    from ..spec import OutputSpec

__all__ = ["write_only"]


@pytest.fixture
def write_only() -> Callable[[Callable[[Any], object], OutputSpec, int, Like], None]:
    """Check that a function overwrites all of its outputs and nothing else: ``write_only(fn, spec, rows, like)``.

    See ``bufpool.testing.assert_write_only``. A failure is shown where the test calls, without the checker's frames.

    Raises:
        WriteContractError: by the call of ``write_only``: the function broke its promise; the text says where.
    """
    from ..errors import WriteContractError
    from .write_contract import assert_write_only

    def check(fn: Callable[[Any], object], spec: OutputSpec, rows: int, like: Like) -> None:
        __tracebackhide__ = True
        try:
            assert_write_only(fn, spec, rows, like)
        except WriteContractError as error:
            raise error.with_traceback(None) from error.__cause__

    return check

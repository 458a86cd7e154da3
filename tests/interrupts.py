"""Exceptions out of nowhere, as a signal handler raises them."""

from __future__ import annotations

import linecache
import sys
from collections.abc import Callable, Iterable
from typing import Any


class Tick(BaseException):
    """What the handler raises."""


def interrupted_at(functions: Iterable[Callable[..., Any]], text: str, call: Callable[[], Any]) -> BaseException:
    """Call, and raise ``Tick`` in front of the first line of one of the functions that holds ``text``; what came out."""
    codes, done = {function.__code__ for function in functions}, []

    def inside(frame: Any, event: str, arg: Any) -> Any:
        if event == "line" and not done and text in linecache.getline(frame.f_code.co_filename, frame.f_lineno):
            done.append(frame.f_lineno)
            raise Tick
        return inside

    former = sys.gettrace()
    sys.settrace(lambda frame, event, arg: inside if frame.f_code in codes else None)
    try:
        call()
    except BaseException as error:
        return error
    finally:
        sys.settrace(former)
    raise AssertionError(f"expected a line with {text}, got none")

"""Errors: what each can be caught as, and what it carries."""

from __future__ import annotations

import copy
import inspect
import pickle

import pytest

import bufpool
from bufpool import errors
from bufpool.errors import BufpoolError, DeviceMismatchError, PoolLimitError

ALSO = {
    "BufpoolError": Exception,
    "OutputMismatchError": ValueError,
    "DeviceMismatchError": errors.OutputMismatchError,
    "PoolLimitError": MemoryError,
    "CaptureError": RuntimeError,
    "DriverError": RuntimeError,
    "CompileError": RuntimeError,
    "WriteContractError": AssertionError,
}


@pytest.mark.parametrize("name", errors.__all__)
def test_each_is_a_bufpool_error_and_what_a_caller_without_bufpool_would_catch(name):
    kind = getattr(errors, name)
    assert issubclass(kind, BufpoolError)
    assert issubclass(kind, ALSO[name])
    assert kind.__doc__


def test_all_are_listed_and_part_of_the_public_face():
    defined = {name for name, kind in inspect.getmembers(errors, inspect.isclass) if kind.__module__ == errors.__name__}
    assert set(errors.__all__) == defined == set(ALSO)
    assert all(getattr(bufpool, name) is getattr(errors, name) for name in errors.__all__)


def test_lack_of_memory_is_no_lack_of_torch():
    """Whoever catches torch's error to empty its cache and try again would not help the pool."""
    import torch

    assert not issubclass(PoolLimitError, torch.OutOfMemoryError)
    assert not issubclass(PoolLimitError, RuntimeError)


def limit_error():
    return PoolLimitError("cuda:0: max_bytes of the pool", need=3, have=2, limit=4)


def test_a_limit_error_carries_its_bytes_and_says_them():
    error = limit_error()
    assert (error.need, error.have, error.limit) == (3, 2, 4)
    assert str(error) == "cuda:0: max_bytes of the pool: expected at most 4 bytes, got 2 bytes and a need of 3 more"


@pytest.mark.parametrize("again", [lambda e: pickle.loads(pickle.dumps(e)), copy.copy, copy.deepcopy])
def test_a_limit_error_is_the_same_in_another_process(again):
    error = again(limit_error())
    assert type(error) is PoolLimitError
    assert (error.what, error.need, error.have, error.limit) == ("cuda:0: max_bytes of the pool", 3, 2, 4)
    assert str(error) == str(limit_error())


@pytest.mark.parametrize("name", sorted(set(errors.__all__) - {"PoolLimitError"}))
def test_the_others_are_their_text(name):
    kind = getattr(errors, name)
    assert str(kind("q: expected this, got that")) == "q: expected this, got that"
    assert str(pickle.loads(pickle.dumps(kind("text")))) == "text"


def test_a_device_mismatch_is_caught_as_a_mismatch_of_outputs_first():
    with pytest.raises(errors.OutputMismatchError):
        raise DeviceMismatchError("kv must be on device cuda:1, got cuda:0")

"""The allocator protocol, FreshAllocator, and the one device of several inputs."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from bufpool import BufpoolError, DeviceMismatchError, FreshAllocator, OutputAllocator, OutputMismatchError
from bufpool.allocator import home_device


def test_both_allocators_fit_the_protocol(pool):
    assert isinstance(pool, OutputAllocator)
    assert isinstance(FreshAllocator(), OutputAllocator)
    assert not isinstance(object(), OutputAllocator)


def test_fresh_results_have_the_shapes_of_the_spec_and_memory_of_their_own(spec, q):
    first = FreshAllocator().acquire(spec, 3, q)
    second = FreshAllocator().acquire(spec, np.int64(3), q)
    assert first._fields == ("out", "lse")
    assert [(tensor.shape, tensor.dtype) for tensor in first] == [((3, 8, 64), torch.bfloat16), ((3, 8), torch.float32)]
    first.lse.fill_(1)
    second.lse.fill_(2)
    assert bool((first.lse == 1).all())


@pytest.mark.parametrize("rows", [True, 2.0, "2", None])
def test_the_fresh_allocator_refuses_rows_of_a_wrong_kind(spec, q, rows):
    with pytest.raises(TypeError, match="rows: expected an integer"):
        FreshAllocator().acquire(spec, rows, q)


def test_no_rows_are_empty_tensors(spec, q):
    assert [tensor.shape for tensor in FreshAllocator().acquire(spec, 0, q)] == [(0, 8, 64), (0, 8)]


def test_the_fresh_allocator_follows_meta_and_fake_inputs(spec):
    assert FreshAllocator().acquire(spec, 2, torch.empty(1, device="meta")).out.device.type == "meta"
    mode = FakeTensorMode()
    with mode:
        fake = torch.empty(1)
    assert type(FreshAllocator().acquire(spec, 2, fake).out) is type(fake)


@pytest.mark.parametrize("gather", [list, tuple, lambda tensors: dict(enumerate(tensors))])
def test_several_inputs_of_one_device_have_one_home(gather):
    assert home_device(gather([torch.zeros(1), torch.ones(2)])) == torch.device("cpu")


def test_a_parameter_is_an_input(spec, pool):
    parameter = torch.nn.Parameter(torch.zeros(1))
    assert home_device(parameter) == torch.device("cpu")
    assert not pool.acquire(spec, 2, parameter).out.requires_grad


def test_two_devices_are_an_error_that_names_both_tensors_and_both_devices(pool, spec):
    inputs = {"q": torch.zeros(1), "kv": torch.zeros(1), "indices": torch.zeros(1, device="meta")}
    for allocator in (pool, FreshAllocator()):
        with pytest.raises(DeviceMismatchError, match=r"^indices must be on device cpu, got meta \(q is on cpu\)$"):
            allocator.acquire(spec, 2, inputs)
        with pytest.raises(
            DeviceMismatchError, match=r"like\[1\] must be on device meta, got cpu \(like\[0\] is on meta\)"
        ):
            allocator.acquire(spec, 2, [inputs["indices"], inputs["q"]])
    assert pool.stats().acquires == 0


def test_a_device_error_can_be_caught_by_its_whole_family():
    assert issubclass(DeviceMismatchError, OutputMismatchError)
    assert issubclass(OutputMismatchError, BufpoolError)
    assert issubclass(OutputMismatchError, ValueError)


@pytest.mark.parametrize("like", [[], (), {}])
def test_no_input_at_all_is_a_value_error(pool, spec, like):
    for allocator in (pool, FreshAllocator()):
        with pytest.raises(ValueError, match="like: expected at least one tensor, got none"):
            allocator.acquire(spec, 2, like)


@pytest.mark.parametrize("like", ["cpu", b"cpu", None, 3, torch.device("cpu"), [torch.zeros(1), None], {"q": 3}])
def test_inputs_that_are_no_tensors_are_type_errors(pool, spec, like):
    for allocator in (pool, FreshAllocator()):
        with pytest.raises(TypeError, match="expected a tensor"):
            allocator.acquire(spec, 2, like)

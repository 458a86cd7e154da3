"""OutputSpec: frozen, hashable, ordered; wrong kinds are refused in words. Row counts are integers."""

from __future__ import annotations

import copy
import pickle

import numpy as np
import pytest
import torch

from bufpool import OutputPool, OutputSpec
from bufpool.spec import row_count


def test_bytes_are_counted_in_64_bits_and_more(spec):
    assert spec.nbytes(0) == 0
    assert spec.nbytes(10) == 10 * (8 * 64 * 2 + 8 * 4)
    assert OutputSpec(x=((2**20, 2**20), torch.float64)).nbytes(2**40) == 2**83


def test_a_row_may_be_one_scalar():
    spec = OutputSpec(x=((), torch.int64))
    assert spec.nbytes(3) == 24
    assert OutputPool().acquire(spec, 3, torch.zeros(1)).x.shape == (3,)


def test_names_shapes_and_dtypes_keep_their_order():
    spec = OutputSpec(b=((2,), torch.float16), a=([3, 4], torch.int8))
    assert list(spec) == [("b", (2,), torch.float16), ("a", (3, 4), torch.int8)]
    assert spec.outputs_type._fields == ("b", "a")
    assert len(spec) == 2
    assert spec.shapes(5) == ((5, 2), (5, 3, 4))


def test_equal_specs_are_one_key_of_a_dictionary(spec):
    same = OutputSpec(out=((8, 64), torch.bfloat16), lse=((8,), torch.float32))
    assert same == spec
    assert {spec: 1}[same] == 1
    assert spec != "spec"


@pytest.mark.parametrize(
    "other",
    [
        OutputSpec(lse=((8,), torch.float32), out=((8, 64), torch.bfloat16)),
        OutputSpec(out=((8, 64), torch.bfloat16), LSE=((8,), torch.float32)),
        OutputSpec(out=((8, 64), torch.float16), lse=((8,), torch.float32)),
        OutputSpec(out=((64, 8), torch.bfloat16), lse=((8,), torch.float32)),
        OutputSpec(out=((512,), torch.bfloat16), lse=((8,), torch.float32)),
        OutputSpec(out=((8, 64), torch.bfloat16)),
    ],
    ids=["order", "name", "dtype", "transposed", "flat", "fewer"],
)
def test_specs_that_differ_in_anything_are_not_equal(spec, other):
    assert other != spec
    assert other.key != spec.key


def test_a_spec_cannot_be_changed(spec):
    with pytest.raises(AttributeError, match="frozen spec, got names"):
        spec.names = ("x",)
    with pytest.raises(AttributeError, match="frozen spec, got del names"):
        del spec.names
    with pytest.raises(AttributeError):
        spec.new = 1


@pytest.mark.parametrize("make", [copy.copy, copy.deepcopy, lambda spec: pickle.loads(pickle.dumps(spec))])
def test_a_copy_is_equal(spec, make):
    assert make(spec) == spec
    assert hash(make(spec)) == hash(spec)


def test_the_text_of_a_spec_names_everything(spec):
    assert repr(spec) == "OutputSpec(out=((8, 64), torch.bfloat16), lse=((8,), torch.float32))"


def test_a_spec_of_nothing_is_refused():
    with pytest.raises(ValueError, match="at least one"):
        OutputSpec()


@pytest.mark.parametrize("name", ["_hidden", "class", "count", "index", "a b", "1a"])
def test_names_that_a_named_tuple_cannot_have_are_refused(name):
    with pytest.raises(ValueError, match="name"):
        OutputSpec(**{name: ((1,), torch.float32)})


@pytest.mark.parametrize(
    ("entry", "text"),
    [
        (((4,), "float32"), r"x: expected a torch.dtype, got 'float32'"),
        (((4,), float), r"x: expected a torch.dtype, got <class 'float'>"),
        (((4,), np.float32), r"x: expected a torch.dtype"),
        ((4, torch.float32), r"x: expected a row shape as a tuple of integers, got 4"),
        (("44", torch.float32), r"x: expected a row shape"),
        (((4.0,), torch.float32), r"x: expected integer sizes in the row shape, got 4.0"),
        (((True,), torch.float32), r"x: expected integer sizes in the row shape, got True"),
        (((4,),), r"x: expected \(row_shape, dtype\)"),
        (None, r"x: expected \(row_shape, dtype\), got None"),
    ],
)
def test_entries_of_a_wrong_kind_are_type_errors_that_say_what_was_wanted(entry, text):
    with pytest.raises(TypeError, match=text):
        OutputSpec(x=entry)


@pytest.mark.parametrize("size", [0, -1])
def test_sizes_below_one_are_value_errors(size):
    with pytest.raises(ValueError, match=f"x: expected sizes >= 1 in the row shape, got {size}"):
        OutputSpec(x=((4, size), torch.float32))


def test_a_row_of_absurd_size_is_a_value_error():
    with pytest.raises(ValueError, match="elements a row"):
        OutputSpec(x=((2**21, 2**21), torch.float32))


def test_numpy_integers_are_sizes():
    assert OutputSpec(x=((np.int32(4),), torch.float32)) == OutputSpec(x=((4,), torch.float32))


@pytest.mark.parametrize("rows", [7, np.int64(7), np.int32(7), np.uint8(7)])
def test_integers_of_every_make_are_row_counts(rows):
    value = row_count(rows)
    assert value == 7
    assert type(value) is int


@pytest.mark.parametrize(
    "rows", [True, False, np.bool_(True), 7.0, np.float32(7), "7", None, torch.tensor(7), torch.tensor(True), [7]]
)
def test_what_is_no_integer_is_no_row_count(rows):
    with pytest.raises(TypeError, match="rows: expected an integer >= 0, got "):
        row_count(rows)


@pytest.mark.parametrize("rows", [-1, np.int64(-1)])
def test_negative_row_counts_are_value_errors(rows):
    with pytest.raises(ValueError, match="rows: expected an integer >= 0, got -1"):
        row_count(rows)

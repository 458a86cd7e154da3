"""The pattern that BUFPOOL_DEBUG and assert_write_only share, and the names of places and bits."""

from __future__ import annotations

import math

import pytest
import torch

from bufpool import debug, poison, testing
from bufpool.poison import GUARD_ROWS, bits_text, column_text, poison_bytes


def values(dtype):
    """The poison of each byte value as a number of that dtype."""
    return [
        torch.tensor([byte] * dtype.itemsize, dtype=torch.uint8).view(dtype).double().item() for byte in poison_bytes(dtype)
    ]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_as_floats_it_is_nan_large_of_both_signs_and_zero(dtype):
    nan, large, negative, zero = values(dtype)
    assert math.isnan(nan)
    assert large > 1e4
    assert negative < -1e4
    assert zero == 0


@pytest.mark.parametrize("dtype", [torch.int8, torch.int32, torch.int64])
def test_as_integers_no_two_are_alike_and_the_first_is_minus_one(dtype):
    assert values(dtype)[0] == -1
    assert len(set(values(dtype))) == 4


def test_a_bool_is_a_bool():
    assert poison_bytes(torch.bool) == (0, 1)


def test_there_is_one_home():
    assert debug.GUARD_ROWS == testing.GUARD_ROWS == GUARD_ROWS == 128
    assert debug.poison_bytes is testing.write_contract.poison_bytes is poison.poison_bytes


@pytest.mark.parametrize(
    ("flat", "row_shape", "text"),
    [(0, (), "0"), (5, (8,), "5"), (7, (2, 5), "(1, 2)"), (0, (3, 2), "(0, 0)"), (23, (2, 3, 4), "(1, 2, 3)")],
)
def test_a_place_has_a_number_for_each_dimension(flat, row_shape, text):
    assert column_text(flat, row_shape) == text


def test_bits_have_all_their_digits_and_no_sign():
    assert bits_text(0, 4) == "0x00000000"
    assert bits_text(-1, 2) == "0xffff"
    assert bits_text(0x7A, 1) == "0x7a"
    assert bits_text(-(2**63), 8) == "0x8000000000000000"

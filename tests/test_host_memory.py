"""Ranges and records of the host."""

from __future__ import annotations

import ctypes
import sys

import pytest

from bufpool import host_memory
from bufpool.errors import DriverError

pytestmark = pytest.mark.skipif(not host_memory.is_available(), reason="lazy host ranges need 64-bit Linux")

GIB = 2**30


def resident_bytes():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * host_memory.PAGE_BYTES


def test_a_range_far_larger_than_this_machine_is_reserved_and_costs_nothing():
    before = resident_bytes()
    nbytes = 4 * host_memory.physical_bytes()
    address = host_memory.reserve(nbytes)
    assert address % host_memory.PAGE_BYTES == 0
    last = ctypes.c_uint8.from_address(address + nbytes - 1)
    last.value = 7
    assert last.value == 7
    assert resident_bytes() - before < 2**24
    host_memory.release(address, nbytes)


def test_pages_given_back_read_as_zero_and_stay_usable():
    address = host_memory.reserve(2**24)
    ctypes.memset(address, 5, 2**24)
    used = resident_bytes()
    host_memory.give_back(address + 2**20, 2**24 - 2**20)
    assert resident_bytes() < used - 2**23
    assert ctypes.c_uint8.from_address(address + 2**20 - 1).value == 5
    assert ctypes.c_uint8.from_address(address + 2**20).value == 0
    ctypes.memset(address, 6, 2**24)
    assert ctypes.c_uint8.from_address(address + 2**24 - 1).value == 6
    host_memory.release(address, 2**24)


def test_a_range_beyond_the_address_space_is_none():
    assert host_memory.reserve(2**62) is None


def test_calls_the_system_refuses_are_driver_errors_that_say_why():
    with pytest.raises(DriverError, match="mmap of 0 bytes: Invalid argument"):
        host_memory.reserve(0)
    with pytest.raises(DriverError, match="munmap of 4096 bytes: Invalid argument"):
        host_memory.release(1, 4096)
    with pytest.raises(DriverError, match="madvise of 4096 bytes: Invalid argument"):
        host_memory.give_back(1, 4096)


def test_a_record_is_zeroed():
    address = host_memory.allocate(4096)
    assert ctypes.string_at(address, 4096) == bytes(4096)
    host_memory.free(address)


@pytest.mark.skipif(host_memory.post_address() is None, reason="sem_post counts in place only with glibc")
def test_the_post_adds_one_to_the_count_and_touches_nothing_else():
    address = host_memory.allocate(64)
    post = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p)(host_memory.post_address())
    for count in (1, 2, 3):
        assert post(address) == 0
        assert ctypes.string_at(address, 64) == count.to_bytes(4, sys.byteorder) + bytes(60)
    host_memory.free(address)

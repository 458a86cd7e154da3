"""Storages of spilled results, found by address while they live."""

from __future__ import annotations

import pytest
import torch

from bufpool.spills import Spills


def note(spills, *tensors):
    spills.note(tensor.untyped_storage() for tensor in tensors)


def test_a_result_is_found_at_each_of_its_bytes_and_beside_them_is_none():
    spills, tensor = Spills(), torch.arange(100, dtype=torch.uint8)
    note(spills, tensor)
    start = tensor.data_ptr()
    for offset in (0, 57, 99):
        assert torch.equal(spills.at(start + offset), tensor)
    assert spills.at(start - 1) is None
    assert spills.at(start + 100) is None


def test_it_is_found_by_its_own_storage_however_it_came_back():
    spills, tensor = Spills(), torch.arange(40, dtype=torch.int32)
    note(spills, tensor)
    storage = tensor.untyped_storage()._cdata
    back = torch.from_dlpack(torch.utils.dlpack.to_dlpack(tensor[7:]))
    del tensor
    assert back.untyped_storage()._cdata != storage  # what torch's allocator knows nothing of
    found = spills.at(back.data_ptr())
    assert found.untyped_storage()._cdata == storage
    assert found.nbytes == 160


def test_nothing_is_kept_alive_and_what_has_ended_is_not_found():
    spills, tensor = Spills(), torch.zeros(8)
    note(spills, tensor)
    address = tensor.data_ptr()
    assert spills.at(address) is not None
    del tensor
    assert spills.at(address) is None


def test_the_newest_result_at_an_address_is_found():
    spills, memory = Spills(), torch.zeros(64, dtype=torch.uint8)
    older, newer = (torch.from_dlpack(torch.utils.dlpack.to_dlpack(memory)) for _ in range(2))
    note(spills, older, newer)
    assert spills.at(memory.data_ptr()).untyped_storage()._cdata == newer.untyped_storage()._cdata
    del newer
    assert spills.at(memory.data_ptr()).untyped_storage()._cdata == older.untyped_storage()._cdata


def test_entries_stay_few_while_results_come_and_go_and_living_ones_stay():
    spills, held = Spills(), [torch.full((4,), float(number)) for number in range(100)]
    note(spills, *held)
    for _ in range(5000):
        note(spills, torch.zeros(4))
    assert len(spills._entries) <= 2 * (len(held) + Spills.LEAST_ENTRIES)
    assert all(spills.at(tensor.data_ptr()).nbytes == tensor.nbytes for tensor in held)


def test_a_storage_that_moved_is_found_where_it_is_now():
    spills, tensor = Spills(), torch.zeros(100, dtype=torch.uint8)
    note(spills, tensor)
    former = tensor.data_ptr()
    tensor.untyped_storage().resize_(0)
    assert spills.at(former) is None
    tensor.untyped_storage().resize_(2**20)
    assert spills.at(tensor.data_ptr() + 2**19).nbytes == 2**20


@pytest.mark.parametrize("most", [5, 100])
def test_results_noted_while_entries_are_forgotten_are_not_lost(most):
    spills, late = Spills(), []

    class Weak:
        """An entry whose question runs somebody's finalizer, which spills."""

        cdata = 0

        def expired(self):
            while len(late) < most:
                late.append(torch.zeros(4))
                note(spills, late[-1])
            return True

    spills._entries += [Weak()] * Spills.LEAST_ENTRIES
    note(spills, torch.zeros(4))
    assert len(late) == most
    assert all(spills.at(tensor.data_ptr()) is not None for tensor in late)

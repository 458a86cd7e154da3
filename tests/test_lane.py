"""Lanes: which of the idle slots serves."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from bufpool import OutputSpec
from bufpool.lane import Lane, LaneKey
from bufpool.slot import Slot

CPU = torch.device("cpu")


def make_key(spec, **changes):
    """The key of the host's lane, with changes."""
    fields = {field.name: None for field in dataclasses.fields(LaneKey)}
    return LaneKey(**{**fields, "device": CPU, "stream": 0, "thread": 0, "spec": spec, **changes})


def anything(slot):
    return True


@pytest.fixture
def make_lane(spec):
    """Makes lanes whose slots have room for the given rows; page-sized steps: 4 rows of ``out``."""
    lanes = []

    def make(*capacities):
        lane = Lane(make_key(spec))
        for rows in capacities:
            slot = Slot(spec, CPU, "host", rows)
            slot.grow(rows)
            lane.slots.append(slot)
        lanes.append(lane)
        return lane

    yield make
    for lane in lanes:
        for slot in lane.slots:
            if not slot.is_live():  # a failed test still holds its results
                slot.release()


def test_keys_of_different_orders_differ(spec):
    other = OutputSpec(lse=((8,), torch.float32))
    keys = [
        make_key(spec),
        make_key(spec, device=torch.device("cuda", 0)),
        make_key(spec, stream=7),
        make_key(spec, thread=1),
        make_key(spec, capture=3),
        make_key(other),
    ]
    assert len({*keys, make_key(spec)}) == 6


def test_the_current_slot_serves_while_nobody_holds_it(make_lane):
    lane = make_lane(100, 100)
    lane.current = lane.slots[1]
    assert lane.idle_slot(50, anything) is lane.slots[1]


def test_another_slot_serves_while_the_current_one_is_held(make_lane):
    lane = make_lane(100, 100)
    lane.current = lane.slots[0]
    held = lane.slots[0].handout.take(10)
    assert lane.idle_slot(50, anything) is lane.slots[1]
    del held
    assert lane.idle_slot(50, anything) is lane.slots[0]


def test_the_smallest_slot_with_room_serves(make_lane):
    lane = make_lane(400, 100, 200)
    assert lane.idle_slot(150, anything) is lane.slots[2]
    assert lane.idle_slot(50, anything) is lane.slots[1]
    assert lane.idle_slot(300, anything) is lane.slots[0]


def test_without_room_anywhere_the_largest_slot_grows(make_lane):
    lane = make_lane(100, 400, 200)
    assert lane.idle_slot(1000, anything) is lane.slots[1]


def test_no_slot_serves_while_all_are_held(make_lane):
    lane = make_lane(100, 100)
    held = [slot.handout.take(10) for slot in lane.slots]
    assert lane.idle_slot(10, anything) is None
    assert lane.take(10) is None
    del held[0]
    assert lane.idle_slot(10, anything) is lane.slots[0]


def test_a_slot_whose_readers_cannot_be_waited_for_does_not_serve(make_lane):
    lane = make_lane(100, 200)
    lane.current = lane.slots[0]
    lane.slots[0].readers = ["a stream"]
    assert lane.idle_slot(10, lambda slot: False) is lane.slots[1]
    assert lane.idle_slot(10, anything) is lane.slots[0]
    lane.slots[1].readers = ["a stream"]
    assert lane.idle_slot(10, lambda slot: False) is None


def test_take_counts_a_rotation_only_when_the_slot_changes(make_lane):
    lane = make_lane(100, 100)
    first = lane.take(10)
    del first
    first = lane.take(10)
    start = lane.rotations
    second = lane.take(10)
    assert lane.rotations == start + 1
    assert lane.acquires == 3
    assert {first.lse.data_ptr(), second.lse.data_ptr()} == {slot.addresses[1] for slot in lane.slots}


def test_take_maps_nothing(make_lane):
    lane = make_lane(100)
    assert lane.take(1000) is None
    assert lane.acquires == 0


def test_take_leaves_a_slot_with_a_reader_alone(make_lane):
    lane = make_lane(100, 100)
    lane.slots[0].readers = ["a stream"]
    assert lane.take(10).lse.data_ptr() == lane.slots[1].addresses[1]


def test_a_lane_holds_the_bytes_of_its_slots(make_lane, spec):
    lane = make_lane(128, 256)
    assert lane.mapped_bytes == (128 + 256) * spec.row_nbytes

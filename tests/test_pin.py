"""Pins: a graph that is gone is seen at once, and a graph that cannot tell is kept."""

from __future__ import annotations

import ctypes
import threading

import pytest

from bufpool import host_memory, pin
from bufpool.errors import DriverError
from bufpool.pin import Pin

POST = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p)
needs_post = pytest.mark.skipif(host_memory.post_address() is None, reason="needs sem_post of glibc")


@pytest.fixture
def graphs(monkeypatch):
    """What each graph retains, and the records that are allocated and not freed."""
    retained, records = {}, set()

    def allocate(nbytes):
        address = real_allocate(nbytes)
        records.add(address)
        return address

    def free(address):
        records.remove(address)
        real_free(address)

    real_allocate, real_free = host_memory.allocate, host_memory.free
    monkeypatch.setattr(host_memory, "allocate", allocate)
    monkeypatch.setattr(host_memory, "free", free)
    monkeypatch.setattr(pin, "retain_in_graph", lambda graph, record, post: retained.update({graph: (record, post)}))
    yield retained, records
    for address in records:
        real_free(address)


def end(retained, graph):
    """The driver's part: call the function that the graph retains, from a thread of its own."""
    record, post = retained.pop(graph)
    thread = threading.Thread(target=POST(post), args=(record,))
    thread.start()
    thread.join()


@needs_post
def test_the_end_of_a_graph_is_seen_and_its_record_goes(graphs):
    retained, records = graphs
    first, second = Pin(7, "graph 7"), Pin(8, "graph 8")
    assert (first.capture_id, second.capture_id) == (7, 8)
    assert first.is_tracked
    assert second.is_tracked
    assert len(records) == 2
    end(retained, "graph 7")
    assert first.has_ended()
    assert not second.has_ended()
    first.release()
    assert len(records) == 1
    first.release()  # a second time does nothing
    assert len(records) == 1
    end(retained, "graph 8")
    assert second.has_ended()
    second.release()
    assert records == set()


@needs_post
def test_a_record_begins_with_nothing_posted_and_room_for_a_semaphore(graphs):
    retained, _ = graphs
    mine = Pin(1, "graph")
    record, _ = retained["graph"]
    assert ctypes.string_at(record, 32) == bytes(32)
    assert not mine.has_ended()


@needs_post
def test_a_graph_that_refuses_is_pinned_for_good_and_its_record_stays(graphs, monkeypatch):
    """The driver may have kept the record all the same, and post into it later."""
    _, records = graphs

    def refuse(graph, record, post):
        raise DriverError("cuGraphRetainUserObject: refused")

    monkeypatch.setattr(pin, "retain_in_graph", refuse)
    mine = Pin(1, "graph")
    assert not mine.is_tracked
    assert not mine.has_ended()
    mine.release()
    assert len(records) == 1


def test_without_a_function_to_post_with_nothing_is_allocated(graphs, monkeypatch):
    retained, records = graphs
    monkeypatch.setattr(host_memory, "post_address", lambda: None)
    mine = Pin(1, "graph")
    assert (mine.is_tracked, mine.has_ended()) == (False, False)
    mine.release()
    assert retained == {}
    assert records == set()

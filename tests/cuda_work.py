"""Work on a CUDA device as several test files queue it: writes, captures, a card that is full, waits for the driver."""

from __future__ import annotations

import time

import torch

MIB = 2**20
GIB = 2**30
SLOW_CYCLES = 100_000_000  # of torch.cuda._sleep: about 50 ms on an H200


def write(outputs, value):
    """Write every element, without a temporary tensor. ``value`` is a number or a device tensor of one element."""
    for tensor in outputs:
        if isinstance(value, torch.Tensor):
            tensor.copy_(value)
        else:
            tensor.fill_(value)


def holds(outputs, value):
    return all(bool((tensor == value).all()) for tensor in outputs)


def pointers(outputs):
    return tuple(tensor.data_ptr() for tensor in outputs)


def capture(body, graph=None, **options):
    """A graph of ``body`` and what ``body`` returned."""
    graph = graph or torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, **options):
        result = body()
    return graph, result


def captured_write(pool, spec, rows, q, value, graph=None, **options):
    def body():
        outputs = pool.acquire(spec, rows, q)
        write(outputs, value)
        return outputs

    return capture(body, graph, **options)


def until(condition, seconds=10.0):
    """Whether ``condition`` comes true in time. The driver reports the end of a graph from a thread of its own."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if condition():
            return True
        time.sleep(0.01)
    return bool(condition())


def private_segments(graph):
    """Memory segments that torch's allocator holds for the private pool of a graph."""
    return [part for part in torch.cuda.memory_snapshot() if tuple(part["segment_pool_id"]) == tuple(graph.pool())]


def fill_card(free_bytes):
    """A tensor that leaves about ``free_bytes`` on the device."""
    torch.cuda.empty_cache()
    free, _ = torch.cuda.mem_get_info()
    assert free > free_bytes, f"needs {free_bytes} free bytes, the device has {free}"
    return torch.empty(free - free_bytes, dtype=torch.uint8, device="cuda")

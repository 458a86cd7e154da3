"""The stand-in for vLLM's workspace manager: views, addresses, growth after lock, separate places."""

from __future__ import annotations

import contextlib
import inspect
import logging
import re

import pytest
import torch

from bufpool import BufpoolError, CaptureError, OutputMismatchError, PoolLimitError
from bufpool.adapters.vllm import WorkspaceManager, use_workspace_lane

E4M3 = torch.float8_e4m3fn
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


@pytest.fixture
def manager(pool):
    return WorkspaceManager(torch.device("cpu"), pool=pool)


def address(views):
    return views[0].data_ptr()


def test_signatures_are_those_of_the_original():
    parameters = list(inspect.signature(WorkspaceManager).parameters)
    assert parameters[:4] == ["device", "num_ubatches", "num_lanes", "alloc_context"]
    persistent = inspect.signature(WorkspaceManager.get_persistent).parameters
    assert list(persistent) == ["self", "key", "shape", "dtype", "zero_init"]
    assert persistent["zero_init"].kind is inspect.Parameter.KEYWORD_ONLY


# --- views ---


@pytest.mark.parametrize("device", DEVICES)
def test_views(pool, device):
    manager = WorkspaceManager(device, pool=pool)
    asked = [((3, 5), torch.float32), ((7,), torch.bool), ((), torch.int64), ((2, 0), E4M3), ((257,), torch.uint8)]
    views = manager.get_simultaneous(*asked, ((2, 4, 8), torch.bfloat16), ((5,), torch.complex128))
    assert isinstance(views, list)
    base = address(views)
    for (shape, dtype), view in zip(asked, views, strict=False):
        assert (view.shape, view.dtype, view.device.type) == (shape, dtype, device)
        assert view.is_contiguous()
    offsets = [view.data_ptr() - base for view in views]
    assert offsets[:3] == [0, 256, 512]
    assert offsets[4:] == [768, 1280, 1536]
    assert base % 256 == 0
    for number, view in enumerate(views):
        view.view(-1).view(torch.uint8).fill_(number)
    for number, view in enumerate(views):
        assert bool((view.view(-1).view(torch.uint8) == number).all())


def test_nothing_asked(manager, pool):
    assert manager.get_simultaneous() == []
    (empty,) = manager.get_simultaneous(((0, 4), torch.float32))
    assert empty.shape == (0, 4)
    assert pool.stats().mapped_bytes == 0


def test_shapes_may_be_lists_and_sizes(manager):
    (view,) = manager.get_simultaneous((torch.zeros(2, 3).shape, torch.float32))
    assert view.shape == (2, 3)


# --- addresses ---


def test_the_address_stays_when_the_workspace_grows(manager, pool):
    addresses = set()
    for rows in (1, 10, 1000, 50, 100_000, 3):
        views = manager.get_simultaneous(((rows, 64), torch.float32), ((rows,), torch.float32))
        addresses.add(address(views))
        views[0].fill_(1)
        del views
    assert len(addresses) == 1
    stats = pool.stats()
    assert stats.slots == 1
    assert stats.mapped_bytes == -(-(100_000 * 256 + 400_128) // 4096) * 4096


def test_growth_after_lock_is_legal_and_stays(manager, caplog):
    before = address(manager.get_simultaneous(((1000,), torch.float32)))
    manager.lock()
    assert manager.is_locked()
    with caplog.at_level(logging.WARNING, "bufpool"):
        assert address(manager.get_simultaneous(((1000,), torch.float32))) == before
        assert not caplog.records
        assert address(manager.get_simultaneous(((1_000_000,), torch.float32))) == before
        assert address(manager.get_simultaneous(((900_000,), torch.float32))) == before
    assert [record.getMessage() for record in caplog.records] == [
        "cpu: workspace of ubatch 0, lane 0 grew from 4096 to 4000000 bytes after lock(); its address stays, and the"
        " memory was not there when the engine measured"
    ]
    manager.unlock()
    assert not manager.is_locked()


def test_views_of_an_earlier_call_survive_while_held(manager, pool):
    first = manager.get_simultaneous(((100,), torch.float32), ((100,), torch.float32))
    first[1].fill_(7)
    part = first[1][50:]
    before = address(first)
    del first
    second = manager.get_simultaneous(((9000,), torch.float32))
    second[0].fill_(8)
    assert address(second) != before
    assert bool((part == 7).all())
    del part, second
    assert manager.get_simultaneous(((9000,), torch.float32))[0].data_ptr() != 0
    assert pool.stats().slots == 2


def test_a_failed_growth_changes_nothing(make_pool, caplog):
    manager = WorkspaceManager("cpu", pool=make_pool(max_bytes=2**20))
    before = address(manager.get_simultaneous(((1000,), torch.float32)))
    manager.lock()
    with caplog.at_level(logging.WARNING, "bufpool"), pytest.raises(PoolLimitError):
        manager.get_simultaneous(((2**20,), torch.float32))
    assert not caplog.records
    assert address(manager.get_simultaneous(((2000,), torch.float32))) == before


# --- places ---


def test_ubatches_and_lanes_never_share(pool):
    ubatch = 0
    manager = WorkspaceManager("cpu", 2, 2, pool=pool, current_ubatch=lambda: ubatch)
    seen = {}
    for _ in range(2):
        for ubatch in (0, 1):
            for lane in (0, 1):
                with use_workspace_lane(lane):
                    place = address(manager.get_simultaneous(((100,), torch.float32)))
                    assert seen.setdefault((ubatch, lane), place) == place
    assert len(set(seen.values())) == 4, "a dropped workspace went to another place"


def test_lanes_nest_and_end():
    manager = WorkspaceManager("cpu", num_lanes=2)
    with use_workspace_lane(1):
        inner = address(manager.get_simultaneous(((8,), torch.float32)))
        with use_workspace_lane(0):
            outer = address(manager.get_simultaneous(((8,), torch.float32)))
        assert address(manager.get_simultaneous(((8,), torch.float32))) == inner
    assert address(manager.get_simultaneous(((8,), torch.float32))) == outer != inner


def test_places_out_of_range(pool):
    manager = WorkspaceManager("cpu", pool=pool, current_ubatch=lambda: 1)
    with pytest.raises(BufpoolError, match="expected a ubatch below 1 and a lane below 1, got ubatch 1, lane 0"):
        manager.get_simultaneous(((8,), torch.float32))
    manager = WorkspaceManager("cpu", pool=pool)
    with use_workspace_lane(1), pytest.raises(BufpoolError, match="got ubatch 0, lane 1"):
        manager.get_persistent("key", (8,), torch.float32)
    with pytest.raises(ValueError, match="lane: expected an integer >= 0, got -1"), use_workspace_lane(-1):
        pass
    for wrong in ({"num_lanes": 0}, {"num_ubatches": 0}):
        with pytest.raises(ValueError, match="expected an integer >= 1, got 0"):
            WorkspaceManager("cpu", **wrong)


def test_reserve_all_maps_every_place_ahead(pool):
    manager = WorkspaceManager("cpu", 2, 2, pool=pool)
    manager.reserve_all(((4096,), torch.uint8), ((4096,), torch.uint8))
    mapped = pool.stats().mapped_bytes
    assert mapped == 4 * 8192
    manager.lock()
    for lane in (0, 1):
        with use_workspace_lane(lane):
            manager.get_simultaneous(((8192,), torch.uint8))
    assert pool.stats().mapped_bytes == mapped


# --- persistent buffers ---


def test_persistent_is_the_same_tensor(manager, pool):
    first = manager.get_persistent("counts", (4, 8), torch.int32, zero_init=True)
    assert bool((first == 0).all())
    first.fill_(5)
    manager.get_simultaneous(((1000,), torch.float32))[0].fill_(1)
    second = manager.get_persistent("counts", (4, 8), torch.int32, zero_init=True)
    assert second is first
    assert bool((second == 5).all())
    assert manager.get_persistent("other", (4, 8), torch.int32) is not first
    pool.sleep()  # holds no memory of the pool
    pool.wake()


def test_persistent_does_not_grow(manager):
    manager.get_persistent("counts", (4,), torch.int32)
    for shape, dtype in (((5,), torch.int32), ((4,), torch.int64)):
        with pytest.raises(OutputMismatchError, match=re.escape("counts: expected torch.int32 [4] as at the first call")):
            manager.get_persistent("counts", shape, dtype)


def test_persistent_is_made_in_the_alloc_context_and_per_place(pool):
    entered = []

    @contextlib.contextmanager
    def context():
        entered.append(True)
        yield

    manager = WorkspaceManager("cpu", None, 2, context, pool=pool)
    first = manager.get_persistent("key", (2,), torch.float32)
    manager.get_persistent("key", (2,), torch.float32)
    with use_workspace_lane(1):
        assert manager.get_persistent("key", (2,), torch.float32) is not first
    manager.get_simultaneous(((10,), torch.float32))
    assert len(entered) == 2


def test_the_default_pool_serves(pool, monkeypatch):
    monkeypatch.setattr("bufpool.pool._default", pool)
    WorkspaceManager("cpu").get_simultaneous(((10,), torch.float32))
    assert pool.stats().acquires == 1


# --- on CUDA ---


@pytest.mark.gpu
def test_graphs_keep_their_workspace_when_it_grows_after_lock(pool):
    manager = WorkspaceManager("cuda", pool=pool)
    x = torch.arange(4096.0, device="cuda")

    def forward(rows):
        a, b = manager.get_simultaneous(((rows,), torch.float32), ((rows,), torch.float32))
        a.copy_(x[:rows])
        torch.mul(a, 2, out=b)
        return b + 1

    forward(64)
    torch.cuda.synchronize()
    graphs, results = {}, {}
    for rows in (64, 1024, 256):
        graphs[rows] = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graphs[rows]):
            results[rows] = forward(rows)
    assert sum(lane.slots for lane in pool.stats().lanes if lane.shared) == 1
    manager.lock()
    before = address(manager.get_simultaneous(((64,), torch.float32)))
    assert address(manager.get_simultaneous(((2**22,), torch.float32))) == before
    filler = torch.full((2**22,), 9.0, device="cuda")
    for rows in (256, 64, 1024, 64):
        graphs[rows].replay()
        torch.cuda.synchronize()
        assert torch.equal(results[rows], x[:rows] * 2 + 1)
    del filler


@pytest.mark.gpu
def test_persistent_is_refused_inside_a_capture(pool):
    manager = WorkspaceManager("cuda", pool=pool)
    known = manager.get_persistent("known", (4,), torch.float32, zero_init=True)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        assert manager.get_persistent("known", (4,), torch.float32) is known
        with pytest.raises(CaptureError, match="new: expected its first call before the capture"):
            manager.get_persistent("new", (4,), torch.float32)
        known.add_(1)
    graph.replay()
    torch.cuda.synchronize()
    assert known.tolist() == [1, 1, 1, 1]


@pytest.mark.gpu
def test_sleep_and_wake_keep_the_graphs_workspace(pool):
    manager = WorkspaceManager("cuda", pool=pool)
    x = torch.ones(1000, device="cuda")
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        (scratch,) = manager.get_simultaneous(((1000,), torch.float32))
        scratch.copy_(x)
        result = scratch + 1
        del scratch
    pool.sleep()
    pool.wake()
    graph.replay()
    torch.cuda.synchronize()
    assert bool((result == 2).all())


def test_persistent_buffers_live_where_the_manager_does(pool, fake_cuda, monkeypatch):
    real, made = torch.empty, []

    def empty(*size, device=None, **options):
        home = torch.device("cuda", fake_cuda.current) if device == torch.device("cuda") else device
        if home is None or home.type != "cuda":
            return real(*size, device=device, **options)
        made.append(home.index)
        return fake_cuda.like(home.index)

    manager = WorkspaceManager("cuda", pool=pool)
    monkeypatch.setattr(torch, "empty", empty)
    monkeypatch.setattr(manager, "_is_capturing", lambda: False)
    manager._the_like()  # as the first call does
    fake_cuda.current = 1
    manager.get_persistent("key", (1,), torch.float32)
    assert made == [0, 0]

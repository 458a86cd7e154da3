"""Captures on CUDA devices: which slots they get, who shares them, and when a graph lets go of them."""

from __future__ import annotations

import contextlib
import gc
import inspect
import itertools
import threading
import time

import pytest
import torch
from cuda_work import (
    GIB,
    MIB,
    SLOW_CYCLES,
    capture,
    captured_write,
    fill_card,
    holds,
    pointers,
    private_segments,
    until,
    write,
)

from bufpool import BufpoolError, DriverError, OutputPool, OutputSpec, PoolLimitError

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("nothing_left_queued")]

SIZES = tuple(2**power for power in range(11))  # 1 to 1024 rows


@pytest.fixture
def q():
    return torch.zeros(1, device="cuda")


@pytest.fixture
def source():
    """Rows of noise that a captured computation reads."""
    return torch.randn(SIZES[-1], 8, 64, device="cuda", generator=torch.Generator("cuda").manual_seed(3))


def compute(outputs, source, value):
    """Something whose every element differs and whose bits are known: one rounding, and a maximum."""
    rows = outputs.out.shape[0]
    torch.mul(source[:rows], value, out=outputs.out)
    torch.amax(source[:rows], -1, out=outputs.lse)


def computed(rows, source, number):
    """What ``compute`` gives, on memory of torch."""
    return (source[:rows] * float(number)).to(torch.bfloat16), source[:rows].amax(-1)


def equal(outputs, expected):
    return all(torch.equal(mine, other) for mine, other in zip(outputs, expected, strict=True))


def pinned(pool):
    return pool.stats().pinned_slots


def stays_pinned(pool, slots):
    """Whether as many slots are still pinned after the time in which the driver would have reported an end."""
    time.sleep(0.2)
    return pinned(pool) == slots


# Captures without torch's CUDAGraph, for what it does not offer: several at once, clones, executables alone


@pytest.fixture
def cu():
    return pytest.importorskip("cuda.bindings.driver")


def ok(result):
    """The value of a driver call that must succeed."""
    assert int(result[0]) == 0, result[0]
    return result[1] if len(result) == 2 else result[1:]


def begin(cu, stream):
    mode = cu.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED
    ok(cu.cuStreamBeginCapture(cu.CUstream(stream.cuda_stream), mode))


def end(cu, stream):
    return ok(cu.cuStreamEndCapture(cu.CUstream(stream.cuda_stream)))


def launch(cu, executable, stream):
    ok(cu.cuGraphLaunch(executable, cu.CUstream(stream.cuda_stream)))
    stream.synchronize()


@pytest.fixture
def raw_graph(cu, pool, spec, q, value):
    """A graph of the driver that writes ``value`` into 64 rows, its stream, and the results."""
    stream = torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        begin(cu, stream)
        outputs = pool.acquire(spec, 64, q)
        write(outputs, value)
        graph = end(cu, stream)
    return graph, stream, outputs


# Every batch size a graph


def capture_sizes(pool, spec, q, source, value, sizes, is_shared):
    """A graph and its results for each number of rows."""
    made = {}
    for rows in sizes:

        def body(rows=rows):
            outputs = pool.acquire(spec, rows, q)
            compute(outputs, source, value)
            return outputs

        with pool.shared_capture("sizes") if is_shared else contextlib.nullcontext():
            graph, outputs = capture(body)
        made[rows] = graph, pointers(outputs), None if is_shared else outputs
        del outputs  # a shared set has one slot only if nobody holds the results of the capture before
    return made


def results_at(spec, rows, base, pool):
    """The rows that a graph wrote, read at the addresses it was captured with."""
    slot = next(slot for slot in pool._slots if slot.addresses == base)
    views = [
        torch.as_tensor(_Bytes(address, rows * row_bytes), device="cuda").view(dtype).view(rows, *shape)
        for address, row_bytes, (_, shape, dtype) in zip(slot.addresses, spec.row_bytes, spec, strict=True)
    ]
    return tuple(views)


class _Bytes:
    """Memory at an address, for torch to look at."""

    def __init__(self, address, nbytes):
        self.__cuda_array_interface__ = {
            "shape": (nbytes,),
            "typestr": "|u1",
            "data": (address, False),
            "version": 2,
            "strides": None,
        }


@pytest.mark.parametrize("is_shared", [True, False], ids=["shared", "private"])
@pytest.mark.parametrize("order", ["ascending", "descending"])
def test_graphs_of_all_sizes_replay_in_every_order(pool, spec, q, source, value, order, is_shared):
    sizes = SIZES if order == "ascending" else SIZES[::-1]
    made = capture_sizes(pool, spec, q, source, value, sizes, is_shared)
    lanes = [lane for lane in pool.stats().lanes if lane.capture is not None]
    assert sum(lane.slots for lane in lanes) == (1 if is_shared else len(sizes))
    assert len({base for _, base, _ in made.values()}) == (1 if is_shared else len(sizes))

    last = {}
    number = 0
    orders = [*itertools.permutations(SIZES, 2), *itertools.permutations((1, 64, 512, 1024))]
    for sequence in orders:
        for rows in sequence:
            number = number % 200 + 1
            value.fill_(number)
            graph, base, outputs = made[rows]
            graph.replay()
            last[rows] = number
            expected = computed(rows, source, number)
            assert equal(outputs or results_at(spec, rows, base, pool), expected), (sequence, rows)
    if not is_shared:
        for rows, number in last.items():
            assert equal(made[rows][2], computed(rows, source, number)), rows


def test_a_shared_set_is_as_large_as_its_largest_capture(pool, spec, q, value):
    made = []
    with pool.shared_capture("sizes"):
        for rows in (1, 4096, 16, 1024):
            graph, outputs = captured_write(pool, spec, rows, q, value)
            made.append(graph)
            del outputs
    (lane,) = pool.stats().lanes
    assert lane.shared == "sizes"
    assert (lane.slots, lane.pinned_slots, lane.acquires) == (1, 1, 4)
    assert lane.mapped_bytes == 4 * MIB + 2 * MIB  # 4096 rows of 1024 and of 32 bytes


def test_eager_growth_after_shared_captures_leaves_them_right(pool, spec, q, source, value):
    made = capture_sizes(pool, spec, q, source, value, (64, 1024), is_shared=True)
    big = pool.acquire(spec, 16384, q)
    write(big, 9)
    filler = [torch.full((4 * MIB,), 11, dtype=torch.uint8, device="cuda") for _ in range(8)]
    for number, (rows, (graph, base, _)) in enumerate(made.items(), 2):
        value.fill_(number)
        graph.replay()
        assert equal(results_at(spec, rows, base, pool), computed(rows, source, number))
    assert holds(big, 9)
    assert all(bool((part == 11).all()) for part in filler)


def test_whole_calls_of_the_operator_are_captured_at_every_size_and_replayed_bit_for_bit(pool):
    from bufpool.ops import sparse_mla_prefill

    generator = torch.Generator().manual_seed(1)
    s_q, s_kv, h_q, topk = 64, 256, 64, 64
    q = torch.randn(s_q, h_q, 576, generator=generator).to("cuda", torch.float8_e4m3fn)
    kv = torch.randn(s_kv, 576, generator=generator).to("cuda", torch.float8_e4m3fn)
    indices = torch.randint(-1, s_kv, (s_q, topk), generator=generator, dtype=torch.int32).cuda()
    lengths = torch.randint(0, topk + 1, (s_q,), generator=generator, dtype=torch.int32).cuda()
    sink = torch.randn(h_q, generator=generator).cuda()
    scale = torch.tensor([0.5], device="cuda")

    def call(rows):
        return sparse_mla_prefill(
            q[:rows], kv, indices[:rows], 0.05, scale, scale, 512, sink, lengths[:rows], allocator=pool
        )

    call(s_q)  # compiles the kernel
    torch.cuda.synchronize()
    graphs = {rows: capture(lambda rows=rows: call(rows)) for rows in (64, 16, 3, 1)}
    for change in range(3):
        q_bytes = q.view(torch.uint8)
        q_bytes.copy_(q_bytes.roll(change, 0))
        indices.copy_(indices.roll(change, 1))
        for rows, (graph, outputs) in graphs.items():
            graph.replay()
            assert equal(outputs, call(rows)), rows


# Shared captures


def test_results_that_are_held_are_not_shared_away(pool, spec, q, value):
    with pool.shared_capture("held"):
        first_graph, first = captured_write(pool, spec, 64, q, value)
        second_graph, second = captured_write(pool, spec, 64, q, value)
    assert not set(pointers(first)) & set(pointers(second))
    value.fill_(1)
    first_graph.replay()
    value.fill_(2)
    second_graph.replay()
    assert holds(first, 1)
    assert holds(second, 2)
    (lane,) = pool.stats().lanes
    assert (lane.slots, lane.rotations) == (2, 1)


def test_the_same_name_continues_the_set_and_another_name_does_not(pool, spec, q, value):
    bases = []
    graphs = []
    for name in ("a", "b", "a"):
        with pool.shared_capture(name):
            graph, outputs = captured_write(pool, spec, 64, q, value)
        bases.append(pointers(outputs))
        graphs.append(graph)
        del outputs
    graph, outputs = captured_write(pool, spec, 64, q, value)  # no name: private
    assert bases[0] == bases[2]
    assert len({*bases, pointers(outputs)}) == 3
    assert [lane.shared for lane in pool.stats().lanes] == ["a", "b", None]


def test_a_name_means_another_set_in_another_pool(make_pool, spec, q, value):
    pools = [make_pool(), make_pool()]
    made = []
    for pool in pools:
        with pool.shared_capture("same"):
            made.append(captured_write(pool, spec, 64, q, value))
    assert not set(pointers(made[0][1])) & set(pointers(made[1][1]))


def test_specs_of_one_set_have_slots_of_their_own(pool, spec, q, value):
    other_spec = OutputSpec(out=((8, 64), torch.float16), lse=((8,), torch.float32))
    with pool.shared_capture("specs"):
        graph, outputs = captured_write(pool, spec, 64, q, value)
        del outputs
        other_graph, other = captured_write(pool, other_spec, 64, q, value)
    value.fill_(3)
    other_graph.replay()
    value.fill_(4)
    graph.replay()
    assert holds(other, 3)
    assert pool.stats().slots == 2


def test_a_shared_slot_is_free_when_the_last_of_two_graphs_is_gone(pool, spec, q, value):
    with pool.shared_capture("two"):
        first_graph, outputs = captured_write(pool, spec, 64, q, value)
        base = pointers(outputs)
        del outputs
        second_graph, second = captured_write(pool, spec, 64, q, value)
    assert pointers(second) == base
    assert pinned(pool) == 1

    del first_graph
    gc.collect()
    assert stays_pinned(pool, 1)
    del second
    eager = pool.acquire(spec, 64, q)
    write(eager, 9)
    assert not set(pointers(eager)) & set(base)
    value.fill_(3)
    second_graph.replay()
    assert holds(results_at(spec, 64, base, pool), 3)
    assert holds(eager, 9)

    torch.cuda.synchronize()
    del second_graph
    gc.collect()
    assert until(lambda: pinned(pool) == 0)
    again = pool.acquire(spec, 64, q)  # the eager slot is held: the graphs' one serves
    assert pointers(again) == base


def test_a_name_starts_anew_when_all_its_graphs_are_gone(pool, spec, q, value):
    for number in range(5):
        with pool.shared_capture("again"):
            graph, outputs = captured_write(pool, spec, 64 << number, q, value)
        value.fill_(number)
        graph.replay()
        assert holds(outputs, number)
        torch.cuda.synchronize()
        del graph, outputs
        gc.collect()
        assert until(lambda: pinned(pool) == 0)
        pool.reserve(spec, 1, q)  # an eager call collects what came back
    assert pool.stats().slots <= 2


def test_another_thread_does_not_share(pool, spec, q, value):
    made = []

    def work():
        stream = torch.cuda.Stream()
        made.append(
            capture(lambda: pool.acquire(spec, 64, q).out.copy_(value), stream=stream, capture_error_mode="thread_local")
        )

    with pool.shared_capture("mine"):
        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
        made.append(captured_write(pool, spec, 64, q, value))
    assert sorted(str(lane.shared) for lane in pool.stats().lanes) == ["None", "mine"]


def test_a_shared_capture_that_fails_leaves_the_set_usable(pool, spec, q, value):
    def broken():
        write(pool.acquire(spec, 4096, q), value)
        raise KeyError("of the caller")

    graph = torch.cuda.CUDAGraph()
    with pool.shared_capture("set"):
        first_graph, outputs = captured_write(pool, spec, 64, q, value)
        base = pointers(outputs)
        del outputs
        with pytest.raises(KeyError, match="of the caller"):
            capture(broken, graph)
        del graph
        gc.collect()
        last_graph, outputs = captured_write(pool, spec, 128, q, value)
    assert pointers(outputs) == base
    for number, (graph, rows) in enumerate(((first_graph, 64), (last_graph, 128)), 3):
        value.fill_(number)
        graph.replay()
        assert holds([tensor[:rows] for tensor in outputs], number)


# How long a slot is pinned


def test_a_slot_is_pinned_while_only_the_executable_lives(pool, cu, raw_graph, value):
    graph, stream, outputs = raw_graph
    executable = ok(cu.cuGraphInstantiate(graph, 0))
    ok(cu.cuGraphDestroy(graph))
    assert stays_pinned(pool, 1)
    for number in (1, 2):
        value.fill_(number)
        torch.cuda.synchronize()
        launch(cu, executable, stream)
        assert holds(outputs, number)
    ok(cu.cuGraphExecDestroy(executable))
    assert until(lambda: pinned(pool) == 0)


def test_a_slot_is_pinned_while_only_the_graph_lives(pool, cu, raw_graph):
    graph, stream, _ = raw_graph
    executable = ok(cu.cuGraphInstantiate(graph, 0))
    launch(cu, executable, stream)
    ok(cu.cuGraphExecDestroy(executable))
    assert stays_pinned(pool, 1)
    ok(cu.cuGraphDestroy(graph))
    assert until(lambda: pinned(pool) == 0)


def test_a_slot_is_pinned_while_a_clone_or_a_parent_graph_lives(pool, cu, raw_graph, value):
    graph, stream, outputs = raw_graph
    clone = ok(cu.cuGraphClone(graph))
    ok(cu.cuGraphDestroy(graph))
    assert stays_pinned(pool, 1)
    parent = ok(cu.cuGraphCreate(0))
    ok(cu.cuGraphAddChildGraphNode(parent, None, 0, clone))
    ok(cu.cuGraphDestroy(clone))
    assert stays_pinned(pool, 1)
    executable = ok(cu.cuGraphInstantiate(parent, 0))
    ok(cu.cuGraphDestroy(parent))
    value.fill_(5)
    torch.cuda.synchronize()
    launch(cu, executable, stream)
    assert holds(outputs, 5)
    ok(cu.cuGraphExecDestroy(executable))
    assert until(lambda: pinned(pool) == 0)


@pytest.mark.skipif("keep_graph" not in str(inspect.signature(torch.cuda.CUDAGraph.__new__)), reason="needs keep_graph=")
def test_a_graph_that_torch_keeps_pins_before_and_after_it_is_instantiated(pool, spec, q, value):
    graph, outputs = captured_write(pool, spec, 64, q, value, torch.cuda.CUDAGraph(keep_graph=True))
    assert stays_pinned(pool, 1)
    graph.instantiate()
    value.fill_(2)
    graph.replay()
    assert holds(outputs, 2)
    assert stays_pinned(pool, 1)
    torch.cuda.synchronize()
    del graph
    gc.collect()
    assert until(lambda: pinned(pool) == 0)


def test_reset_ends_the_pins_and_the_object_captures_again(pool, spec, q, value):
    graph, outputs = captured_write(pool, spec, 64, q, value)
    base = pointers(outputs)
    graph.replay()
    torch.cuda.synchronize()
    assert pinned(pool) == 1
    graph.reset()
    assert until(lambda: pinned(pool) == 0)
    del outputs
    eager = pool.acquire(spec, 64, q)
    assert pointers(eager) == base
    write(eager, 9)
    _, outputs = captured_write(pool, spec, 64, q, value, graph)
    value.fill_(3)
    graph.replay()
    assert holds(outputs, 3)
    assert holds(eager, 9)


def test_all_slots_of_a_graph_end_with_it(pool, spec, q, value):
    other_spec = OutputSpec(block=((64,), torch.float32))

    def body():
        held = [pool.acquire(spec, 64, q) for _ in range(3)]
        held.append(pool.acquire(other_spec, 64, q))
        for outputs in held:
            write(outputs, value)

    graph, _ = capture(body)
    assert pinned(pool) == 4
    del graph
    gc.collect()
    assert until(lambda: pinned(pool) == 0)
    pool.acquire(spec, 64, q)
    stats = pool.stats()
    assert (stats.slots, stats.free_slots) == (4, 3)
    pool.trim()
    assert pool.stats().mapped_bytes == 0


@pytest.mark.parametrize("is_same_stream", [True, False], ids=["same stream", "another stream"])
def test_a_graph_that_dies_during_its_replay_is_not_overtaken(make_pool, spec, q, value, is_same_stream):
    kept = torch.zeros(4096, 8, device="cuda")
    stream = torch.cuda.current_stream() if is_same_stream else torch.cuda.Stream()

    def body(pool):
        outputs = pool.acquire(spec, 4096, q)
        write(outputs, value)
        torch.cuda._sleep(SLOW_CYCLES // 4)
        kept.copy_(outputs.lse)

    for number in range(1, 9):
        pool = make_pool()  # without eager slots: the next call wants the graph's
        graph, _ = capture(lambda pool=pool: body(pool))
        value.fill_(number)
        graph.replay()
        del graph
        gc.collect()
        with torch.cuda.stream(stream):
            eager = [pool.acquire(spec, 4096, q) for _ in range(2)]  # at once: the replay is still under way
            for outputs in eager:
                write(outputs, 99)
        torch.cuda.synchronize()
        assert bool((kept == number).all()), number
        assert all(holds(outputs, 99) for outputs in eager)
        del eager, outputs
        assert until(lambda pool=pool: pinned(pool) == 0)


def test_a_capture_that_an_exception_ends_gives_its_slots_back(pool, spec, q, value):
    def body():
        for _ in range(3):
            write(pool.acquire(spec, 64, q), value)
        held = [pool.acquire(spec, 64, q) for _ in range(2)]
        write(held[1], value)
        raise KeyError("of the caller")

    for _ in range(3):
        with pytest.raises(KeyError, match="of the caller"):
            capture(body)
        gc.collect()
        assert until(lambda: pinned(pool) == 0 and pool.stats().live_slots == 0)
        outputs = pool.acquire(spec, 64, q)
        write(outputs, 4)
        assert holds(outputs, 4)
        del outputs
        graph, outputs = captured_write(pool, spec, 64, q, value)
        value.fill_(5)
        graph.replay()
        assert holds(outputs, 5)
        torch.cuda.synchronize()
        del graph, outputs
        gc.collect()
        assert until(lambda: pinned(pool) == 0)
    pool.trim()
    assert pool.stats().mapped_bytes == 0


def test_graphs_made_and_dropped_beside_an_eager_lane_do_not_pile_up_slots(pool, spec, q, value):
    for number in range(20):
        eager = pool.acquire(spec, 64, q)
        graph, outputs = captured_write(pool, spec, 64, q, value)
        value.fill_(number)
        graph.replay()
        write(eager, 99)
        assert holds(outputs, number)
        torch.cuda.synchronize()
        del graph, outputs, eager
        gc.collect()
        assert until(lambda: pinned(pool) == 0)
    assert pool.stats().slots <= 4


def test_a_capture_that_breaks_is_a_clear_error_and_gives_its_slots_back(pool, cu, spec, q, value):
    stream = torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        begin(cu, stream)
        outputs = pool.acquire(spec, 64, q)
        write(outputs, value)
        del outputs
        assert int(cu.cuCtxSynchronize()[0]) != 0  # not allowed in a capture: ends it
        with pytest.raises(DriverError, match="invalidated"):
            pool.acquire(spec, 64, q)
        status, _ = cu.cuStreamEndCapture(cu.CUstream(stream.cuda_stream))
        assert status == cu.CUresult.CUDA_ERROR_STREAM_CAPTURE_INVALIDATED
    assert until(lambda: pinned(pool) == 0)
    for place in (torch.cuda.current_stream(), stream):
        with torch.cuda.stream(place):
            outputs = pool.acquire(spec, 4096, q)
            write(outputs, 4)
            assert holds(outputs, 4)
    graph, outputs = captured_write(pool, spec, 64, q, value)
    value.fill_(5)
    graph.replay()
    assert holds(outputs, 5)


# First use and growth


def test_pool_and_cuda_arena_may_be_first_used_inside_a_capture(run_script):
    done = run_script(
        """
        import torch
        number = torch.zeros(1, device="cuda")
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            import bufpool
            spec = bufpool.OutputSpec(out=((8, 64), torch.bfloat16), lse=((8,), torch.float32))
            outputs = bufpool.default_pool().acquire(spec, 64, number)
            more = bufpool.default_pool().acquire(spec, 16384, number)
            for tensor in (*outputs, *more):
                tensor.copy_(number)
        for value in (1, 2):
            number.fill_(value)
            graph.replay()
            assert all(bool((tensor == value).all()) for tensor in (*outputs, *more))
        eager = bufpool.default_pool().acquire(spec, 64, number)
        assert eager.out.data_ptr() not in (outputs.out.data_ptr(), more.out.data_ptr())
        own = [s for s in torch.cuda.memory_snapshot() if tuple(s["segment_pool_id"]) == tuple(graph.pool())]
        print(len(own), bufpool.default_pool().stats().arena)
        """
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["0", "cuda"]


def test_reserve_before_a_capture_leaves_nothing_to_map_in_it(pool, spec, q, value):
    pool.reserve(spec, 16384, q)
    mapped = pool.stats().mapped_bytes
    with pool.shared_capture("reserved"):
        graph, outputs = captured_write(pool, spec, 16384, q, value)
    assert pool.stats().mapped_bytes == mapped
    (lane,) = pool.stats().lanes
    assert (lane.acquires, lane.hits, lane.grows) == (1, 1, 0)
    value.fill_(3)
    graph.replay()
    assert holds(outputs, 3)


def test_reserve_may_be_called_inside_a_capture(pool, spec, q, value):
    def body():
        pool.reserve(spec, 16384, q)
        outputs = pool.acquire(spec, 64, q)
        write(outputs, value)
        return outputs

    graph, outputs = capture(body)
    assert pool.stats().slots == 1
    value.fill_(3)
    graph.replay()
    assert holds(outputs, 3)


def test_a_replay_between_growths_inside_later_shared_captures_is_right(pool, spec, q, value):
    graphs = []
    for step in range(8):

        def body(rows=128 << step):
            outputs = pool.acquire(spec, rows, q)
            write(outputs, value)
            return pointers(outputs)

        with pool.shared_capture("growing"):
            graphs.append((128 << step, *capture(body)))
        for number, (rows, graph, base) in enumerate(graphs, 1):
            value.fill_(number)
            graph.replay()
            assert holds(results_at(spec, rows, base, pool), number)
    assert len({base for _, _, base in graphs}) == 1


# Errors inside a capture


def test_a_limit_inside_a_capture_is_a_limit_error_and_the_capture_goes_on(make_pool, spec, mib_spec, q, value):
    pool = make_pool(max_bytes=16 * MIB)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outputs = pool.acquire(spec, 64, q)
        write(outputs, value)
        with pytest.raises(PoolLimitError) as failure:
            pool.acquire(mib_spec, 14, q)
        block = pool.acquire(mib_spec, 12, q)
        write(block, value)
    assert (failure.value.need, failure.value.have, failure.value.limit) == (14 * MIB, 4 * MIB, 16 * MIB)
    assert private_segments(graph) == []
    value.fill_(3)
    graph.replay()
    assert holds(outputs, 3)
    assert holds(block, 3)
    with pytest.raises(PoolLimitError):
        pool.acquire(mib_spec, 2, q)
    torch.cuda.synchronize()
    del graph, outputs, block
    gc.collect()
    assert until(lambda: pinned(pool) == 0)
    assert pool.acquire(mib_spec, 16, q).block.shape == (16, MIB)


def test_idle_slots_are_not_taken_away_inside_a_capture(make_pool, spec, mib_spec, q, value):
    pool = make_pool(max_bytes=16 * MIB)
    base = pool.acquire(mib_spec, 14, q).block.data_ptr()  # idle from here on
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        value.add_(1)
        with pytest.raises(PoolLimitError, match="during a capture"):
            pool.acquire(spec, 64, q)
    graph.replay()
    assert value.item() == 1
    assert pool.acquire(mib_spec, 14, q).block.data_ptr() == base
    assert pool.acquire(spec, 64, q).out.shape == (64, 8, 64)  # outside it is


@pytest.mark.parametrize("is_limited", [True, False], ids=["max_bytes", "full device"])
def test_an_error_that_ends_a_capture_leaves_pool_and_process_usable(make_pool, spec, mib_spec, q, value, is_limited):
    pool = make_pool(max_bytes=16 * MIB if is_limited else None)
    filler = None if is_limited else fill_card(GIB)

    def body():
        outputs = pool.acquire(spec, 64, q)
        write(outputs, value)
        return outputs, pool.acquire(mib_spec, 4096, q)

    for _ in range(2):
        with pytest.raises(PoolLimitError, match="bytes"):
            capture(body)
        gc.collect()
        assert until(lambda: pinned(pool) == 0)
    del filler
    graph, outputs = captured_write(pool, spec, 64, q, value)
    value.fill_(3)
    graph.replay()
    assert holds(outputs, 3)
    eager = pool.acquire(mib_spec, 8, q)
    write(eager, 9)
    assert holds(eager, 9)
    assert pool.stats().mapped_bytes <= (16 if is_limited else 20) * MIB


# Threads and several captures


def test_a_graph_outlives_the_thread_that_captured_it(pool, spec, q, value):
    made = []

    def work():
        with torch.cuda.stream(torch.cuda.Stream()):
            write(pool.acquire(spec, 128, q), 7)  # an eager lane of the thread
        made.append(captured_write(pool, spec, 64, q, value))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    graph, outputs = made.pop()
    for number in (1, 2):
        value.fill_(number)
        graph.replay()
        write(pool.acquire(spec, 64, q), 99)
        assert holds(outputs, number)
    base = pointers(outputs)
    torch.cuda.synchronize()
    del graph, outputs
    gc.collect()
    assert until(lambda: pinned(pool) == 0)
    held = [pool.acquire(spec, 64, q) for _ in range(2)]
    assert base in [pointers(outputs) for outputs in held]


def test_captures_under_way_at_once_have_slots_of_their_own(pool, cu, spec, q, value):
    streams = [torch.cuda.Stream() for _ in range(2)]
    numbers = [torch.ones(1, device="cuda"), torch.full((1,), 2.0, device="cuda")]
    torch.cuda.synchronize()
    held = []
    for stream in streams:
        begin(cu, stream)
    for _ in range(3):
        for stream, number in zip(streams, numbers, strict=True):
            with torch.cuda.stream(stream):
                outputs = pool.acquire(spec, 64, q)
                write(outputs, number)
                held.append(outputs)
    executables = []
    for stream in streams:
        graph = end(cu, stream)
        executables.append(ok(cu.cuGraphInstantiate(graph, 0)))
        ok(cu.cuGraphDestroy(graph))
    assert len({pointers(outputs) for outputs in held}) == 6
    assert [lane.slots for lane in pool.stats().lanes] == [3, 3]
    for executable, stream in zip(executables, streams, strict=True):
        launch(cu, executable, stream)
    for place, outputs in enumerate(held):
        assert holds(outputs, 1 + place % 2)
    ok(cu.cuGraphExecDestroy(executables[0]))
    assert until(lambda: pinned(pool) == 3)
    ok(cu.cuGraphExecDestroy(executables[1]))
    assert until(lambda: pinned(pool) == 0)


# Fork and join, and readers on other streams


def forked(pool, spec, rows, q, value, side, other):
    """A capture body: the main stream writes ``value``, a side stream ``other``; both go on, then join."""

    def body():
        main = torch.cuda.current_stream()
        side.wait_stream(main)
        mine = pool.acquire(spec, rows, q)
        write(mine, value)
        with torch.cuda.stream(side):
            torch.cuda._sleep(1_000_000)
            for _ in range(3):  # dropped at once: the branch uses its slot again
                write(pool.acquire(spec, rows, q), value)
            theirs = pool.acquire(spec, rows, q)
            write(theirs, other)
        write(pool.acquire(spec, rows, q), value)  # mine is held: another slot of this branch
        main.wait_stream(side)
        return mine, theirs

    return body


def test_branches_of_one_capture_do_not_share_slots(pool, spec, q, value):
    side = torch.cuda.Stream()
    other = torch.zeros(1, device="cuda")
    graph, (mine, theirs) = capture(forked(pool, spec, 1024, q, value, side, other))
    lanes = pool.stats().lanes
    assert sorted(lane.slots for lane in lanes) == [1, 2]
    assert len({lane.capture for lane in lanes}) == 1
    assert len({lane.stream for lane in lanes}) == 2
    for number in range(1, 50):
        value.fill_(number)
        other.fill_(200 - number)
        graph.replay()
        assert holds(mine, number)
        assert holds(theirs, 200 - number)
    torch.cuda.synchronize()
    del graph
    gc.collect()
    assert until(lambda: pinned(pool) == 0)


def test_branches_of_shared_captures_share_branch_by_branch(pool, spec, q, value):
    other = torch.zeros(1, device="cuda")
    made = []
    with pool.shared_capture("forked"):
        for rows in (1024, 64, 256):
            body = forked(pool, spec, rows, q, value, torch.cuda.Stream(), other)
            graph, (mine, theirs) = capture(body)
            made.append((graph, rows, pointers(mine), pointers(theirs)))
            del mine, theirs
    assert pool.stats().slots == 3
    assert all(mine != theirs for _, _, mine, theirs in made)
    assert len({theirs for *_, theirs in made}) == 1
    for number, (graph, rows, mine, theirs) in enumerate(made, 1):
        value.fill_(number)
        other.fill_(100 + number)
        graph.replay()
        assert holds(results_at(spec, rows, mine, pool), number)
        assert holds(results_at(spec, rows, theirs, pool), 100 + number)


def test_a_reader_declared_inside_a_capture_is_not_overtaken(pool, spec, q, value):
    side = torch.cuda.Stream()
    kept = torch.zeros(4096, 8, device="cuda")

    def body():
        main = torch.cuda.current_stream()
        outputs = pool.acquire(spec, 4096, q)
        write(outputs, value)
        side.wait_stream(main)
        with torch.cuda.stream(side):
            torch.cuda._sleep(SLOW_CYCLES // 4)
            kept.copy_(outputs.lse)
        pool.record_stream(outputs, side)
        del outputs
        write(pool.acquire(spec, 4096, q), 99)  # waits for the reader, or takes another slot
        main.wait_stream(side)

    graph, _ = capture(body)
    assert pool.stats().spills == 0
    assert private_segments(graph) == []
    for number in (1, 2):
        value.fill_(number)
        graph.replay()
        assert bool((kept == number).all())


def test_an_eager_reader_of_a_graphs_result_is_waited_for_after_the_graph_is_gone(pool, spec, q, value):
    reader = torch.cuda.Stream()
    graph, outputs = captured_write(pool, spec, 4096, q, value)
    base = pointers(outputs)
    value.fill_(5)
    graph.replay()
    reader.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(reader):
        torch.cuda._sleep(SLOW_CYCLES)
        copies = [tensor.clone() for tensor in outputs]
    pool.record_stream(outputs, reader)
    del graph, outputs
    gc.collect()
    assert until(lambda: pinned(pool) == 0)
    eager = pool.acquire(spec, 4096, q)
    assert pointers(eager) == base
    write(eager, 99)
    torch.cuda.synchronize()
    assert holds(copies, 5)


def test_an_eager_reader_does_not_break_the_next_shared_capture(run_script):
    # In a process of its own: a broken capture leaves torch's allocator unusable.
    done = run_script(
        """
        import torch, bufpool
        spec = bufpool.OutputSpec(out=((8, 64), torch.bfloat16), lse=((8,), torch.float32))
        pool, value, reader = bufpool.OutputPool(), torch.zeros(1, device="cuda"), torch.cuda.Stream()
        def capture(rows):
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph), pool.shared_capture("read"):
                outputs = pool.acquire(spec, rows, value)
                for tensor in outputs:
                    tensor.copy_(value)
            return graph, outputs
        first_graph, outputs = capture(4096)
        value.fill_(5)
        first_graph.replay()
        reader.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(reader):
            copies = [tensor.clone() for tensor in outputs]
        pool.record_stream(outputs, reader)
        del outputs
        second_graph, outputs = capture(64)
        torch.cuda.current_stream().wait_stream(reader)
        value.fill_(6)
        second_graph.replay()
        assert all(bool((tensor == 6).all()) for tensor in outputs)
        assert all(bool((tensor == 5).all()) for tensor in copies)
        own = [s for s in torch.cuda.memory_snapshot() if tuple(s["segment_pool_id"]) == tuple(second_graph.pool())]
        print(len(own), pool.stats().spills)
        """
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["0", "0"]


# Closing, sleeping


def test_shared_graphs_replay_after_their_pool_is_closed(pool, spec, q, source, value):
    made = capture_sizes(pool, spec, q, source, value, (64, 1024), is_shared=True)
    kept = torch.zeros(64, 8, device="cuda")

    def body():
        outputs = pool.acquire(spec, 64, q)
        compute(outputs, source, value)
        kept.copy_(outputs.lse)

    with pool.shared_capture("sizes"):
        last, _ = capture(body)
    pool.close()
    with OutputPool() as other:
        eager = other.acquire(spec, 1024, q)  # a slow path of another pool releases what it may
        write(eager, 9)
        made.pop(1024)[0].replay()
        made.pop(64)[0].replay()
        torch.cuda.synchronize()
        gc.collect()
        kept.zero_()
        last.replay()  # the slot is kept by this one alone
        assert torch.equal(kept, source[:64].amax(-1))
        assert holds(eager, 9)


def test_the_memory_of_a_closed_pools_graph_comes_back_with_the_graph(make_pool, mib_spec, q, value):
    pool = make_pool()
    graph, outputs = captured_write(pool, mib_spec, 512, q, value)
    del outputs
    pool.close()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    free, _ = torch.cuda.mem_get_info()
    del graph
    gc.collect()

    def is_back():
        make_pool().close()  # any close takes back what it may
        return torch.cuda.mem_get_info()[0] >= free + 400 * MIB

    assert until(is_back)


def test_all_graphs_of_a_set_replay_after_sleep_and_wake(pool, spec, q, source, value):
    made = capture_sizes(pool, spec, q, source, value, SIZES, is_shared=True)
    with pool.shared_capture("sizes"):
        graph, outputs = captured_write(pool, spec, 512, q, value)  # held over the sleep

    def while_asleep():
        value.add_(1)  # torch warns about a capture without work
        pool.acquire(spec, 4, q)

    mapped = pool.stats().mapped_bytes
    for number in (2, 3):
        pool.sleep()
        assert pool.stats().mapped_bytes == 0
        with pytest.raises(BufpoolError, match=r"wake\(\)"):
            capture(while_asleep)
        pool.wake()
        assert pool.stats().mapped_bytes == mapped
        for rows, (other, base, _) in made.items():
            value.fill_(number)
            other.replay()
            assert equal(results_at(spec, rows, base, pool), computed(rows, source, number))
        value.fill_(number)
        graph.replay()
        assert holds(outputs, number)


def test_a_capture_after_wake_continues_the_set(pool, spec, q, value):
    with pool.shared_capture("set"):
        first, outputs = captured_write(pool, spec, 64, q, value)
        base = pointers(outputs)
        del outputs
        pool.sleep()
        pool.wake()
        second, outputs = captured_write(pool, spec, 16384, q, value)
    assert pointers(outputs) == base
    for number, (graph, rows) in enumerate(((first, 64), (second, 16384)), 2):
        value.fill_(number)
        graph.replay()
        assert holds([tensor[:rows] for tensor in outputs], number)


# Several devices


@pytest.mark.multi_gpu
def test_a_shared_capture_on_another_device_grows_and_leaves_the_current_device(pool, spec):
    like = torch.zeros(1, device="cuda:1")
    number = torch.zeros(1, device="cuda:1")
    with torch.cuda.device(1):
        stream = torch.cuda.Stream()
    made = []
    with pool.shared_capture("devices"):
        for rows in (64, 16384):
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.device(1), torch.cuda.graph(graph, stream=stream), torch.cuda.device(0):
                outputs = pool.acquire(spec, rows, like)
                assert torch.cuda.current_device() == 0
                write(outputs, number)
            made.append((graph, rows, pointers(outputs)))
            if rows == 64:
                del outputs
    assert torch.cuda.current_device() == 0
    assert made[0][2] == made[1][2]
    assert {tensor.device for tensor in outputs} == {like.device}
    for value, (graph, rows, _) in enumerate(made, 3):
        number.fill_(value)
        torch.cuda.synchronize(1)
        with torch.cuda.device(1):
            graph.replay()
            torch.cuda.synchronize()
        assert holds([tensor[:rows] for tensor in outputs], value)


@pytest.mark.multi_gpu
def test_one_name_on_two_devices_is_a_set_for_each(pool, spec):
    made = []
    with pool.shared_capture("both"):
        for index in (0, 1, 0, 1):
            with torch.cuda.device(index):
                like = torch.full((1,), 3.0, device="cuda")
                # torch's own capture stream is one for all devices
                graph, outputs = captured_write(pool, spec, 64, like, like, stream=torch.cuda.Stream())
            made.append((graph, index, pointers(outputs), like))
            del outputs
    assert made[0][2] == made[2][2]
    assert made[1][2] == made[3][2]
    assert made[0][2] != made[1][2]
    assert sorted(lane.device for lane in pool.stats().lanes) == ["cuda:0", "cuda:1"]
    for graph, index, _, _ in made:
        with torch.cuda.device(index):
            graph.replay()
            torch.cuda.synchronize()
    del made, graph
    gc.collect()
    assert until(lambda: pinned(pool) == 0)


@pytest.mark.multi_gpu
def test_eager_calls_on_one_device_go_on_while_another_captures(pool, spec):
    other = torch.zeros(1, device="cuda:1")
    number = torch.zeros(1, device="cuda:0")
    write(pool.acquire(spec, 64, other), 1)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        outputs = pool.acquire(spec, 64, number)
        write(outputs, number)
        eager = pool.acquire(spec, 4096, other)  # grows
        write(eager, 7)
    number.fill_(3)
    graph.replay()
    assert holds(outputs, 3)
    assert holds(eager, 7)

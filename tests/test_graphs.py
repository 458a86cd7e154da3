"""The graph runner: which bucket serves, what the static inputs hold, whose the results are.

Without a GPU, graphs that rerun their function stand in for CUDA's.
"""

from __future__ import annotations

import functools
import gc
import logging
import threading
import time
import types
import weakref
from collections import namedtuple
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from cuda_work import until
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

import bufpool
from bufpool import (
    BufpoolError,
    CaptureError,
    DeviceMismatchError,
    FreshAllocator,
    OutputMismatchError,
    OutputPool,
    OutputSpec,
    driver,
    graphs,
    process,
)
from bufpool.graphs import GraphRunner
from bufpool.ops import sparse_mla_prefill

INPUTS = OutputSpec(x=((4,), torch.float32), factor=((), torch.int32))
RESULTS = OutputSpec(y=((4,), torch.float32), total=((), torch.float32))
BUCKETS = (1, 2, 4, 8)
SLOW_CYCLES = 100_000_000  # of torch.cuda._sleep: about 50 ms on an H200
MIB = 2**20


def scale(x, factor, allocator, seen=None):
    """y = x times factor, and its sum over a row."""
    outputs = allocator.acquire(RESULTS, x.shape[0], x)
    torch.mul(x, factor[:, None], out=outputs.y)
    torch.sum(outputs.y, -1, out=outputs.total)
    if seen is not None:
        seen.append((allocator, x.clone(), factor.clone()))
    return outputs


def inputs_of(rows, start=1, device="cpu"):
    x = torch.arange(start, start + 4 * rows, dtype=torch.float32, device=device).view(rows, 4)
    return {"x": x, "factor": torch.arange(start, start + rows, dtype=torch.int32, device=device)}


def expected(inputs):
    return scale(**inputs, allocator=FreshAllocator())


def equal(results, others):
    return all(torch.equal(one, other) for one, other in zip(results, others, strict=True))


class RerunGraph:
    """What a CUDA graph does, by running the function again: the same inputs, the same places."""

    def __init__(self, body, results):
        self.body = body
        self.results = results

    def replay(self):
        again = self.body(FreshAllocator())
        for place, tensor in zip(self.results, (again,) if isinstance(again, torch.Tensor) else again, strict=True):
            place.copy_(tensor)


@pytest.fixture
def on_host(monkeypatch):
    """Lets a runner capture on the CPU; returns what it captured, in order, as (bucket rows, warm-ups)."""
    captured = []
    warmed = []
    places = {}

    def warm_up(body, device, warmups, stream):
        warmed.append(warmups)
        for _ in range(warmups):
            body(FreshAllocator())

    def capture(body, device, pool, memory, stream):
        result = body(pool)
        tensors = (result,) if isinstance(result, torch.Tensor) else tuple(result)
        places.update({tensor.data_ptr(): tensor for tensor in tensors if isinstance(tensor, torch.Tensor)})
        captured.append((len(tensors[0]), warmed[-1]))
        return RerunGraph(body, tensors), result

    monkeypatch.setattr(graphs, "_can_capture", lambda device: True)
    monkeypatch.setattr(graphs, "is_capturing_on", lambda device: False)
    monkeypatch.setattr(graphs, "_memory_handle", lambda: None)
    monkeypatch.setattr(graphs, "_capture_stream", lambda device: None)
    monkeypatch.setattr(graphs, "_warm_up", warm_up)
    monkeypatch.setattr(graphs, "_capture", capture)
    monkeypatch.setattr(graphs, "_over", lambda place, device, keeper: places[place.address])
    yield captured
    places.clear()
    gc.collect()


@pytest.fixture
def runner(pool, on_host):
    with GraphRunner(scale, INPUTS, BUCKETS, pool=pool, pad={"factor": -1}) as made:
        yield made


def test_a_call_after_one_on_a_stream_that_captures_is_refused(runner, monkeypatch):
    runner(**inputs_of(3))
    before = runner.stats()
    monkeypatch.setattr(runner, "_home", types.SimpleNamespace(type="cuda", index=0))
    monkeypatch.setitem(runner._set.streams, 0, types.SimpleNamespace(cuda_stream=7))
    monkeypatch.setattr(graphs, "raw_stream", lambda index: 9)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: types.SimpleNamespace(cuda_stream=9))
    monkeypatch.setattr(driver, "is_available", lambda: True)
    monkeypatch.setattr(driver, "is_capturing", lambda stream: stream == 7)
    with pytest.raises(CaptureError, match="no graph capture on the stream of its last call"):
        runner._order()
    assert runner.stats() == before


def test_runners_of_one_name_wait_for_each_other(pool, on_host, monkeypatch):
    waits, now = [], [1]

    class Stream:
        def __init__(self):
            self.cuda_stream = now[0]

        def wait_stream(self, other):
            waits.append((self.cuda_stream, other.cuda_stream))

    runners = [GraphRunner(scale, INPUTS, (4,), pool=pool, name=name) for name in ("one", "one", "other")]
    for runner in runners:
        runner.capture("cpu")
        monkeypatch.setattr(runner, "_home", types.SimpleNamespace(type="cuda", index=0))
        monkeypatch.setattr(runner, "_static", {})
    monkeypatch.setattr(graphs, "raw_stream", lambda index: now[0])
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device=None: Stream())
    monkeypatch.setattr(driver, "is_available", lambda: False)
    for now[0], runner in ((1, runners[0]), (9, runners[1]), (9, runners[0]), (5, runners[2]), (1, runners[0])):
        runner._order()
    assert waits == [(9, 1), (1, 9)]
    assert runners[0]._set is runners[1]._set is not runners[2]._set


def test_the_order_of_a_set_lasts_as_long_as_a_result(pool, on_host, monkeypatch):
    kept, over = {}, graphs._over

    def over_and_keep(place, device, keeper):
        kept[place.address] = keeper  # as the storage does
        return over(place, device, keeper)

    monkeypatch.setattr(graphs, "_over", over_and_keep)
    runner = GraphRunner(scale, INPUTS, (4,), pool=pool, name="one")
    runner(**inputs_of(2))
    slot_set = weakref.ref(runner._set)
    for graph, *_ in kept.values():
        graph.body = None  # which a CUDA graph does not keep
    del runner, graph
    gc.collect()
    assert GraphRunner(scale, INPUTS, (4,), pool=pool, name="one")._set is slot_set()


def test_the_type_of_a_result_may_call_a_runner_of_the_same_name(pool, on_host):
    inside, in_call, is_armed = threading.Event(), threading.Event(), []

    class Pair(namedtuple("Pair", "y total")):  # noqa: PYI024
        @classmethod
        def _make(cls, tensors):
            if is_armed and threading.current_thread().name == "first":
                inside.set()
                in_call.wait(20)
                second(**inputs_of(2))
            return super()._make(tensors)

    first = GraphRunner(
        lambda allocator, **inputs: Pair(*scale(**inputs, allocator=allocator)), INPUTS, (4,), pool=pool, name="one"
    )
    second = GraphRunner(scale, INPUTS, (4,), pool=pool, name="one")
    for runner in (first, second):
        runner(**inputs_of(2))
    settle = second._settle

    def settle_and_say(*args):
        in_call.set()
        settle(*args)

    second._settle = settle_and_say
    is_armed.append(True)

    def call_second():
        inside.wait(20)
        second(**inputs_of(2))

    threads = [
        threading.Thread(target=lambda: first(**inputs_of(2)), name="first", daemon=True),
        threading.Thread(target=call_second, name="second", daemon=True),
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert not any(thread.is_alive() for thread in threads)


def test_runners_of_one_name_may_meet_in_their_functions(pool):
    barrier, results = threading.Barrier(2, timeout=20), []

    def meet(x, allocator):
        barrier.wait()  # as ranks of one process do that set up a communicator
        return x + 1

    def work():
        runner = GraphRunner(meet, OutputSpec(x=((4,), torch.float32)), [4], pool=pool, name="one")
        results.append(runner(x=torch.zeros(2, 4)).sum().item())

    threads = [threading.Thread(target=work) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == [8, 8]


def test_a_pool_cannot_fall_asleep_in_a_call(pool, on_host, monkeypatch):
    runner = GraphRunner(scale, INPUTS, (4,), pool=pool)
    runner.capture("cpu")
    fill, refusals = runner._fill, []
    monkeypatch.setattr(type(pool._slots[0]), "is_pinned", lambda slot: True)  # on the host no graph does

    def sleep():
        try:
            pool.sleep()
        except BufpoolError as error:
            refusals.append(str(error))

    def fill_while_another_thread_calls_sleep(*args):
        thread = threading.Thread(target=sleep)
        thread.start()
        thread.join()
        fill(*args)

    monkeypatch.setattr(runner, "_fill", fill_while_another_thread_calls_sleep)
    inputs = inputs_of(3)
    assert equal(runner(**inputs), expected(inputs))
    assert refusals == ["sleep: expected no call of a graph runner under way, got 1"]
    sleep()
    assert pool.is_asleep
    assert len(refusals) == 1
    with pytest.raises(BufpoolError, match="runner: expected a pool that is awake"):
        runner(**inputs)
    pool.wake()


@pytest.mark.parametrize("like", ["nonsense", *([] if torch.cuda.is_available() else ["cuda"])])
def test_a_device_that_is_not_there_is_a_value_error(runner, like):
    with pytest.raises(ValueError, match="like: expected a device"):
        runner.capture(like)


# Which bucket serves


def test_the_smallest_bucket_that_fits_serves(runner):
    for rows in range(1, 9):
        inputs = inputs_of(rows)
        results = runner(**inputs)
        assert results._fields == ("y", "total")
        assert equal(results, expected(inputs))
    stats = runner.stats()
    assert [(bucket.rows, bucket.replays, bucket.active_rows, bucket.padded_rows) for bucket in stats.buckets] == [
        (1, 1, 1, 0),
        (2, 1, 2, 0),
        (4, 2, 7, 1),
        (8, 4, 26, 6),
    ]
    assert (stats.calls, stats.replays, stats.eager_calls, stats.copies) == (8, 8, 0, 0)
    assert all(bucket.capture_us > 0 and bucket.host_us > 0 for bucket in stats.buckets)


def test_more_rows_than_the_largest_bucket_and_no_rows_run_eagerly(runner, pool):
    for rows in (9, 0, 100):
        inputs = inputs_of(rows)
        before = pool.stats().acquires
        assert equal(runner(**inputs), expected(inputs))
        assert pool.stats().acquires >= before + 1
    stats = runner.stats()
    assert (stats.calls, stats.replays, stats.eager_calls) == (3, 0, 3)
    assert stats.eager_us > 0


def test_all_buckets_are_captured_at_the_first_call_largest_first(runner, on_host):
    assert runner.buckets == BUCKETS
    assert runner.stats().buckets == ()
    runner(**inputs_of(2))
    assert on_host == [(8, 1), (4, 1), (2, 1), (1, 1)]
    runner(**inputs_of(3))
    assert len(on_host) == 4


@pytest.mark.parametrize("like", ["cpu", torch.device("cpu"), torch.zeros(1), [torch.zeros(1)], {"x": torch.zeros(1)}])
def test_capture_does_it_ahead_and_once(pool, on_host, like):
    with GraphRunner(scale, INPUTS, [4, 2, 4], pool=pool, warmups=3) as runner:
        runner.capture(like)
        assert on_host == [(4, 3), (2, 3)]
        runner.capture(like)
        assert equal(runner(**inputs_of(3)), expected(inputs_of(3)))
        assert len(on_host) == 2
        assert runner.stats().calls == 1


def test_warm_ups_take_nothing_from_the_pool(pool, on_host):
    seen = []
    with GraphRunner(functools.partial(scale, seen=seen), INPUTS, [4], pool=pool, warmups=2) as runner:
        runner.capture("cpu")
    assert [type(allocator) for allocator, _, _ in seen] == [FreshAllocator, FreshAllocator, OutputPool]
    assert pool.stats().acquires == 1


def test_a_failed_capture_leaves_nothing_captured_and_can_be_tried_again(pool, on_host):
    broken = [2]

    def fragile(x, factor, allocator):
        if x.shape[0] in broken:
            raise KeyError("of fn")
        return scale(x, factor, allocator)

    with GraphRunner(fragile, INPUTS, BUCKETS, pool=pool) as runner:
        with pytest.raises(KeyError, match="of fn"):
            runner(**inputs_of(1))
        assert runner.stats().buckets == ()
        assert runner.stats().calls == 0
        broken.clear()
        assert equal(runner(**inputs_of(1)), expected(inputs_of(1)))


def test_buckets_of_a_runner_share_a_capture_and_runners_do_not_unless_named(pool, on_host, monkeypatch):
    names = []
    real = OutputPool.shared_capture

    def watch(self, name):
        names.append(name)
        return real(self, name)

    monkeypatch.setattr(OutputPool, "shared_capture", watch)
    for options in ({}, {}, {"name": "decode"}, {"private": True}):
        GraphRunner(scale, INPUTS, [1, 2], pool=pool, **options).capture("cpu")
    assert names[0] == names[1] != names[2] == names[3]
    assert names[4:] == ["decode", "decode"]


# Static inputs


def test_rows_behind_the_active_ones_hold_the_pad_value_or_what_earlier_calls_left(pool, on_host):
    seen = []
    with GraphRunner(functools.partial(scale, seen=seen), INPUTS, [4, 8], pool=pool, pad={"factor": -1}) as runner:
        runner.capture("cpu")
        _, x, factor = seen[-1]
        assert factor.tolist() == [-1] * 4
        assert x.tolist() == [[0.0] * 4] * 4
        for rows in (7, 5, 2, 6, 3, 8, 1):
            inputs = inputs_of(rows, start=10)
            assert equal(runner(**inputs), expected(inputs))
            _, x, factor = seen[-1]
            assert factor[:rows].tolist() == inputs["factor"].tolist()
            assert factor[rows:].tolist() == [-1] * (len(factor) - rows)
        assert x[1:].tolist() == inputs_of(4, start=10)["x"][1:].tolist()  # no pad value was asked for


def test_inputs_may_be_strided_and_may_change_after_the_call(runner):
    wide = torch.arange(80.0).view(8, 10)
    factor = torch.arange(20, dtype=torch.int32)[::4]
    x = wide[1:6, 2:6]
    want = expected({"x": x.contiguous(), "factor": factor.contiguous()})
    results = runner(x=x, factor=factor)
    wide.fill_(-5)
    factor.fill_(7)
    assert equal(results, want)


def test_inputs_are_not_written(runner):
    inputs = inputs_of(5)
    copies = {name: tensor.clone() for name, tensor in inputs.items()}
    runner(**inputs)
    assert all(torch.equal(inputs[name], copies[name]) for name in inputs)


# Results


def test_a_result_lasts_until_the_next_call_and_a_fresh_one_as_long_as_it_is_held(runner, pool):
    first = runner(**inputs_of(3))
    own = runner(**inputs_of(3, start=50), fresh=True)
    assert not equal(first, expected(inputs_of(3)))  # overwritten: the stated exception
    runner(**inputs_of(4, start=90))
    assert equal(own, expected(inputs_of(3, start=50)))
    assert type(own) is type(first)
    base = own.y.data_ptr()
    assert any(slot.has_address(base) for slot in pool._slots)
    assert not any(tensor.data_ptr() == base for tensor in first)
    assert runner.stats().copies == 1
    held = [runner(**inputs_of(2, start=start), fresh=True) for start in range(5)]
    assert all(equal(results, expected(inputs_of(2, start=start))) for start, results in enumerate(held))


@pytest.mark.parametrize("kind", ["tensor", "tuple", "named tuple"])
def test_what_fn_returns_comes_back_as_the_same_kind(pool, on_host, kind):
    def fn(x, factor, allocator):
        outputs = scale(x, factor, allocator)
        return {"tensor": outputs.y, "tuple": (outputs.total, outputs.y), "named tuple": outputs}[kind]

    with GraphRunner(fn, INPUTS, BUCKETS, pool=pool) as runner:
        want = fn(**inputs_of(3), allocator=FreshAllocator())
        for fresh in (False, True):
            results = runner(**inputs_of(3), fresh=fresh)
            assert type(results) is type(want)
            if kind == "tensor":
                results, want_tensors = (results,), (want,)
            else:
                want_tensors = want
            assert equal(results, want_tensors)


def test_no_gradient_flows(runner):
    inputs = inputs_of(3)
    inputs["x"].requires_grad_()
    for results in (runner(**inputs), runner(**inputs, fresh=True)):
        assert not any(tensor.requires_grad for tensor in results)
    big = inputs_of(20)
    big["x"].requires_grad_()
    assert not runner(**big).y.requires_grad


def test_a_runner_made_in_inference_mode_serves_outside(pool, on_host):
    with torch.inference_mode():
        runner = GraphRunner(scale, INPUTS, BUCKETS, pool=pool)
        runner(**inputs_of(2))
    results = runner(**inputs_of(3))
    assert equal(results, expected(inputs_of(3)))
    assert not results.y.is_inference()


@pytest.mark.parametrize(
    ("returned", "error", "text"),
    [
        (lambda outputs: None, TypeError, "fn: expected it to return a tensor or a tuple of tensors, got NoneType"),
        (lambda outputs: (), TypeError, "fn: expected it to return a tensor or a tuple of tensors, got tuple"),
        (lambda outputs: (outputs.y, 3), TypeError, "fn: expected a tensor as result 1, got int"),
        (lambda outputs: outputs.y[1:], OutputMismatchError, r"fn: expected result 0 with 8 rows first, got \[7, 4\]"),
        (lambda outputs: outputs.y.sum(), OutputMismatchError, r"fn: expected result 0 with 8 rows first, got \[\]"),
        (
            lambda outputs: outputs.y.to("meta"),
            DeviceMismatchError,
            "result 0 of fn must be on device cpu, got meta",
        ),
    ],
)
def test_what_fn_returns_is_checked(pool, on_host, monkeypatch, returned, error, text):
    def capture(body, device, pool, memory, stream):
        return None, body(pool)

    monkeypatch.setattr(graphs, "_capture", capture)
    runner = GraphRunner(lambda x, factor, allocator: returned(scale(x, factor, allocator)), INPUTS, BUCKETS, pool=pool)
    with pytest.raises(error, match=text):
        runner(**inputs_of(1))


# What a call accepts


def test_wrong_inputs_are_named_before_anything_happens(runner, pool, on_host):
    good = inputs_of(3)
    wrong = [
        ({"x": good["x"]}, TypeError, "inputs: expected x, factor, got no factor"),
        ({**good, "z": good["x"]}, TypeError, "inputs: expected x, factor, got unknown z"),
        ({"x": good["x"], "z": good["x"]}, TypeError, "inputs: expected x, factor, got no factor and unknown z"),
        ({**good, "x": [1.0]}, TypeError, "x: expected a tensor, got list"),
        ({**good, "x": good["x"].double()}, OutputMismatchError, "x: expected dtype torch.float32, got torch.float64"),
        ({**good, "x": good["x"][:, :3]}, OutputMismatchError, r"x: expected shape \[rows, 4\], got \[3, 3\]"),
        ({**good, "x": good["x"][0]}, OutputMismatchError, r"x: expected shape \[rows, 4\], got \[4\]"),
        ({**good, "factor": good["factor"][:, None]}, OutputMismatchError, r"factor: expected shape \[3\], got \[3, 1\]"),
        ({**good, "factor": good["factor"][:2]}, OutputMismatchError, "factor: expected 3 rows as in x, got 2"),
        ({**good, "x": good["x"].to_sparse()}, OutputMismatchError, "x: expected a dense tensor, got layout torch.sparse"),
        (
            {**good, "factor": good["factor"].to("meta")},
            DeviceMismatchError,
            r"factor must be on device cpu, got meta \(x is on cpu\)",
        ),
    ]
    for inputs, error, text in wrong:
        with pytest.raises(error, match=text):
            runner(**inputs)
    assert on_host == []
    assert runner.stats().calls == 0
    assert pool.stats().acquires == 0


def test_a_runner_serves_one_device(runner, monkeypatch):
    runner(**inputs_of(2))
    with pytest.raises(DeviceMismatchError, match=r"x must be on device cpu, got cuda:0 \(of the calls before\)"):
        runner._settle(torch.device("cuda", 0), "x")


def test_wrong_arguments_of_a_runner_are_named(pool):
    wrong = [
        ((3, INPUTS, [1]), {}, TypeError, "fn: expected a function"),
        ((scale, {"x": 1}, [1]), {}, TypeError, "inputs: expected an OutputSpec"),
        ((scale, INPUTS, []), {}, ValueError, "buckets: expected at least one integer >= 1, got none"),
        ((scale, INPUTS, 4), {}, TypeError, "buckets: expected several integers >= 1, got 4"),
        ((scale, INPUTS, [0]), {}, ValueError, "buckets: expected integers >= 1, got 0"),
        ((scale, INPUTS, [True]), {}, TypeError, "buckets: expected integers >= 1, got True"),
        ((scale, INPUTS, [1.5]), {}, TypeError, "buckets: expected integers >= 1, got 1.5"),
        ((scale, INPUTS, [1]), {"pad": {"z": 1}}, ValueError, "pad: expected names among x, factor, got z"),
        ((scale, INPUTS, [1]), {"pad": {"x": "1"}}, TypeError, "pad: expected a number for x, got '1'"),
        ((scale, INPUTS, [1]), {"pad": 5}, TypeError, "pad: expected a number for some of the inputs by name, got 5"),
        ((scale, INPUTS, [1]), {"name": 3}, TypeError, "name: expected a string, got 3"),
        ((scale, INPUTS, [1]), {"warmups": -1}, ValueError, "expected an integer >= 0, got -1"),
        ((scale, INPUTS, [1]), {"pool": FreshAllocator()}, TypeError, "pool: expected an OutputPool"),
    ]
    for args, options, error, text in wrong:
        with pytest.raises(error, match=text):
            GraphRunner(*args, **{"pool": pool, **options})
    for name in ("allocator", "fresh"):
        with pytest.raises(ValueError, match=f"inputs: expected names other than allocator, fresh, got {name}"):
            GraphRunner(scale, OutputSpec(**{name: ((), torch.float32)}), [1], pool=pool)


def test_without_a_pool_the_default_one_serves(on_host):
    former = bufpool.default_pool()
    with OutputPool() as pool:
        bufpool.set_default_pool(pool)
        try:
            GraphRunner(scale, INPUTS, [2])(**inputs_of(2))
        finally:
            bufpool.set_default_pool(former)
        assert pool.stats().acquires == 1


def test_a_closed_runner_refuses_and_closes_twice(runner):
    runner(**inputs_of(2))
    runner.close()
    runner.close()
    with pytest.raises(BufpoolError, match="expected an open runner, got a closed one"):
        runner(**inputs_of(2))
    with pytest.raises(BufpoolError, match="expected an open runner"):
        runner.capture("cpu")
    assert runner.stats().buckets == ()


def test_a_call_from_inside_fn_is_an_error(pool, on_host):
    def fn(x, factor, allocator):
        if x.shape[0] == 4:
            runner(x=x, factor=factor)
        return scale(x, factor, allocator)

    runner = GraphRunner(fn, INPUTS, [4], pool=pool)
    with pytest.raises(BufpoolError, match="expected no call from inside another one, got one"):
        runner(**inputs_of(1))


def test_a_sleeping_pool_is_an_error_before_anything_is_copied(runner, pool):
    runner(**inputs_of(2))
    pool._is_asleep = True
    try:
        with pytest.raises(BufpoolError, match=r"wake\(\)"):
            runner(**inputs_of(2))
    finally:
        pool._is_asleep = False
    assert equal(runner(**inputs_of(3)), expected(inputs_of(3)))


def test_a_call_during_a_capture_is_an_error(runner, monkeypatch):
    runner(**inputs_of(2))
    monkeypatch.setattr(graphs, "is_capturing_on", lambda device: True)
    with pytest.raises(CaptureError, match="expected no graph capture on cpu, got one under way"):
        runner(**inputs_of(2))


def test_threads_take_turns_and_get_fresh_results_right(runner):
    errors = []
    barrier = threading.Barrier(4)

    def work(seed):
        barrier.wait()
        for number in range(50):
            inputs = inputs_of(1 + (seed + number) % 8, start=seed * 100 + number)
            if not equal(runner(**inputs, fresh=True), expected(inputs)):
                errors.append((seed, number))

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []
    assert runner.stats().copies == 200


# Where nothing is captured


def test_on_the_host_every_call_runs_eagerly_and_says_so_once(pool, caplog):
    with caplog.at_level(logging.INFO, "bufpool"), GraphRunner(scale, INPUTS, BUCKETS, pool=pool) as runner:
        runner.capture("cpu")
        for rows in (1, 3, 9):
            assert equal(runner(**inputs_of(rows)), expected(inputs_of(rows)))
    stats = runner.stats()
    assert (stats.calls, stats.replays, stats.eager_calls, stats.buckets) == (3, 0, 3, ())
    assert [record.message for record in caplog.records if "graph runner" in record.message] == [
        "graph runner: cpu has no CUDA graphs: every call runs eagerly"
    ]


def test_fake_and_meta_inputs_run_fn_and_leave_pool_and_runner_untouched(runner, pool, on_host):
    meta = {name: tensor.to("meta") for name, tensor in inputs_of(3).items()}
    assert runner(**meta).y.shape == (3, 4)
    with FakeTensorMode() as mode:
        fakes = {name: mode.from_tensor(tensor) for name, tensor in inputs_of(3).items()}
        assert isinstance(runner(**fakes).y, FakeTensor)
    assert on_host == []
    assert pool.stats().acquires == 0
    assert runner.stats().calls == 0


def test_the_operator_behind_a_runner(pool, on_host):
    generator = torch.Generator().manual_seed(0)
    kv = torch.randn(30, 576, generator=generator).to(torch.float8_e4m3fn)
    inputs = OutputSpec(q=((3, 576), torch.float8_e4m3fn), indices=((7,), torch.int32), topk_length=((), torch.int32))
    call = functools.partial(sparse_mla_prefill, kv=kv, sm_scale=0.05, q_scale=0.5, kv_scale=2.0)
    with GraphRunner(call, inputs, [1, 2, 4, 8], pool=pool, pad={"indices": -1}) as runner:
        for rows in (3, 8, 1, 5, 12):
            given = {
                "q": torch.randn(rows, 3, 576, generator=generator).to(torch.float8_e4m3fn),
                "indices": torch.randint(-1, 30, (rows, 7), generator=generator, dtype=torch.int32),
                "topk_length": torch.randint(0, 8, (rows,), generator=generator, dtype=torch.int32),
            }
            results = runner(**given)
            assert results._fields == ("out", "max_logits", "lse")
            assert equal(results, call(**given, allocator=FreshAllocator()))


def test_the_example_serves_chunks_of_any_size(run_script):
    done = run_script(Path(__file__).parent.parent / "examples" / "chunked_prefill_graphs.py", "--chunks", 3)
    assert done.returncode == 0, done.stderr
    assert "3 chunks, bit-equal to eager calls" in done.stdout
    assert ("every call runs eagerly" in done.stdout) is not torch.cuda.is_available()


def test_the_host_by_its_index_is_the_host(pool):
    with GraphRunner(scale, INPUTS, [4], pool=pool) as runner:
        runner.capture("cpu:0")
        inputs = inputs_of(3)
        assert equal(runner(**inputs), expected(inputs))


def test_first_calls_of_runners_capture_one_after_another(pool, on_host, monkeypatch):
    begun, inside, most = threading.Barrier(4), [], []
    capture = graphs._capture

    def watched(*args):
        inside.append(threading.get_ident())
        most.append(len(set(inside)))
        time.sleep(0.002)
        try:
            return capture(*args)
        finally:
            inside.remove(threading.get_ident())

    monkeypatch.setattr(graphs, "_capture", watched)
    runners = [GraphRunner(scale, INPUTS, BUCKETS, pool=pool, pad={"factor": -1}) for _ in range(4)]

    def call(runner):
        inputs = inputs_of(3)
        begun.wait()
        return equal(runner(**inputs), expected(inputs))

    with ThreadPoolExecutor(4) as threads:
        assert all(threads.map(call, runners))
    assert len(most) == 4 * len(BUCKETS)
    assert max(most) == 1
    assert not process.capture_turn._is_owned()
    for runner in runners:
        runner.close()


def test_a_call_inside_a_capture_is_refused_without_waiting_for_the_runner(pool, on_host, monkeypatch):
    monkeypatch.setattr(graphs, "is_capturing_on", lambda device: True)
    runner = GraphRunner(scale, INPUTS, [4], pool=pool)
    with ThreadPoolExecutor(1) as threads, runner._lock:  # as a thread has it that waits for its turn to capture
        for call in (lambda: runner(**inputs_of(4)), lambda: runner.capture("cpu")):
            with pytest.raises(CaptureError, match="no graph capture on cpu"):
                threads.submit(call).result(timeout=20)
    runner.close()


def test_first_calls_in_several_threads_may_meet_in_fn(pool, on_host):
    meeting = threading.Barrier(2, timeout=20)  # a collective: each rank has to come

    def meet(x, factor, allocator):
        if isinstance(allocator, FreshAllocator):
            meeting.wait()
        return scale(x, factor, allocator)

    runners = [GraphRunner(meet, INPUTS, [2, 4], pool=pool) for _ in range(2)]
    with ThreadPoolExecutor(2) as threads:
        for call in [threads.submit(runner, **inputs_of(4)) for runner in runners]:
            call.result()
    for runner in runners:
        runner.close()


def test_a_first_call_inside_the_warm_up_of_another_runner_is_served(pool, on_host):
    inner = GraphRunner(scale, INPUTS, [4], pool=pool)

    def outer(x, factor, allocator):
        if isinstance(allocator, FreshAllocator):
            inner(x=x, factor=factor)
        return scale(x, factor, allocator)

    with inner, GraphRunner(outer, INPUTS, [4], pool=pool) as runner:
        inputs = inputs_of(4)
        assert equal(runner(**inputs), expected(inputs))
        assert len(inner.stats().buckets) == 1


# On CUDA


gpu = [pytest.mark.gpu, pytest.mark.usefixtures("nothing_left_queued")]


def on_cuda(test):
    for mark in gpu:
        test = mark(test)
    return test


@pytest.fixture
def cuda_runner(pool):
    with GraphRunner(scale, INPUTS, BUCKETS, pool=pool, pad={"factor": -1}) as made:
        yield made


@on_cuda
def test_every_number_of_rows_is_bit_equal_to_an_eager_call(cuda_runner, pool):
    for turn in range(3):
        for rows in (*range(11), 64, *reversed(range(9))):
            inputs = inputs_of(rows, start=turn + 1, device="cuda")
            assert equal(cuda_runner(**inputs), expected(inputs)), rows
    (shared,) = [lane for lane in pool.stats().lanes if lane.shared is not None]
    assert (shared.slots, shared.pinned_slots) == (1, 1)
    assert shared.mapped_bytes == 4 * MIB
    stats = cuda_runner.stats()
    assert (stats.replays, stats.eager_calls) == (3 * 16, 3 * 5)


@on_cuda
def test_the_operator_is_replayed_bit_for_bit(pool):
    generator = torch.Generator().manual_seed(0)
    kv = torch.randn(256, 576, generator=generator).to("cuda", torch.float8_e4m3fn)
    inputs = OutputSpec(q=((64, 576), torch.float8_e4m3fn), indices=((64,), torch.int32), topk_length=((), torch.int32))
    call = functools.partial(sparse_mla_prefill, kv=kv, sm_scale=0.05, q_scale=0.5, kv_scale=2.0)
    with GraphRunner(call, inputs, [1, 2, 4, 8, 16, 32, 64], pool=pool, pad={"indices": -1}) as runner:
        for rows in (64, 3, 33, 1, 64, 65, 17, 0, 2):
            given = {
                "q": torch.randn(rows, 64, 576, generator=generator).to("cuda", torch.float8_e4m3fn),
                "indices": torch.randint(-1, 256, (rows, 64), generator=generator, dtype=torch.int32).cuda(),
                "topk_length": torch.randint(0, 65, (rows,), generator=generator, dtype=torch.int32).cuda(),
            }
            results = runner(**given)
            assert equal(results, call(**given, allocator=FreshAllocator())), rows
        shared = [lane for lane in pool.stats().lanes if lane.shared is not None]
        assert [lane.slots for lane in shared] == [1]


@on_cuda
def test_private_buckets_keep_their_results_until_their_own_next_call(pool):
    with GraphRunner(scale, INPUTS, BUCKETS, pool=pool, private=True) as runner:
        made = {rows: (inputs_of(rows, device="cuda"), runner(**inputs_of(rows, device="cuda"))) for rows in BUCKETS}
        assert all(equal(results, expected(inputs)) for inputs, results in made.values())
        assert len([lane for lane in pool.stats().lanes if lane.capture is not None]) == len(BUCKETS)


@on_cuda
def test_shared_results_are_overwritten_and_fresh_ones_are_not(cuda_runner):
    inputs = inputs_of(3, device="cuda")
    first = cuda_runner(**inputs)
    own = cuda_runner(**inputs, fresh=True)
    other = inputs_of(8, start=70, device="cuda")
    second = cuda_runner(**other)
    assert first.y.data_ptr() == second.y.data_ptr()
    assert equal(own, expected(inputs))
    assert equal(second, expected(other))


@on_cuda
def test_a_result_outlives_its_runner_and_keeps_the_memory(cuda_runner, pool):
    inputs = inputs_of(5, device="cuda")
    results = cuda_runner(**inputs)
    cuda_runner.close()
    gc.collect()
    pool.trim()
    held = [pool.acquire(RESULTS, 8, inputs["x"]) for _ in range(3)]
    for outputs in held:
        for tensor in outputs:
            tensor.fill_(9)
    time.sleep(0.2)
    assert pool.stats().pinned_slots == 1
    assert equal(results, expected(inputs))
    torch.cuda.synchronize()
    del results
    gc.collect()
    assert until(lambda: pool.stats().pinned_slots == 0)


@on_cuda
def test_a_dropped_runner_gives_its_slots_back(pool):
    runner = GraphRunner(scale, INPUTS, BUCKETS, pool=pool)
    runner(**inputs_of(5, device="cuda"))
    torch.cuda.synchronize()
    assert pool.stats().pinned_slots == 1
    del runner
    gc.collect()
    assert until(lambda: pool.stats().pinned_slots == 0)
    pool.trim()
    assert pool.stats().mapped_bytes == 0


@on_cuda
def test_calls_on_different_streams_are_ordered(cuda_runner):
    streams = [torch.cuda.Stream(), torch.cuda.Stream(), torch.cuda.default_stream()]
    given = [inputs_of(1 + number % 8, start=number, device="cuda") for number in range(24)]
    want = [expected(inputs) for inputs in given]
    cuda_runner.capture("cuda")
    torch.cuda.synchronize()
    wrong = torch.zeros((), dtype=torch.int64, device="cuda")
    counts = [torch.zeros_like(wrong) for _ in streams]
    for turn in range(300):
        place = turn % 3
        number = (7 * turn) % 24
        with torch.cuda.stream(streams[place]):
            if turn % 5 == 0:
                torch.cuda._sleep(200_000)
            results = cuda_runner(**given[number])
            counts[place].add_((results.y != want[number].y).sum() + (results.total != want[number].total).sum())
    torch.cuda.synchronize()
    assert [int(count) for count in counts] == [0, 0, 0]


@on_cuda
def test_threads_on_their_own_streams_get_fresh_results_right(cuda_runner):
    cuda_runner.capture("cuda")
    wrong = []

    def work(seed):
        with torch.cuda.stream(torch.cuda.Stream()):
            for number in range(50):
                inputs = inputs_of(1 + (seed + number) % 8, start=seed * 100 + number, device="cuda")
                if not equal(cuda_runner(**inputs, fresh=True), expected(inputs)):
                    wrong.append((seed, number))

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


@on_cuda
def test_a_call_inside_a_capture_is_an_error_and_the_capture_goes_on(cuda_runner):
    inputs = inputs_of(3, device="cuda")
    cuda_runner.capture("cuda")
    number = torch.zeros(1, device="cuda")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        number.add_(1)
        with pytest.raises(CaptureError, match="got one under way"):
            cuda_runner(**inputs)
    graph.replay()
    assert number.item() == 1
    assert equal(cuda_runner(**inputs), expected(inputs))


@on_cuda
def test_replays_are_right_after_sleep_and_wake_and_refused_between(cuda_runner, pool):
    inputs = inputs_of(5, device="cuda")
    held = cuda_runner(**inputs)
    base = held.y.data_ptr()
    for start in (20, 30):
        pool.sleep()
        assert pool.stats().mapped_bytes == 0
        with pytest.raises(BufpoolError, match=r"wake\(\)"):
            cuda_runner(**inputs)
        pool.wake()
        inputs = inputs_of(5, start=start, device="cuda")
        results = cuda_runner(**inputs)
        assert results.y.data_ptr() == base
        assert equal(results, expected(inputs))
        assert equal(held, results)


@on_cuda
def test_replays_stay_right_while_the_pool_grows_and_trims(cuda_runner, pool):
    like = torch.zeros(1, device="cuda")
    for number in range(20):
        big = pool.acquire(RESULTS, 1 + 5000 * number, like)
        for tensor in big:
            tensor.fill_(9)
        inputs = inputs_of(1 + number % 8, start=number, device="cuda")
        assert equal(cuda_runner(**inputs), expected(inputs))
        del big
        pool.trim()


@on_cuda
def test_an_error_of_fn_inside_its_capture_leaves_nothing_pinned(pool):
    broken = [True]

    def fragile(x, factor, allocator):
        outputs = scale(x, factor, allocator)
        if broken and allocator is pool and x.shape[0] == 2:
            raise KeyError("of fn")
        return outputs

    with GraphRunner(fragile, INPUTS, BUCKETS, pool=pool) as runner:
        inputs = inputs_of(3, device="cuda")
        with pytest.raises(KeyError, match="of fn"):
            runner(**inputs)
        gc.collect()
        assert torch.cuda.current_stream() == torch.cuda.default_stream()
        assert until(lambda: pool.stats().pinned_slots == 0)
        broken.clear()
        assert equal(runner(**inputs), expected(inputs))


@on_cuda
def test_results_of_torch_operations_are_returned_too(pool):
    def fn(x, factor, allocator):
        outputs = scale(x, factor, allocator)
        return outputs.y.t().contiguous().t(), outputs.total + 1, outputs.y  # strided, of torch, of the pool

    with GraphRunner(fn, INPUTS, BUCKETS, pool=pool) as runner:
        for rows in (8, 3, 5, 1):
            inputs = inputs_of(rows, device="cuda")
            want = expected(inputs)
            strided, total, y = runner(**inputs)
            assert torch.equal(strided, want.y)
            assert torch.equal(total, want.total + 1)
            assert torch.equal(y, want.y)
            own = runner(**inputs, fresh=True)
            runner(**inputs_of(8, start=50, device="cuda"))
            assert torch.equal(own[0], want.y)
            assert torch.equal(own[1], want.total + 1)


@on_cuda
def test_runners_with_one_name_share_their_slots(pool):
    runners = [GraphRunner(scale, INPUTS, BUCKETS, pool=pool, name="all") for _ in range(3)]
    for number, runner in enumerate(runners):
        inputs = inputs_of(4 + number, start=number, device="cuda")
        assert equal(runner(**inputs), expected(inputs))
    for number, runner in enumerate(runners):
        inputs = inputs_of(1 + number, start=number, device="cuda")
        assert equal(runner(**inputs), expected(inputs))
    (shared,) = [lane for lane in pool.stats().lanes if lane.shared == "all"]
    assert shared.slots == 1
    for runner in runners:
        runner.close()


@on_cuda
def test_first_calls_of_runners_in_several_threads(pool):
    for attempt in range(10):
        begun = threading.Barrier(4)
        runners = [GraphRunner(scale, INPUTS, BUCKETS, pool=pool, pad={"factor": -1}) for _ in range(4)]
        given = [inputs_of(1 + number, start=attempt + 1, device="cuda") for number in range(4)]
        want = [expected(inputs) for inputs in given]
        torch.cuda.synchronize()

        def call(number, begun=begun, runners=runners, given=given):
            begun.wait()
            return runners[number](**given[number])

        with ThreadPoolExecutor(4) as threads:
            results = list(threads.map(call, range(4)))
        assert all(map(equal, results, want))
        results.clear()
        for runner in runners:
            runner.close()


@pytest.mark.multi_gpu
@on_cuda
def test_a_runner_on_another_device_leaves_the_current_one(pool):
    with GraphRunner(scale, INPUTS, BUCKETS, pool=pool, pad={"factor": -1}) as runner:
        for rows in (3, 8, 1, 20):
            inputs = inputs_of(rows, device="cuda:1")
            results = runner(**inputs)
            assert torch.cuda.current_device() == 0
            assert results.y.device == torch.device("cuda", 1)
            assert equal(results, expected(inputs))
        with pytest.raises(DeviceMismatchError, match="x must be on device cuda:1, got cuda:0"):
            runner(**inputs_of(3, device="cuda:0"))

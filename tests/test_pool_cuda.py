"""The pool on CUDA devices: graphs, streams, physical memory, processes."""

from __future__ import annotations

import gc
import io
import threading
from concurrent.futures import ThreadPoolExecutor

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

import bufpool
from bufpool import BufpoolError, CaptureError, DeviceMismatchError, OutputPool, OutputSpec, PoolLimitError

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("nothing_left_queued")]

FORK_OPTIONS = ("-W", "ignore::DeprecationWarning")  # CPython warns about every fork of a process with threads


@pytest.fixture
def q():
    return torch.zeros(1, device="cuda")


# A single result


def test_a_result_is_contiguous_aligned_and_as_new(pool, spec, q):
    for rows in (1, 10, 333):
        outputs = pool.acquire(spec, rows, q)
        for tensor, shape, dtype in zip(outputs, ((rows, 8, 64), (rows, 8)), (torch.bfloat16, torch.float32), strict=True):
            assert tensor.shape == shape
            assert tensor.dtype is dtype
            assert tensor.device == q.device
            assert tensor.is_contiguous()
            assert tensor.data_ptr() % 256 == 0
            assert tensor.is_leaf
            assert tensor._base is None
            assert tensor.grad is None
            assert not tensor.requires_grad
            assert not tensor.is_inference()
            assert tensor.untyped_storage().nbytes() == tensor.numel() * tensor.itemsize
        write(outputs, rows % 7)
        assert holds(outputs, rows % 7)


def test_a_cuda_device_is_served_by_an_address_stable_arena(pool, spec, q):
    pool.acquire(spec, 4, q)
    stats = pool.stats()
    assert stats.arena == "cuda"
    assert stats.mapped_bytes == 4 * MIB  # one granule of 2 MiB for each of the two tensors
    assert stats.needed_bytes == 4 * (1024 + 32)
    assert stats.reserved_bytes > torch.cuda.get_device_properties(0).total_memory // 2


def test_ten_rows_are_saved_as_ten_rows(pool, spec, q):
    pool.reserve(spec, 4096, q)
    outputs = pool.acquire(spec, 10, q)
    write(outputs, 3)
    file = io.BytesIO()
    torch.save(outputs.out, file)
    assert file.tell() < 10 * 1024 + 4096
    file.seek(0)
    assert bool((torch.load(file) == 3).all())


def test_a_result_made_in_inference_mode_is_used_outside(pool, spec, q):
    with torch.inference_mode():
        first = pool.acquire(spec, 4, q)
        del first
        outputs = pool.acquire(spec, 4, q)
    weight = torch.full((1,), 2.0, device="cuda", requires_grad=True)
    outputs.lse.fill_(3)
    outputs.lse.mul_(weight)
    outputs.lse.sum().backward()
    assert weight.grad.item() == 3 * 4 * 8


def test_random_row_counts_are_bit_equal_to_fresh_tensors(pool, spec, q):
    generator = torch.Generator().manual_seed(5)
    fresh = bufpool.FreshAllocator()

    def run(allocator, seed):
        rows = int(torch.randint(1, 3000, (1,), generator=torch.Generator().manual_seed(seed)))
        outputs = allocator.acquire(spec, rows, q)
        noise = torch.randn(rows, 8, 64, device="cuda", generator=torch.Generator("cuda").manual_seed(seed))
        outputs.out.copy_(noise)
        torch.logsumexp(noise, -1, out=outputs.lse)
        return outputs

    for seed in torch.randint(0, 2**31, (200,), generator=generator).tolist():
        for mine, other in zip(run(pool, seed), run(fresh, seed), strict=True):
            assert torch.equal(mine, other)
    assert pool.stats().slots == 2  # the loop variable holds one result while the next is acquired


def test_a_dlpack_export_keeps_the_memory(pool, spec, q):
    outputs = pool.acquire(spec, 4, q)
    write(outputs, 5)
    capsule = torch.utils.dlpack.to_dlpack(outputs.lse)
    del outputs
    write(pool.acquire(spec, 4, q), 6)
    imported = torch.from_dlpack(capsule)
    assert bool((imported == 5).all())


def test_a_host_copy_does_not_keep_the_memory(pool, spec, q):
    outputs = pool.acquire(spec, 4, q)
    write(outputs, 5)
    base = outputs.lse.data_ptr()
    array = outputs.lse.cpu().numpy()
    del outputs
    again = pool.acquire(spec, 4, q)
    assert again.lse.data_ptr() == base
    write(again, 6)
    assert (array == 5).all()


def test_only_a_view_of_lse_keeps_all_of_the_result(pool, spec, q):
    outputs = pool.acquire(spec, 4, q)
    write(outputs, 5)
    view = outputs.lse[3, 2:4]
    del outputs
    write(pool.acquire(spec, 4, q), 6)
    assert view.tolist() == [5.0, 5.0]


# Growth


def test_growth_does_not_disturb_a_kernel_that_is_queued_on_the_same_slot(pool, spec, q):
    outputs = pool.acquire(spec, 64, q)
    base = pointers(outputs)
    torch.cuda._sleep(SLOW_CYCLES)
    write(outputs, 7)
    kept = [tensor.clone() for tensor in outputs]
    del outputs
    big = pool.acquire(spec, 16384, q)  # grows while the kernels above wait
    assert pointers(big) == base
    write(big, 9)
    filler = [torch.full((4 * MIB,), 11, dtype=torch.uint8, device="cuda") for _ in range(8)]
    torch.cuda.synchronize()
    assert holds(kept, 7)
    assert holds(big, 9)
    assert all(bool((part == 11).all()) for part in filler)


def test_growth_does_not_disturb_a_held_result_with_a_queued_kernel(pool, spec, q):
    outputs = pool.acquire(spec, 64, q)
    torch.cuda._sleep(SLOW_CYCLES)
    write(outputs, 7)
    big = pool.acquire(spec, 16384, q)
    write(big, 9)
    torch.cuda.synchronize()
    assert holds(outputs, 7)
    assert holds(big, 9)


def test_growth_in_steps_maps_one_buffer_of_the_final_rows(pool, spec, q):
    base = pointers(pool.acquire(spec, 1, q))
    for rows in range(41, 16385, 41):
        assert pointers(pool.acquire(spec, rows, q)) == base
    stats = pool.stats()
    out_bytes = -(-rows * 1024 // (2 * MIB)) * 2 * MIB
    lse_bytes = -(-rows * 32 // (2 * MIB)) * 2 * MIB
    assert stats.slots == 1
    assert stats.mapped_bytes == stats.peak_mapped_bytes == out_bytes + lse_bytes


def test_mapped_memory_is_seen_by_mem_get_info_and_not_by_the_caching_allocator(pool, mib_spec, q):
    pool.acquire(mib_spec, 1, q)
    torch.cuda.synchronize()
    free, _ = torch.cuda.mem_get_info()
    allocated = torch.cuda.memory_allocated()
    pool.reserve(mib_spec, 512, q)
    assert torch.cuda.mem_get_info()[0] <= free - 500 * MIB
    assert torch.cuda.memory_allocated() == allocated


# Captured graphs


def test_a_graph_replays_right_after_a_larger_eager_call(pool, spec, q, value):
    graph, outputs = captured_write(pool, spec, 64, q, value)
    base = pointers(outputs)
    big = pool.acquire(spec, 4096, q)
    write(big, 9)
    filler = [torch.full((4 * MIB,), 11, dtype=torch.uint8, device="cuda") for _ in range(8)]
    value.fill_(3)
    graph.replay()
    torch.cuda.synchronize()
    assert pointers(outputs) == base
    assert holds(outputs, 3)
    assert holds(big, 9)
    assert all(bool((part == 11).all()) for part in filler)


def test_the_very_first_acquire_may_happen_inside_a_capture(pool, spec, q, value):
    graph, outputs = captured_write(pool, spec, 64, q, value)
    eager = pool.acquire(spec, 64, q)
    write(eager, 9)
    for number in (1, 2):
        value.fill_(number)
        graph.replay()
        assert holds(outputs, number)
        assert holds(eager, 9)
    assert not set(pointers(eager)) & set(pointers(outputs))


def test_nothing_comes_from_the_private_pool_of_a_graph(pool, spec, q, value):
    def body():
        held = [pool.acquire(spec, rows, q) for rows in (64, 4096, 64)]
        for outputs in held:
            write(outputs, value)
        write(pool.acquire(spec, 16384, q), value)
        return held

    graph, held = capture(body)
    assert private_segments(graph) == []
    assert len({pointers(outputs) for outputs in held}) == 3
    # The check sees what it is meant to see: a tensor of torch's own does come from there.
    other, tensor = capture(lambda: torch.empty(3 * MIB, dtype=torch.uint8, device="cuda").fill_(1))
    assert private_segments(other) != []
    del tensor


def test_more_results_than_max_slots_in_a_capture_do_not_spill(make_pool, spec, q, value):
    pool = make_pool(max_slots=1)

    def body():
        held = [pool.acquire(spec, 64, q) for _ in range(4)]
        for outputs in held:
            write(outputs, value)
        return held

    graph, held = capture(body)
    assert private_segments(graph) == []
    assert pool.stats().spills == 0
    value.fill_(6)
    graph.replay()
    assert all(holds(outputs, 6) for outputs in held)


def test_a_result_of_a_capture_keeps_its_address_at_every_replay(pool, spec, q, value):
    graph, outputs = captured_write(pool, spec, 64, q, value)
    base = pointers(outputs)
    for number in range(5):
        value.fill_(number)
        graph.replay()
        write(pool.acquire(spec, 64 + 500 * number, q), 99)
        assert pointers(outputs) == base
        assert holds(outputs, number)


def test_dropped_results_of_a_graph_are_not_given_to_eager_calls(pool, spec, q, value):
    kept = torch.empty(64, 8, device="cuda")

    def body():
        outputs = pool.acquire(spec, 64, q)
        write(outputs, value)
        kept.copy_(outputs.lse)
        return pointers(outputs)

    graph, base = capture(body)
    eager = [pool.acquire(spec, 64, q) for _ in range(3)]
    for outputs in eager:
        assert not set(pointers(outputs)) & set(base)
        write(outputs, 9)
    value.fill_(4)
    graph.replay()
    assert bool((kept == 4).all())
    assert all(holds(outputs, 9) for outputs in eager)


def test_two_graphs_never_share_a_slot(pool, spec, q, value):
    first_graph, first = captured_write(pool, spec, 64, q, value)
    first_base = pointers(first)
    del first
    second_graph, second = captured_write(pool, spec, 64, q, value)
    assert not set(first_base) & set(pointers(second))
    value.fill_(2)
    second_graph.replay()
    value.fill_(1)
    first_graph.replay()
    assert holds(second, 2)


def test_layers_of_one_capture_share_a_slot_when_results_are_dropped(pool, spec, q, value):
    total = torch.zeros(64, 8, device="cuda")

    def body():
        for _ in range(61):
            outputs = pool.acquire(spec, 64, q)
            write(outputs, value)
            total.add_(outputs.lse)
            del outputs

    graph, _ = capture(body)
    value.fill_(2)
    graph.replay()
    assert bool((total == 122).all())
    assert pool.stats().slots == 1


def test_growth_inside_a_capture_works(pool, spec, q, value):
    small_sum = torch.zeros(1, device="cuda")

    def body():
        small = pool.acquire(spec, 64, q)
        write(small, value)
        torch.sum(small.lse, dim=(0, 1), out=small_sum[0])
        base = pointers(small)
        del small
        big = pool.acquire(spec, 16384, q)
        assert pointers(big) == base
        write(big, value)
        return big

    graph, big = capture(body)
    for number in (2, 3):
        value.fill_(number)
        graph.replay()
        assert holds(big, number)
        assert small_sum.item() == number * 64 * 8
    assert pool.stats().mapped_bytes == 16 * MIB + 2 * MIB


def test_growth_while_a_graph_lives_leaves_the_graph_right(pool, spec, q, value):
    graph, outputs = captured_write(pool, spec, 64, q, value)
    for number in range(1, 9):
        write(pool.acquire(spec, 4096 * number, q), 99)
        value.fill_(number)
        graph.replay()
        assert holds(outputs, number)


def test_an_arena_that_moves_refuses_to_grow_inside_a_capture(make_pool, spec, q, value):
    pool = make_pool(arena="torch")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        value.add_(1)
        with pytest.raises(CaptureError, match=r"reserve\(\)"):
            pool.acquire(spec, 64, q)
    graph.replay()
    assert value.item() == 1
    assert pool.stats().slots == 0
    outputs = pool.acquire(spec, 64, q)
    write(outputs, 4)
    assert holds(outputs, 4)


def test_an_arena_that_moves_serves_a_capture_after_reserve(make_pool, spec, q, value):
    pool = make_pool(arena="torch")
    pool.reserve(spec, 64, q)
    graph, outputs = captured_write(pool, spec, 64, q, value)
    base = pointers(outputs)
    write(pool.acquire(spec, 4096, q), 99)
    value.fill_(5)
    graph.replay()
    assert pointers(outputs) == base
    assert holds(outputs, 5)
    assert pool.stats().arena == "torch"


def test_the_plain_torch_arena_keeps_held_results_over_growth(make_pool, spec, q):
    pool = make_pool(arena="torch")
    outputs = pool.acquire(spec, 64, q)
    torch.cuda._sleep(SLOW_CYCLES)
    write(outputs, 7)
    kept = [tensor.clone() for tensor in outputs]
    del outputs
    big = pool.acquire(spec, 4096, q)  # the old memory is still being read
    write(big, 9)
    filler = torch.full((8 * MIB,), 11, dtype=torch.uint8, device="cuda")
    assert holds(kept, 7)
    assert holds(big, 9)
    assert bool((filler == 11).all())


def test_the_slot_of_a_graph_comes_back_after_the_graph_is_gone(pool, spec, q, value):
    graph, outputs = captured_write(pool, spec, 64, q, value)
    base = pointers(outputs)
    graph.replay()
    assert pool.stats().pinned_slots == 1
    torch.cuda.synchronize()
    del graph, outputs
    gc.collect()
    assert until(lambda: pool.stats().pinned_slots == 0)
    eager = pool.acquire(spec, 64, q)
    assert pointers(eager) == base
    assert pool.stats().slots == 1


def test_a_held_result_outlives_its_graph(pool, spec, q, value):
    graph, outputs = captured_write(pool, spec, 64, q, value)
    value.fill_(8)
    graph.replay()
    torch.cuda.synchronize()
    del graph
    gc.collect()
    assert until(lambda: pool.stats().pinned_slots == 0)
    eager = pool.acquire(spec, 64, q)
    write(eager, 9)
    assert not set(pointers(eager)) & set(pointers(outputs))
    assert holds(outputs, 8)


def test_graphs_made_and_dropped_in_turn_do_not_pile_up_slots(pool, spec, q, value):
    for number in range(20):
        graph, outputs = captured_write(pool, spec, 64, q, value)
        value.fill_(number)
        graph.replay()
        assert holds(outputs, number)
        torch.cuda.synchronize()
        del graph, outputs
        gc.collect()
        assert until(lambda: pool.stats().pinned_slots == 0)
        pool.reserve(spec, 1, q)  # an eager call collects what came back; a capture does not
    assert pool.stats().slots <= 2


def test_trim_gives_back_nothing_that_a_graph_contains(pool, spec, q, value):
    graph, outputs = captured_write(pool, spec, 64, q, value)
    base = pointers(outputs)
    del outputs
    pool.acquire(spec, 4096, q)
    pool.trim()
    pool.trim()
    graph.replay()
    torch.cuda.synchronize()
    lane = next(lane for lane in pool.stats().lanes if lane.capture is not None)
    assert lane.mapped_bytes == 4 * MIB
    assert not set(pointers(pool.acquire(spec, 64, q))) & set(base)


def test_inputs_in_another_thread_may_be_served_during_a_capture(pool, spec, q, value):
    pool.acquire(spec, 64, q)
    graph = torch.cuda.CUDAGraph()
    with ThreadPoolExecutor(1) as executor, torch.cuda.graph(graph):
        outputs = pool.acquire(spec, 64, q)
        write(outputs, value)
        # Growth in another thread, on another stream, while this one captures in the strictest mode.
        other = executor.submit(pool.acquire, spec, 4096, q).result()
        write(outputs, value)
    assert not set(pointers(other)) & set(pointers(outputs))
    write(other, 9)
    value.fill_(3)
    graph.replay()
    assert holds(outputs, 3)
    assert holds(other, 9)


@pytest.mark.parametrize("call", ["trim", "sleep"])
def test_memory_is_not_taken_away_during_a_capture_in_another_thread(pool, spec, q, value, call):
    pool.acquire(spec, 64, q)
    mapped = pool.stats().mapped_bytes
    graph = torch.cuda.CUDAGraph()
    with ThreadPoolExecutor(1) as executor, torch.cuda.graph(graph):
        outputs = pool.acquire(spec, 64, q)
        write(outputs, value)
        error = executor.submit(getattr(pool, call)).exception()
        write(outputs, value)
    assert isinstance(error, CaptureError)
    assert call in str(error)
    assert pool.stats().mapped_bytes == mapped + 4 * MIB
    value.fill_(3)
    graph.replay()
    assert holds(outputs, 3)


def test_nothing_is_evicted_during_a_capture_in_another_thread(make_pool, spec, mib_spec, q, value):
    pool = make_pool(max_bytes=20 * MIB)
    pool.reserve(spec, 64, q)  # for the capture
    pool.acquire(mib_spec, 10, q)  # idle from here on: what an eviction would take
    graph = torch.cuda.CUDAGraph()
    other_spec = OutputSpec(other=((MIB,), torch.uint8))
    with ThreadPoolExecutor(1) as executor, torch.cuda.graph(graph):
        outputs = pool.acquire(spec, 64, q)
        write(outputs, value)
        error = executor.submit(pool.acquire, other_spec, 10, q).exception()
        write(outputs, value)
    assert isinstance(error, PoolLimitError)
    assert (error.need, error.limit) == (10 * MIB, 20 * MIB)
    value.fill_(3)
    graph.replay()
    assert holds(outputs, 3)
    assert pool.acquire(other_spec, 10, q).other.shape == (10, MIB)  # the capture is over


def test_closing_a_pool_during_a_capture_leaves_the_capture_right(make_pool, spec, q, value):
    pool, closed = make_pool(), make_pool()
    closed.acquire(spec, 64, q)
    graph = torch.cuda.CUDAGraph()
    with ThreadPoolExecutor(1) as executor, torch.cuda.graph(graph):
        outputs = pool.acquire(spec, 64, q)
        write(outputs, value)
        executor.submit(closed.close).result()
        write(outputs, value)
    value.fill_(3)
    graph.replay()
    assert holds(outputs, 3)


def test_a_pool_collected_during_a_capture_leaves_the_capture_right(pool, spec, q, value):
    gone = OutputPool()
    gone.acquire(spec, 64, q)

    def body():
        nonlocal gone
        outputs = pool.acquire(spec, 64, q)
        write(outputs, value)
        gone = None
        gc.collect()
        big = pool.acquire(spec, 4096, q)
        write(big, value)
        return outputs, big

    graph, (outputs, big) = capture(body)
    value.fill_(3)
    graph.replay()
    assert holds(outputs, 3)
    assert holds(big, 3)


def test_a_graph_still_replays_after_its_pool_is_closed(pool, spec, q, value):
    graph, outputs = captured_write(pool, spec, 64, q, value)
    pool.close()
    OutputPool().acquire(spec, 64, q)  # a slow path of another pool releases what it may
    value.fill_(3)
    graph.replay()
    assert holds(outputs, 3)


def test_a_graph_whose_results_are_dropped_still_replays_after_its_pool_is_closed(pool, spec, q, value):
    kept = torch.empty(64, 8, device="cuda")

    def body():
        outputs = pool.acquire(spec, 64, q)
        write(outputs, value)
        kept.copy_(outputs.lse)

    graph, _ = capture(body)
    pool.close()
    OutputPool().acquire(spec, 64, q)
    value.fill_(3)
    graph.replay()
    assert bool((kept == 3).all())


# Streams


def test_two_streams_never_overwrite_each_other(pool, spec, q):
    rounds, rows = 1000, 256
    streams = [torch.cuda.Stream(), torch.cuda.Stream()]
    wrong = [torch.zeros((), dtype=torch.int64, device="cuda") for _ in streams]
    torch.cuda.synchronize()
    for number in range(rounds):
        held = []
        for place, stream in enumerate(streams):
            with torch.cuda.stream(stream):
                outputs = pool.acquire(spec, rows, q)
                write(outputs, (2 * number + place) % 200)
                held.append(outputs)
        for place, stream in enumerate(streams):
            with torch.cuda.stream(stream):
                wrong[place].add_((held[place].lse != (2 * number + place) % 200).sum())
                wrong[place].add_((held[place].out != (2 * number + place) % 200).sum())
        del held, outputs
    torch.cuda.synchronize()
    assert [int(count) for count in wrong] == [0, 0]
    assert pool.stats().slots == 2


def test_each_stream_has_a_lane_of_its_own(pool, spec, q):
    streams = [torch.cuda.Stream() for _ in range(3)]
    bases = [pool.acquire(spec, 4, q).out.data_ptr()]
    for stream in streams:
        with torch.cuda.stream(stream):
            bases.append(pool.acquire(spec, 4, q).out.data_ptr())
    assert len(set(bases)) == 4
    assert {lane.stream for lane in pool.stats().lanes} == {0, *(stream.cuda_stream for stream in streams)}
    assert [lane.slots for lane in pool.stats().lanes] == [1, 1, 1, 1]


def test_the_first_use_may_happen_on_a_side_stream(pool, spec, q):
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        outputs = pool.acquire(spec, 64, q)
        write(outputs, 3)
        assert holds(outputs, 3)
    assert [lane.stream for lane in pool.stats().lanes] == [stream.cuda_stream]


def test_the_per_thread_default_stream_is_another_one_in_every_thread(pool, spec, q):
    def base():
        with torch.cuda.stream(torch.cuda.ExternalStream(2)):  # cudaStreamPerThread
            return pool.acquire(spec, 4, q).out.data_ptr()

    bases = []
    barrier = threading.Barrier(2)

    def work():
        bases.append(base())
        barrier.wait()  # both threads live at once: an identity is not used twice

    threads = [threading.Thread(target=work) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(set(bases)) == 2
    assert base() == base()


def test_a_reader_on_another_stream_is_waited_for(pool, spec, q):
    producer, reader = torch.cuda.Stream(), torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.cuda.stream(producer):
        outputs = pool.acquire(spec, 4096, q)
        write(outputs, 5)
        ready = producer.record_event()
    reader.wait_event(ready)
    with torch.cuda.stream(reader):
        torch.cuda._sleep(SLOW_CYCLES)
        copies = [tensor.clone() for tensor in outputs]
    pool.record_stream(outputs, reader)
    del outputs
    with torch.cuda.stream(producer):
        write(pool.acquire(spec, 4096, q), 9)
    torch.cuda.synchronize()
    assert holds(copies, 5)


def test_work_that_a_reader_queues_after_record_stream_counts_too(pool, spec, q):
    producer, reader = torch.cuda.Stream(), torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.cuda.stream(producer):
        outputs = pool.acquire(spec, 4096, q)
        write(outputs, 5)
    pool.record_stream(outputs, reader)
    reader.wait_stream(producer)
    with torch.cuda.stream(reader):
        torch.cuda._sleep(SLOW_CYCLES)
        copies = [tensor.clone() for tensor in outputs]
    del outputs
    with torch.cuda.stream(producer):
        write(pool.acquire(spec, 4096, q), 9)
    torch.cuda.synchronize()
    assert holds(copies, 5)


def test_a_reader_is_waited_for_when_the_memory_grows(pool, spec, q):
    reader = torch.cuda.Stream()
    outputs = pool.acquire(spec, 64, q)
    write(outputs, 5)
    reader.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(reader):
        torch.cuda._sleep(SLOW_CYCLES)
        copies = [tensor.clone() for tensor in outputs]
    pool.record_stream(outputs.out, reader)
    del outputs
    write(pool.acquire(spec, 16384, q), 9)
    torch.cuda.synchronize()
    assert holds(copies, 5)


def test_record_stream_of_a_view_counts(pool, spec, q):
    reader = torch.cuda.Stream()
    outputs = pool.acquire(spec, 4096, q)
    write(outputs, 5)
    reader.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(reader):
        torch.cuda._sleep(SLOW_CYCLES)
        copy = outputs.out[100:].clone()
    pool.record_stream(outputs.out[100:], reader)
    del outputs
    write(pool.acquire(spec, 4096, q), 9)
    torch.cuda.synchronize()
    assert bool((copy == 5).all())


def test_record_stream_refuses_a_result_of_another_pool(make_pool, spec, q):
    mine, other = make_pool(), make_pool()
    outputs = other.acquire(spec, 4, q)
    with pytest.raises(ValueError, match="another pool"):
        mine.record_stream(outputs, torch.cuda.Stream())


def test_record_stream_passes_a_spilled_result_on_to_torch(make_pool, spec, q):
    pool = make_pool(max_slots=1)
    held = pool.acquire(spec, 4, q)
    spilled = pool.acquire(spec, 4, q)
    pool.record_stream(spilled, torch.cuda.Stream())
    assert pool.stats().spills == 1
    write(held, 1)
    assert holds(held, 1)


@pytest.mark.parametrize("kind", ["tensor", "capsule"])
def test_a_reader_of_a_spilled_result_is_waited_for_whatever_keeps_it(make_pool, spec, q, kind):
    pool = make_pool(max_slots=1)
    held = pool.acquire(spec, 4096, q)
    reader = torch.cuda.Stream()
    kept = [*pool.acquire(spec, 4096, q)]
    assert pool.stats().spills == 1
    write(kept, 5)
    former = {tensor.data_ptr() for tensor in kept}
    if kind == "capsule":
        capsules = [torch.utils.dlpack.to_dlpack(tensor) for tensor in kept]
        kept = [torch.from_dlpack(capsule) for capsule in capsules]
    reader.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(reader):
        torch.cuda._sleep(SLOW_CYCLES)
        copies = [tensor.clone() for tensor in kept]
    pool.record_stream(kept, reader)
    kept.clear()
    others = [pool.acquire(spec, 4096, q) for _ in range(4)]
    assert pool.stats().spills == 5
    assert not former & {tensor.data_ptr() for outputs in others for tensor in outputs}
    for outputs in others:
        write(outputs, 9)
    torch.cuda.synchronize()
    assert holds(copies, 5)
    del held


def test_record_stream_says_what_it_wants(pool, spec, q):
    outputs = pool.acquire(spec, 4, q)
    with pytest.raises(TypeError, match=r"expected a torch\.cuda\.Stream, got 'side'"):
        pool.record_stream(outputs, "side")
    with pytest.raises(TypeError, match="expected tensors, got 3"):
        pool.record_stream([3], torch.cuda.Stream())
    with pytest.raises(ValueError, match="on a CUDA device, got one on cpu"):
        pool.record_stream(torch.empty(3), torch.cuda.Stream())


def test_growth_on_a_side_stream_leaves_what_the_default_stream_still_reads(pool, spec, q):
    side = torch.cuda.Stream()
    outputs = pool.acquire(spec, 64, q)
    write(outputs, 5)
    with torch.cuda.stream(side):
        write(pool.acquire(spec, 64, q), 8)
    torch.cuda._sleep(SLOW_CYCLES)
    copies = [tensor.clone() for tensor in outputs]
    del outputs
    with torch.cuda.stream(side):
        big = pool.acquire(spec, 16384, q)
        write(big, 9)
    torch.cuda.synchronize()
    assert holds(copies, 5)
    assert holds(big, 9)


# Giving memory back


def test_trim_while_kernels_run_takes_no_memory_away_from_them(pool, spec, q):
    total = torch.zeros((), device="cuda")
    for number in range(200):
        outputs = pool.acquire(spec, 1 + (number * 977) % 8192, q)
        torch.cuda._sleep(100_000)
        write(outputs, number)
        total.add_(outputs.lse[-1, -1])
        del outputs
        pool.trim()
    assert total.item() == sum(range(200))
    assert pool.stats().mapped_bytes == 0


def test_trim_keeps_the_rows_of_a_held_result(pool, spec, q):
    pool.reserve(spec, 16384, q)
    outputs = pool.acquire(spec, 64, q)
    write(outputs, 5)
    pool.trim()
    assert holds(outputs, 5)
    base = pointers(outputs)
    del outputs
    pool.trim()
    assert pool.stats().mapped_bytes == 0
    again = pool.acquire(spec, 8192, q)
    assert pointers(again) == base
    write(again, 6)
    assert holds(again, 6)


def test_a_lane_that_nobody_used_goes_at_the_second_trim(pool, spec, q):
    with torch.cuda.stream(torch.cuda.Stream()):
        pool.acquire(spec, 4, q)
    pool.trim()
    pool.acquire(spec, 4, q)
    pool.trim()
    assert [lane.stream for lane in pool.stats().lanes] == [0]
    assert pool.stats().slots == 1


def test_a_graph_replays_after_sleep_and_wake(pool, spec, mib_spec, q, value):
    graph, outputs = captured_write(pool, spec, 16384, q, value)
    base = pointers(outputs)
    pool.acquire(mib_spec, 512, q)
    mapped = pool.stats().mapped_bytes
    torch.cuda.synchronize()
    free_awake, _ = torch.cuda.mem_get_info()

    pool.sleep()
    free_asleep, _ = torch.cuda.mem_get_info()
    assert pool.stats().mapped_bytes == 0
    assert free_asleep - free_awake >= mapped
    with pytest.raises(BufpoolError, match=r"wake\(\)"):
        pool.acquire(spec, 4, q)
    filler = torch.full((256 * MIB,), 11, dtype=torch.uint8, device="cuda")

    pool.wake()
    assert pool.stats().mapped_bytes == mapped
    value.fill_(3)
    graph.replay()
    assert pointers(outputs) == base
    assert holds(outputs, 3)
    assert bool((filler == 11).all())


def test_sleep_waits_for_queued_kernels(pool, spec, q):
    outputs = pool.acquire(spec, 4096, q)
    torch.cuda._sleep(SLOW_CYCLES)
    write(outputs, 5)
    copies = [tensor.clone() for tensor in outputs]
    del outputs
    pool.sleep()
    assert holds(copies, 5)
    pool.wake()


def test_sleep_refuses_while_an_eager_result_is_live(pool, spec, q):
    held = [pool.acquire(spec, 4, q) for _ in range(3)]
    with pytest.raises(BufpoolError, match="got 3"):
        pool.sleep()
    write(held[1], 4)
    assert holds(held[1], 4)


def test_an_address_is_the_same_after_sleep_and_wake(pool, spec, q):
    base = pointers(pool.acquire(spec, 4096, q))
    for _ in range(3):
        pool.sleep()
        pool.wake()
        outputs = pool.acquire(spec, 4096, q)
        assert pointers(outputs) == base
        write(outputs, 5)
        assert holds(outputs, 5)
        del outputs


def test_idle_slots_make_room_under_max_bytes(make_pool, spec, mib_spec, q):
    pool = make_pool(max_bytes=16 * MIB)
    other_spec = OutputSpec(other=((MIB,), torch.uint8))
    first = pool.acquire(mib_spec, 10, q)
    base = first.block.data_ptr()
    torch.cuda._sleep(SLOW_CYCLES)
    first.block.fill_(5)
    copy = first.block.clone()
    del first
    other = pool.acquire(other_spec, 12, q)  # evicts what the kernels above still use
    other.other.fill_(9)
    assert bool((copy == 5).all())
    assert bool((other.other == 9).all())
    assert pool.stats().mapped_bytes == 12 * MIB
    with pytest.raises(PoolLimitError) as failure:
        pool.acquire(mib_spec, 10, q)
    assert (failure.value.need, failure.value.have, failure.value.limit) == (10 * MIB, 12 * MIB, 16 * MIB)
    del other
    assert pool.acquire(mib_spec, 10, q).block.data_ptr() == base


def test_growth_needs_room_only_for_the_difference(pool, mib_spec, q):
    outputs = pool.acquire(mib_spec, 10 * 1024, q)
    base = outputs.block.data_ptr()
    outputs.block[-1].fill_(1)
    del outputs
    filler = fill_card(3 * GIB)
    big = pool.acquire(mib_spec, 12 * 1024, q)
    big.block[-1].fill_(7)
    assert big.block.data_ptr() == base
    assert bool((big.block[-1] == 7).all())
    assert pool.stats().mapped_bytes == pool.stats().peak_mapped_bytes == 12 * GIB
    del filler


def test_memory_in_the_cache_of_torch_counts_as_available(pool, mib_spec, q):
    filler = fill_card(GIB)
    del filler  # torch keeps it
    assert torch.cuda.mem_get_info()[0] < 2 * GIB
    outputs = pool.acquire(mib_spec, 12 * 1024, q)
    outputs.block[-1].fill_(7)
    assert bool((outputs.block[-1] == 7).all())


def test_idle_slots_count_as_available_when_the_device_is_full(pool, mib_spec, q):
    pool.acquire(mib_spec, 4096, q)
    filler = fill_card(GIB)
    other_spec = OutputSpec(other=((MIB,), torch.uint8))
    outputs = pool.acquire(other_spec, 4096, q)
    outputs.other[-1].fill_(7)
    assert bool((outputs.other[-1] == 7).all())
    assert pool.stats().mapped_bytes == 4 * GIB
    del filler


def test_a_full_device_is_a_limit_error_and_the_pool_stays_usable(pool, mib_spec, q):
    held = pool.acquire(mib_spec, 64, q)
    held.block.fill_(5)
    mapped = pool.stats().mapped_bytes
    filler = fill_card(GIB)
    with pytest.raises(PoolLimitError, match="bytes") as failure:
        pool.acquire(mib_spec, 4096, q)
    assert failure.value.need == 4 * GIB
    assert pool.stats().mapped_bytes == mapped
    assert pool.stats().slots == 1
    assert bool((held.block == 5).all())
    del filler
    outputs = pool.acquire(mib_spec, 64, q)
    outputs.block.fill_(6)
    assert bool((outputs.block == 6).all())
    assert bool((held.block == 5).all())


def test_a_full_device_inside_a_capture_is_a_limit_error_and_leaves_the_capture_right(pool, spec, mib_spec, q, value):
    filler = fill_card(GIB)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outputs = pool.acquire(spec, 64, q)
        write(outputs, value)
        with pytest.raises(PoolLimitError):
            pool.acquire(mib_spec, 8192, q)
        write(outputs, value)
    value.fill_(3)
    graph.replay()
    assert holds(outputs, 3)
    del filler


def test_more_rows_than_the_device_has_memory_for_are_a_limit_error(pool, mib_spec, q):
    with pytest.raises(PoolLimitError, match="bytes"):
        pool.acquire(mib_spec, 2**20, q)
    assert pool.stats().mapped_bytes == 0
    assert pool.acquire(mib_spec, 2, q).block.shape == (2, MIB)


# Life and death of pools


def test_results_of_a_closed_pool_stay_readable(pool, spec, q):
    outputs = pool.acquire(spec, 64, q)
    write(outputs, 5)
    pool.close()
    with pytest.raises(BufpoolError, match="closed"):
        pool.acquire(spec, 64, q)
    other = OutputPool().acquire(spec, 64, q)
    write(other, 9)
    assert holds(outputs, 5)


def test_results_of_a_collected_pool_stay_readable_and_their_memory_comes_back(spec, mib_spec, q):
    pool = OutputPool()
    outputs = pool.acquire(mib_spec, 512, q)
    outputs.block.fill_(5)
    del pool
    gc.collect()
    with OutputPool() as other:
        other.acquire(spec, 64, q)
        assert bool((outputs.block == 5).all())
        torch.cuda.synchronize()
        free, _ = torch.cuda.mem_get_info()
        del outputs
        other.acquire(spec, 8192, q)  # a slow path takes back what nobody holds any more
        assert torch.cuda.mem_get_info()[0] >= free + 400 * MIB


def test_two_pools_share_no_memory(make_pool, spec, q):
    pools = [make_pool(), make_pool()]
    bases = [pointers(pool.acquire(spec, 64, q)) for pool in pools]
    assert not set(bases[0]) & set(bases[1])
    pools[0].close()
    outputs = pools[1].acquire(spec, 64, q)
    write(outputs, 3)
    assert holds(outputs, 3)


def test_the_interpreter_ends_quietly_with_live_pools_graphs_and_results(run_script):
    done = run_script(
        """
        import logging, threading, torch, bufpool
        logging.disable()
        spec = bufpool.OutputSpec(out=((8, 64), torch.bfloat16), lse=((8,), torch.float32))
        q = torch.zeros(1, device="cuda")
        pool, other = bufpool.OutputPool(trace=True), bufpool.default_pool()
        held = [pool.acquire(spec, 64, q), other.acquire(spec, 64, q)]
        held += [pool.acquire(spec, 64, q) for _ in range(10)]  # some spill
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            captured = pool.acquire(spec, 64, q)
            captured.out.fill_(1)
        graph.replay()
        threading.Thread(target=threading.Event().wait, daemon=True).start()
        print(int(captured.out.sum()))
        """
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert int(done.stdout) == 64 * 8 * 64


@pytest.mark.parametrize("side", [False, True], ids=["default stream", "side stream"])
@pytest.mark.parametrize("used", [False, True], ids=["unused pool", "used pool"])
def test_a_forked_child_gets_a_clear_error_for_cuda_and_may_use_the_host(run_script, side, used):
    done = run_script(
        f"""
        import os, torch, bufpool
        spec = bufpool.OutputSpec(out=((8, 64), torch.bfloat16), lse=((8,), torch.float32))
        q, host = torch.zeros(1, device="cuda"), torch.zeros(1)
        pool = bufpool.OutputPool()
        if {side}:
            torch.cuda.set_stream(torch.cuda.Stream())
        if {used}:
            outputs = pool.acquire(spec, 8, q)
        torch.cuda.synchronize()
        child = os.fork()
        if child == 0:
            code = 9
            try:
                pool.acquire(spec, 8, q)
            except bufpool.BufpoolError as error:
                os.write(1, str(error).encode())
                on_host = pool.acquire(spec, 8, host)
                on_host.lse.fill_(3)
                pool.trim()
                pool.stats()
                pool.close()
                code = 0 if bool((on_host.lse == 3).all()) else 8
            finally:
                os._exit(code)
        _, status = os.waitpid(child, 0)
        after = pool.acquire(spec, 8, q)
        after.lse.fill_(4)
        assert bool((after.lse == 4).all())
        raise SystemExit(os.waitstatus_to_exitcode(status))
        """,
        options=FORK_OPTIONS,
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert "fork" in done.stdout
    assert "spawn" in done.stdout


def test_a_spawned_child_may_use_a_pool_of_its_own(run_script, tmp_path):
    script = tmp_path / "spawns.py"
    script.write_text(
        "import multiprocessing, torch, bufpool\n"
        "SPEC = bufpool.OutputSpec(lse=((8,), torch.float32))\n"
        "def work(spec):\n"
        "    lse, = bufpool.default_pool().acquire(spec, 8, torch.zeros(1, device='cuda'))\n"
        "    return lse.fill_(3).sum().item()\n"
        "if __name__ == '__main__':\n"
        "    held = bufpool.default_pool().acquire(SPEC, 8, torch.zeros(1, device='cuda'))\n"
        "    with multiprocessing.get_context('spawn').Pool(1) as workers:\n"
        "        print(workers.apply(work, (SPEC,)))\n"
    )
    done = run_script(script)
    assert done.returncode == 0, done.stderr
    assert float(done.stdout) == 3 * 8 * 8


# Devices


def test_the_host_and_the_device_have_lanes_of_their_own(pool, spec, q):
    host = torch.zeros(1)
    for _ in range(3):
        assert pool.acquire(spec, 4, q).out.device == q.device
        assert pool.acquire(spec, 4, host).out.device == host.device
    assert {lane.device for lane in pool.stats().lanes} == {"cpu", "cuda:0"}
    assert pool.stats().slots == 2


def test_pinned_memory_is_host_memory(pool, spec):
    outputs = pool.acquire(spec, 4, torch.zeros(1).pin_memory())
    assert outputs.out.device == torch.device("cpu")
    assert not outputs.out.is_pinned()


def test_inputs_on_host_and_device_are_an_error_that_names_both(pool, spec, q):
    with pytest.raises(DeviceMismatchError, match=r"kv must be on device cuda:0, got cpu.*q is on cuda:0"):
        pool.acquire(spec, 4, {"q": q, "kv": torch.zeros(1)})


@pytest.mark.multi_gpu
def test_outputs_live_where_the_inputs_live_and_the_current_device_stays(pool, spec):
    for index in (1, 0, 1):
        like = torch.zeros(1, device=f"cuda:{index}")
        outputs = pool.acquire(spec, 64, like)
        assert torch.cuda.current_device() == 0
        assert {tensor.device for tensor in outputs} == {like.device}
        write(outputs, index)
        assert holds(outputs, index)
    assert {lane.device for lane in pool.stats().lanes} == {"cuda:0", "cuda:1"}


@pytest.mark.multi_gpu
def test_a_capture_on_one_device_works_while_another_is_current(pool, spec):
    like = torch.zeros(1, device="cuda:1")
    number = torch.zeros(1, device="cuda:1")
    with torch.cuda.device(1):
        stream = torch.cuda.Stream()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.device(1), torch.cuda.graph(graph, stream=stream), torch.cuda.device(0):
        outputs = pool.acquire(spec, 64, like)
        assert torch.cuda.current_device() == 0
        write(outputs, number)
    assert torch.cuda.current_device() == 0
    assert pool.stats().lanes[0].capture is not None
    number.fill_(3)
    with torch.cuda.device(1):
        graph.replay()
        torch.cuda.synchronize()
    assert holds(outputs, 3)


@pytest.mark.multi_gpu
def test_a_pool_is_made_used_and_closed_while_another_device_is_current(spec):
    like = torch.zeros(1, device="cuda:1")
    with torch.cuda.device(0), OutputPool() as pool:
        write(pool.acquire(spec, 4096, like), 1)
        pool.trim()
        write(pool.acquire(spec, 64, like), 2)
        pool.sleep()
        pool.wake()
        assert torch.cuda.current_device() == 0
    assert torch.cuda.current_device() == 0


@pytest.mark.multi_gpu
def test_results_on_two_devices_can_be_copied_to_each_other(pool, spec):
    first = pool.acquire(spec, 64, torch.zeros(1, device="cuda:0"))
    second = pool.acquire(spec, 64, torch.zeros(1, device="cuda:1"))
    write(first, 3)
    for source, target in zip(first, second, strict=True):
        target.copy_(source)
    assert holds(second, 3)

"""One pool on two CUDA devices: results live where the inputs live, whatever device is current."""

from __future__ import annotations

import os
import socket

import pytest
import torch
import torch.distributed
import torch.multiprocessing

import bufpool
from bufpool import DeviceMismatchError, OutputSpec

pytestmark = [pytest.mark.gpu, pytest.mark.multi_gpu]

SPEC = OutputSpec(out=((8, 64), torch.bfloat16), lse=((8,), torch.float32))


def input_on(index):
    return torch.zeros(1, device=f"cuda:{index}")


def test_results_live_with_their_inputs_and_the_current_device_stays():  # flashinfer#924, FlashMLA#158
    with bufpool.OutputPool() as pool:
        for index in (1, 0, 1):
            outputs = pool.acquire(SPEC, 100, input_on(index))
            assert {tensor.device for tensor in outputs} == {torch.device("cuda", index)}
            outputs.out.fill_(index)
            assert bool((outputs.out == index).all())
            assert torch.cuda.current_device() == 0
        del outputs
        assert sorted(lane.device for lane in pool.stats().lanes) == ["cuda:0", "cuda:1"]


def test_one_thread_that_alternates_devices_never_mixes_them():  # surogate#165
    with bufpool.OutputPool() as pool:
        q = [input_on(0), input_on(1)]
        bases = [set(), set()]
        for step in range(200):
            outputs = pool.acquire(SPEC, 1 + step % 50, q[step % 2])
            assert outputs.out.device.index == step % 2
            bases[step % 2].add(outputs.out.data_ptr())
        del outputs
        assert not bases[0] & bases[1]
        assert len(pool.stats().lanes) == 2


def test_a_pool_is_made_used_and_closed_while_another_device_is_current():  # rmm#1405
    with torch.cuda.device(1):
        pool = bufpool.OutputPool()
        outputs = pool.acquire(SPEC, 64, input_on(0))
        outputs.lse.fill_(3)
        assert torch.cuda.current_device() == 1
    with torch.cuda.device(0):
        held = pool.acquire(SPEC, 5000, input_on(1))
        held.lse.fill_(4)
    pool.trim()
    assert bool((outputs.lse == 3).all())
    assert bool((held.lse == 4).all())
    pool.close()
    assert bool((held.lse == 4).all())
    assert torch.cuda.current_device() == 0


def test_inputs_on_two_devices_are_an_error_that_names_both():
    with bufpool.OutputPool() as pool:
        with pytest.raises(DeviceMismatchError, match=r"kv must be on device cuda:0, got cuda:1 \(q is on cuda:0\)"):
            pool.acquire(SPEC, 5, {"q": input_on(0), "kv": input_on(1)})
        assert pool.stats().slots == 0


@pytest.mark.parametrize(("home", "other"), [(0, 1), (1, 0)])
def test_results_can_be_copied_from_and_to_another_device(home, other):
    with bufpool.OutputPool() as pool:
        outputs = pool.acquire(SPEC, 3000, input_on(home))
        outputs.out.copy_(torch.arange(3000 * 512, device=f"cuda:{home}").remainder(251).view(3000, 8, 64))
        moved = outputs.out.to(f"cuda:{other}")
        back = pool.acquire(SPEC, 3000, input_on(other))
        back.out.copy_(outputs.out)
        torch.cuda.synchronize(home)
        torch.cuda.synchronize(other)
        assert torch.equal(moved.cpu(), outputs.out.cpu())
        assert torch.equal(back.out.cpu(), outputs.out.cpu())


def test_limits_and_sleep_count_for_each_device():
    with bufpool.OutputPool() as pool:
        for index in (0, 1):
            pool.reserve(SPEC, 10000, input_on(index))
        mapped = pool.stats().mapped_bytes
        free = [torch.cuda.mem_get_info(index)[0] for index in (0, 1)]
        pool.sleep()
        assert all(torch.cuda.mem_get_info(index)[0] > free[index] for index in (0, 1))
        pool.wake()
        assert pool.stats().mapped_bytes == mapped
        assert torch.cuda.current_device() == 0


def gather(rank, port, results):
    os.environ.update(MASTER_ADDR="localhost", MASTER_PORT=str(port))
    torch.cuda.set_device(rank)
    torch.distributed.init_process_group("nccl", rank=rank, world_size=2, device_id=torch.device("cuda", rank))
    with bufpool.OutputPool() as pool:
        mine = pool.acquire(SPEC, 500, input_on(rank))
        mine.out.fill_(rank + 1)
        both = [torch.empty_like(mine.out) for _ in range(2)]
        torch.distributed.all_gather(both, mine.out)
        torch.distributed.all_reduce(mine.out)
        torch.cuda.synchronize()
        results[rank] = [float(both[0].min()), float(both[1].max()), float(mine.out.min()), float(mine.out.max())]
        del mine
    torch.distributed.destroy_process_group()


def test_collectives_read_and_write_results(unused_port):
    with torch.multiprocessing.Manager() as manager:
        results = manager.dict()
        torch.multiprocessing.spawn(gather, (unused_port, results), nprocs=2)
        assert dict(results) == {0: [1, 2, 3, 3], 1: [1, 2, 3, 3]}


@pytest.fixture
def unused_port():
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        return probe.getsockname()[1]


def test_default_streams_of_two_devices_are_two_readers():
    with bufpool.OutputPool() as pool:
        streams = [torch.cuda.default_stream(0), torch.cuda.default_stream(1)]
        outputs = pool.acquire(SPEC, 100, input_on(0))
        for stream in streams:
            pool.record_stream(outputs, stream)
        (slot,) = pool._slots
        assert slot.readers == streams
        del outputs


def test_an_arena_of_torch_sees_a_capture_on_the_device_that_is_not_current():
    with bufpool.OutputPool(arena="torch") as pool:
        q, stream = input_on(1), torch.cuda.Stream(1)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.device(1), torch.cuda.graph(graph, stream=stream):
            q.add_(1)
            with torch.cuda.device(0), pytest.raises(bufpool.CaptureError, match="before the capture"):
                pool.acquire(SPEC, 100, q)
        assert pool.stats().mapped_bytes == 0

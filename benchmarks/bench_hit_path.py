"""Where does each tenth of a microsecond of a hit go?

Asked: the host time of every step of ``OutputPool.acquire`` on its hit path, taken alone, beside the whole call and three
``torch.empty``, in one run. Not measured: growth, rotation, spills, the kernel.

    python benchmarks/bench_hit_path.py [--device cuda]
"""

from __future__ import annotations

import platform
import threading
import time
from collections.abc import Callable

import torch

import bufpool
from bufpool import torch_state
from bufpool.cli.usage import Parser, UsageError, open_device
from bufpool.handout import PostHandout

ROWS = 16
HEADS = 16
CALLS = 1500
ROUNDS = 40


def best_us(steps: dict[str, Callable[[], object]]) -> dict[str, float]:
    """Least time of a call of each step, in us, rounds of all steps alternating; an empty function's time is taken off."""
    best = dict.fromkeys(steps, float("inf"))
    for _ in range(ROUNDS):
        for name, step in steps.items():
            step()
            start = time.perf_counter_ns()
            for _ in range(CALLS):
                step()
            best[name] = min(best[name], (time.perf_counter_ns() - start) / CALLS / 1000)
    idle = best["(empty function)"]
    return {name: us - idle for name, us in best.items() if name != "(empty function)"}


def steps_of(device: torch.device) -> dict[str, Callable[[], object]]:
    spec = bufpool.OutputSpec(
        out=((HEADS, 512), torch.bfloat16), max_logits=((HEADS,), torch.float32), lse=((HEADS,), torch.float32)
    )
    q = torch.zeros(ROWS, HEADS, 64, device=device)
    pool = bufpool.OutputPool()
    pool.reserve(spec, ROWS, q)
    pool.acquire(spec, rows=ROWS, like=q)
    (lane,) = pool._lanes.values()
    handout = lane.slots[0].handout
    assert isinstance(handout, PostHandout)
    capsule, name, state = handout._places[0]
    states = handout._states
    name_address = name[0]
    lock = threading.RLock()

    def three_empty() -> None:
        torch.empty((ROWS, HEADS, 512), dtype=torch.bfloat16, device=device)
        torch.empty((ROWS, HEADS), dtype=torch.float32, device=device)
        torch.empty((ROWS, HEADS), dtype=torch.float32, device=device)

    def one_tensor() -> None:
        states[state] = 1
        name[0] = bufpool.handout._NAME  # type: ignore[attr-defined]
        torch_state.from_dlpack(capsule)

    def with_lock() -> None:
        with lock:
            pass

    def named_tuple() -> None:
        tuple.__new__(spec.outputs_type, [1, 2, 3])

    def find_lane() -> None:
        pool._quick.get((0, 0, spec.key))

    assert name_address
    steps: dict[str, Callable[[], object]] = {
        "(empty function)": lambda: None,
        "three torch.empty": three_empty,
        "acquire, whole": lambda: pool.acquire(spec, rows=ROWS, like=q),
        "  lane.take (all tensors)": lambda: lane.take(ROWS),
        "    of it: one tensor from its capsule": one_tensor,
        "    of it: named tuple": named_tuple,
        "  lock": with_lock,
        "  find the lane": find_lane,
        "  device of like": lambda: q.get_device(),
        "  is torch.compile tracing": torch_state.is_tracing,
        "  is a dispatch mode active": torch_state.dispatch_depth,
        "  is a torch.func transform active": torch_state.transform_level,
        "  is torch.jit.trace recording": torch_state.is_jit_tracing,
        "  is make_fx recording before dispatch": torch_state.is_pre_dispatch_tracing,
        "  is inference mode on": torch_state.is_inference,
    }
    if device.type == "cuda":
        steps["  current stream"] = lambda: torch_state.raw_stream(0)
        steps["  does it capture (side streams only)"] = torch_state.is_current_stream_capturing
    return steps


def main() -> None:
    parser = Parser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cpu")
    try:
        device = open_device(parser.parse_args().device)
    except UsageError as e:
        parser.error(str(e))
    where = torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"
    print(
        f"{where}, torch {torch.__version__}, Python {platform.python_version()}, {ROWS} rows; us, best of {ROUNDS} rounds"
    )
    for name, us in best_us(steps_of(device)).items():
        print(f"{name:<42}{us:7.2f}")


if __name__ == "__main__":
    main()

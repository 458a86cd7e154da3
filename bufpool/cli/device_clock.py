"""Device time of launches: CUDA events on one stream, contenders in turn. Host time has its own clock (``timing.py``).

A launch here is a function of a running number, by which it takes other inputs from call to call: a launch finds nothing
of its inputs in the L2 cache when the inputs used since the last time are larger than that (`input_sets`).
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from itertools import pairwise

import torch

__all__ = ["Launch", "input_sets", "time_launches"]

Launch = Callable[[int], object]

_LAUNCHES = 4  # timed in a row; one goes before them, so that the first timed one waits for no host
_LEAST_ROUNDS = 3
_MOST_ROUNDS = 1000
_L2_TIMES = 3  # what replaces what in L2 is not documented: pass it by this factor


def input_sets(set_bytes: int, device: torch.device) -> int:
    """How many sets of inputs, of ``set_bytes`` each, take turns so that each is out of L2 when its turn comes."""
    l2_bytes = torch.cuda.get_device_properties(device).L2_cache_size
    return 1 + max(-(-_L2_TIMES * l2_bytes // set_bytes), 1)


def time_launches(launches: Mapping[str, Launch], device: torch.device, seconds: float) -> dict[str, list[float]]:
    """Device milliseconds of each launch.

    In every round each contender is launched five times in a row, of which the last four are timed. The order is drawn
    anew for each round, the same in every run: what ran just before decides temperature and clock rate, by a few percent
    on a card that is held back by its power limit. It ends when each has had ``seconds`` of device time, after three
    rounds at least.
    """
    ms: dict[str, list[float]] = {name: [] for name in launches}
    names = list(launches)
    launched = dict.fromkeys(names, 0)
    source = random.Random(0)
    with torch.cuda.device(device):
        events = [torch.cuda.Event(enable_timing=True) for _ in range(_LAUNCHES + 1)]  # type: ignore[no-untyped-call]
        for number in range(_MOST_ROUNDS):
            for name in source.sample(names, len(names)):
                launch = launches[name]
                place = launched[name]
                launched[name] += _LAUNCHES + 1
                torch.cuda.synchronize(device)
                for step, event in enumerate(events):
                    launch(place + step)
                    event.record()
                events[-1].synchronize()
                ms[name] += [a.elapsed_time(b) for a, b in pairwise(events)]
            if number + 1 >= _LEAST_ROUNDS and min(sum(values) for values in ms.values()) >= 1000 * seconds:
                break
    return ms

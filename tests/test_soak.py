"""A short soak, and proof that it finds what it is for: memory that is handed out while somebody holds or reads it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
SOAK = ROOT / "tests" / "soak.py"

HANDS_OUT_LIVE_MEMORY = """
import collections, random, torch, weakref
class Faulty(OutputPool):
    def acquire(self, spec, rows, like):
        outputs = super().acquire(spec, rows, like)
        if like.is_cuda and torch.cuda.is_current_stream_capturing():
            return outputs
        recent = self.__dict__.setdefault("recent", collections.deque(maxlen=50))
        for names, made in list(recent):
            former = [tensor() for tensor in made]
            if names == spec.names and None not in former and former[0].shape[0] >= rows and random.random() < 0.3:
                return spec.outputs_type(*(tensor[:rows] for tensor in former))
        recent.append((spec.names, [weakref.ref(tensor) for tensor in outputs]))
        return outputs
"""
FORGETS_READERS = """
class Faulty(OutputPool):
    def record_stream(self, outputs, stream):
        pass
"""

# Pools with two slots a lane: the one with a limit, and those that are closed or collected with results.
REACHES_A_LIMIT = """
import random
from bufpool.errors import PoolLimitError
class Faulty(OutputPool):
    def __init__(self, *args, max_slots=8, **options):
        super().__init__(*args, max_slots=max_slots, **options)
        self.chance = 0.5 if max_slots == 2 else 0
    def acquire(self, spec, rows, like):
        outputs = super().acquire(spec, rows, like)
        if random.random() < self.chance:
            raise PoolLimitError("limit: reached", need=2, have=1, limit=2)
        return outputs
"""


@pytest.fixture
def run_soak(run_script):
    """Runs the soak in a process of its own, since a capture that breaks spoils torch; its exit code and figures.

    ``faulty`` is Python that defines the class ``Faulty``, which is used for every pool.
    """

    def run(*args, faulty=None, timeout=150):
        if faulty is None:
            done = run_script(SOAK, *args, "--json", timeout=timeout)
        else:
            done = run_script(
                "import sys; sys.path.insert(0, 'tests'); import soak\nfrom bufpool.pool import OutputPool\n"
                f"{faulty}\nsys.exit(soak.main(sys.argv[1:], Faulty))\n",
                *args,
                "--json",
                timeout=timeout,
            )
        assert done.returncode in (0, 1), done.stderr
        return done.returncode, json.loads(done.stdout)

    return run


def assert_nothing_was_found(code, figures, least_operations):
    assert (code, figures["failures"]) == (0, [])
    idle = {name for name, count in figures["operations"].items() if not count}
    if figures["device"] == "cpu":
        assert idle <= {"capture_private", "capture_shared", "drop_graph", "look_at_graph", "replay",
                        "read_on_another_stream"}  # fmt: skip
    else:
        assert idle == set()
    assert sum(figures["operations"].values()) > least_operations
    assert figures["comparisons"] > least_operations
    assert figures["grows"] > 0
    assert figures["spills"] > 0
    assert figures["refusals"]["acquire asleep: BufpoolError"] > 0


@pytest.mark.slow
def test_a_short_soak_on_the_host_finds_nothing(run_soak):
    assert_nothing_was_found(*run_soak("--seconds", 5), least_operations=500)


@pytest.mark.gpu
@pytest.mark.slow
def test_a_short_soak_on_the_device_finds_nothing(run_soak):
    code, figures = run_soak("--seconds", 20, "--device", "cuda")
    assert_nothing_was_found(code, figures, least_operations=1000)
    assert figures["operations"]["replay"] > 50
    assert figures["slept_bytes"] > 0


def test_a_limit_that_is_reached_is_no_fault(run_soak):
    code, figures = run_soak("--seconds", 3, faulty=REACHES_A_LIMIT)
    assert (code, figures["failures"]) == (0, [])
    assert figures["operations"]["close_with_results"] > 0
    assert figures["refusals"]["acquire: PoolLimitError"] > 0


def test_memory_handed_out_while_it_is_held_is_found_within_seconds(run_soak):
    code, figures = run_soak("--seconds", 30, faulty=HANDS_OUT_LIVE_MEMORY)
    assert code == 1
    assert figures["mismatches"] > 0
    assert figures["seconds"] < 15  # it ends there and then: under a second on an idle machine
    first = figures["failures"][0]
    assert first["seed"] == 0
    assert first["wrong_words"] > 0
    assert "step" in first["operation"]


@pytest.mark.gpu
@pytest.mark.parametrize("faulty", [HANDS_OUT_LIVE_MEMORY, FORGETS_READERS], ids=["live memory", "forgotten readers"])
def test_a_planted_fault_is_found_on_the_device(run_soak, faulty):
    code, figures = run_soak("--seconds", 60, "--device", "cuda", faulty=faulty)
    assert code == 1
    assert figures["mismatches"] > 0
    assert figures["seconds"] < 40

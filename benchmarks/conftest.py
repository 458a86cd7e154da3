"""Options of the benchmarks when pytest runs them: ``pytest benchmarks/bench_acquire.py --benchmark-enable``."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from bufpool.cli.acquire_case import Case
from bufpool.cli.timing import BATCH_CALLS
from bufpool.cli.usage import UsageError, open_device


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--device", default="cpu", help="where the outputs live: cpu, cuda or cuda:N")


@pytest.fixture(scope="session")
def device(request: pytest.FixtureRequest) -> torch.device:
    """The device of the option; without CUDA a skip, any other name that cannot be had ends the run."""
    name = request.config.getoption("--device")
    try:
        return open_device(name)
    except UsageError as e:
        if name.startswith("cuda") and not torch.cuda.is_available():
            pytest.skip(str(e))
        pytest.exit(str(e), returncode=pytest.ExitCode.USAGE_ERROR)


@pytest.fixture
def time_contender(benchmark: Any, device: torch.device) -> Callable[[Case, str, str], None]:
    """Times one contender of a case, batch by batch, after its warm-up."""

    def run(case: Case, workload: str, contender: str) -> None:
        parts = iter(case.warm + case.timed)
        benchmark.group = f"{workload}, {device}, {BATCH_CALLS} calls a round"
        benchmark.extra_info["calls_per_round"] = BATCH_CALLS
        benchmark.pedantic(
            case.loops[contender],
            setup=lambda: ((next(parts),), {}),
            rounds=len(case.timed),
            warmup_rounds=len(case.warm),
        )

    return run

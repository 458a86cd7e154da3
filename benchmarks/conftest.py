"""Options of the benchmarks when pytest runs them: ``pytest benchmarks/bench_acquire.py --benchmark-enable``."""

import pytest
import torch

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

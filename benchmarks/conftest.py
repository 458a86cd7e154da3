"""Options of the benchmarks when pytest runs them: ``pytest benchmarks/bench_acquire.py --benchmark-enable``."""

import pytest
import torch


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--device", default="cpu", help="where the outputs live: cpu, cuda or cuda:N")


@pytest.fixture
def device(request: pytest.FixtureRequest) -> torch.device:
    name = request.config.getoption("--device")
    if torch.device(name).type == "cuda" and not torch.cuda.is_available():
        pytest.skip(f"--device {name}: torch finds no CUDA device")
    return torch.empty(0, device=name).device

"""bufpool: fresh outputs for inference kernels, on memory that never moves."""

from .allocator import FreshAllocator, OutputAllocator
from .errors import (
    BufpoolError,
    CaptureError,
    CompileError,
    DeviceMismatchError,
    DriverError,
    OutputMismatchError,
    PoolLimitError,
    WriteContractError,
)
from .outputs import check_output
from .pool import OutputPool, default_pool, set_default_pool
from .spec import Outputs, OutputSpec
from .stats import LaneStats, PoolStats

__version__ = "0.1.0.dev0"

__all__ = [
    "BufpoolError",
    "CaptureError",
    "CompileError",
    "DeviceMismatchError",
    "DriverError",
    "FreshAllocator",
    "LaneStats",
    "OutputAllocator",
    "OutputMismatchError",
    "OutputPool",
    "OutputSpec",
    "Outputs",
    "PoolLimitError",
    "PoolStats",
    "WriteContractError",
    "check_output",
    "default_pool",
    "set_default_pool",
]

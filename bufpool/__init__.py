"""bufpool: fresh outputs for inference kernels, on memory that never moves."""

__version__ = "0.1.0.dev0"

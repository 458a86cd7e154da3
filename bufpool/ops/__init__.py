"""Kernels with an allocator: each validates, acquires its outputs, launches."""

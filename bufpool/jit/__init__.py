"""From CUDA source to a launch: compiler, kernel, launch. Knows no pool."""

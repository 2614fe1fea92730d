"""Checks and timings of the CUDA path, in parts with deadlines: `python -m benchmarks.gpu` (README.md)."""

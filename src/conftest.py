"""Doctests of the package: modules that import Triton are left out where it is not installed."""

from __future__ import annotations

import importlib.util

KERNELS = "laconic/kernels/"
NEED_TRITON = ["*/gpu*.py", "*/triton_*.py", "*/*_kernels.py", "quantise/packed_sums.py", "quantise/plan.py",
               "quantise/tile.py"]  # fmt: skip

collect_ignore_glob = [] if importlib.util.find_spec("triton") else [KERNELS + name for name in NEED_TRITON]

"""Skip without Triton; run each test in the process that it is for (`make test-triton` starts both).

interpreted  TRITON_INTERPRET=1: kernels run on the CPU, in numpy
compiled     without it: kernels are compiled for GPUs that are not there
"""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path

import pytest

HERE = Path(__file__).parent
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
collect_ignore_glob = [] if importlib.util.find_spec("triton") else ["*.py"]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if HERE not in item.path.parents:  # the hook sees the tests of all folders
            continue
        compiles = item.get_closest_marker("compiled") is not None
        if compiles and INTERPRETED:
            item.add_marker(pytest.mark.skip(reason="compiles kernels: run without TRITON_INTERPRET"))
        elif not compiles and not INTERPRETED:
            item.add_marker(pytest.mark.skip(reason="interprets kernels: run with TRITON_INTERPRET=1"))

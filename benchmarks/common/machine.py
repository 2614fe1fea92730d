"""The machine and versions that a figure was measured on."""

from __future__ import annotations

import os
import platform
from pathlib import Path
from typing import Any

import torch

from laconic import kernels


def machine() -> dict[str, Any]:
    """Processor, cores, versions and live kernels; nothing that names a host."""
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    model = next(
        (line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "unknown"
    )
    return {
        "processor": model,
        "cores": os.cpu_count(),
        "system": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
        "torch": torch.__version__,
        "kernels": kernels.info()["live"],
    }

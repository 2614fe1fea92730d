"""Part machine: the card, the versions and the bandwidth of a copy."""

from __future__ import annotations

import importlib
import os
import platform

import torch

import laconic
from benchmarks.gpu.job import Job
from benchmarks.gpu.timing import copy_us
from laconic import kernels

PACKAGES = ("numpy", "torchvision", "pytest", "xdist", "pytest_timeout", "psutil", "hypothesis", "typer")


def run(job: Job) -> None:
    """Store versions and the card, and check that the package runs without native code."""
    job.note("versions", python=platform.python_version(), cores=os.cpu_count(), laconic=laconic.__version__)
    found = {}
    for name in PACKAGES:
        try:
            found[name] = getattr(importlib.import_module(name), "__version__", "installed")
        except ImportError:
            found[name] = "not installed"
    job.note("packages", **found)
    job.note("kernels", **{key: str(value) for key, value in kernels.info().items()})
    if not job.cuda:
        job.skip("card", "no CUDA device")
        copied = 1 << 24
    else:
        card = torch.cuda.get_device_properties(job.device)
        job.check("Triton serves CUDA tensors", kernels.info()["triton_missing"] is None)
        job.note(
            "card", card=card.name, multiprocessors=card.multi_processor_count, gib=card.total_memory >> 30
        )
        copied = 1 << 30
    us = copy_us(job.device, 2 * copied)
    job.note("copy", nbytes=copied, us=us, gb_per_s=2 * copied / us / 1e3)

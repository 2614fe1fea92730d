"""Reads and decodes a data set once for all workers of a run.

The launcher reads the original files and writes plain tensors to a scratch file. Workers map that file, so
the operating system keeps one copy for all.
"""

from __future__ import annotations

from pathlib import Path

import torch

from laconic.tasks.task import Task, Tensors


def prepare(task: Task, data: Path | None, scratch: Path) -> Tensors:
    """Read the task's data from `data` or LACONIC_DATA and write its tensors to `scratch`."""
    tensors = {name: part.contiguous() for name, part in task.load(data).items()}
    scratch.parent.mkdir(parents=True, exist_ok=True)
    torch.save({name: part.clone() for name, part in tensors.items()}, scratch)
    return tensors


def mapped(scratch: Path) -> Tensors:
    """The tensors that `prepare` wrote, memory-mapped."""
    tensors: Tensors = torch.load(scratch, mmap=True, weights_only=True)
    return tensors

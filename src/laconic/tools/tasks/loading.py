"""Reads and decodes a data set once for all workers of a run.

The launcher reads the original files and writes plain tensors to a scratch file, which workers map, so that
they share one copy.
"""

from __future__ import annotations

from pathlib import Path

import torch

from laconic.core import arguments
from laconic.tools.tasks.task import Task, Tensors


def prepare(
    task: Task, data: Path | None, scratch: Path, *, model: str | None = None, examples: int | None = None
) -> Tensors:
    """Read the task's data from `data` or LACONIC_DATA and write its tensors to `scratch`.

    Args:
        task: The task.
        data: Folder of its files; None: $LACONIC_DATA.
        scratch: File to write.
        model: The model that the tensors are arranged for; default: the task's first.
        examples: Number of training examples to keep, evenly spread; default: all.

    Raises:
        SpecError: `examples` exceeds the size of the training set.
    """
    loaded = task.load(data)
    if arranged := task.recipe(model).arranged:
        loaded = arranged(loaded)
    if examples is not None:
        total = len(loaded["train_y"])
        arguments.whole("--examples", examples, 1, total, f"{task.name} has no more for training")
        chosen = torch.arange(examples, dtype=torch.int64, device="cpu") * total // examples
        loaded |= {name: loaded[name][chosen] for name in ("train_x", "train_y")}
    tensors = {name: part.contiguous() for name, part in loaded.items()}
    scratch.parent.mkdir(parents=True, exist_ok=True)
    torch.save({name: part.clone() for name, part in tensors.items()}, scratch)
    return tensors


def mapped(scratch: Path) -> Tensors:
    """Return the tensors from `prepare`, memory-mapped."""
    tensors: Tensors = torch.load(scratch, map_location="cpu", mmap=True, weights_only=True)
    return tensors

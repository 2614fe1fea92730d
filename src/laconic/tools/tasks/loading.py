"""Reads a data set once for all workers, which map its tensors from a scratch file."""

from __future__ import annotations

from pathlib import Path

import torch

from laconic.core import arguments
from laconic.tools.tasks.task import Task, Tensors


def prepare(
    task: Task, data: Path | None, scratch: Path, *, model: str | None = None, examples: int | None = None
) -> Tensors:
    """Read the task's data for `model`, and write the tensors to `scratch`.

    `examples`: training examples to keep; `SpecError` if there are fewer.
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
    tensors: Tensors = torch.load(scratch, map_location="cpu", mmap=True, weights_only=True)
    return tensors

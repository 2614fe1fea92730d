"""The model of a group: equal on every rank, with rank 0's buffers."""

from __future__ import annotations

from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

from laconic.core.atomic_file import replacing
from laconic.core.errors import AttachError
from laconic.lowbit import convert
from laconic.tools.tasks.task import Recipe

MODEL = "model.pt"


def built(recipe: Recipe, bits: int | None, seed: int = 0) -> nn.Module:
    """Build the model, in float32 or with layers of `bits` bits, whose rounding has a `seed` by rank.

    Raises `AttachError` if the model cannot be converted.
    """
    model = recipe.build()
    if bits is None:
        return model
    try:
        return convert(model, bits, seed=seed)
    except AttachError as error:
        raise AttachError(f"--bits {bits} does not work with this model: {error}") from error


def share_buffers(model: nn.Module) -> None:
    for buffer in model.buffers():
        dist.broadcast(buffer, 0)


def save_model(folder: Path, model: nn.Module) -> None:
    with replacing(folder / MODEL) as file:
        torch.save({name: part.clone() for name, part in model.state_dict().items()}, file)

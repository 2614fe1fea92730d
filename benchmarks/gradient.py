"""The stored gradient for the table of methods: a real one, small enough for the repository.

    python -m benchmarks.gradient    trains for some seconds; writes benchmarks/gradient.npz

A network of 98 thousand parameters learns handwritten digits for 100 steps of 64 examples; then one worker's
share, 16 examples, goes backward once. The file holds that gradient, tensor by tensor, float32, under the
names and in the shapes of the parameters. Its tensors differ much in scale: the typical entry of the
first convolution is 11 times that of the large dense layer, a quarter of which is zero (inactive neurons).
Biases before a normalisation, which cancels them, have only rounding noise as gradient.
"""

from __future__ import annotations

from collections import OrderedDict
from pathlib import Path

import numpy as np
import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

from laconic.tools.tasks import find
from laconic.tools.tasks.shard import Shard
from laconic.tools.tasks.task import Recipe, cross_entropy

FILE = Path(__file__).with_name("gradient.npz")
STEPS, BATCH, WORKERS = 100, 64, 4


def net() -> nn.Module:
    """Two convolutions with batch normalisation and two dense layers: weights, biases, gains and shifts."""
    return nn.Sequential(
        OrderedDict(
            conv1=nn.Conv2d(1, 16, 3, padding=1),
            norm1=nn.BatchNorm2d(16),
            relu1=nn.ReLU(),
            conv2=nn.Conv2d(16, 32, 3, padding=1),
            norm2=nn.BatchNorm2d(32),
            relu2=nn.ReLU(),
            pool=nn.MaxPool2d(2),
            flat=nn.Flatten(),
            hidden=nn.Linear(512, 176),
            relu3=nn.ReLU(),
            head=nn.Linear(176, 10),
        )
    )


def make() -> dict[str, Tensor]:
    """Train, and take the gradient: the same on one machine every time, nearly the same on another."""
    torch.manual_seed(0)
    torch.set_num_threads(1)
    task, recipe = find("digits"), Recipe(net, lr=0.05)
    data, model = task.load(None), recipe.build()
    optimizer = recipe.optimizer(model)
    shard = Shard(len(data["train_y"]), BATCH, rank=0, size=1, seed=0)
    for step in range(STEPS + 1):
        chosen = shard.indices(step)[: BATCH if step < STEPS else BATCH // WORKERS]
        optimizer.zero_grad()
        loss = cross_entropy(model(task.inputs(data["train_x"][chosen], None)), data["train_y"][chosen])
        torch.autograd.backward(loss)
        if step < STEPS:
            optimizer.step()
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def stored() -> dict[str, Tensor]:
    """The gradient in the file: float32 tensors by name, in the order of the model."""
    with np.load(FILE) as arrays:
        return {name: torch.from_numpy(arrays[name]) for name in arrays.files}


def main() -> None:
    """Make the file, and say what is in it."""
    gradient = make()
    np.savez_compressed(FILE, **{name: part.numpy() for name, part in gradient.items()})  # type: ignore[arg-type]
    table = Table(title=f"{FILE.name}: {FILE.stat().st_size / 1e3:.0f} kB")
    for column in ("tensor", "shape", "norm", "rms", "largest", "zeros, %"):
        table.add_column(column)
    for name, part in stored().items():
        norm = part.norm()
        cells = (norm, norm / part.numel() ** 0.5, part.abs().max(), 100 * (part == 0).float().mean())
        table.add_row(name, str(tuple(part.shape)), *(f"{float(cell):.3g}" for cell in cells))
    Console().print(table)


if __name__ == "__main__":
    main()

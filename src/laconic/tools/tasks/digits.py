"""Handwritten digits of 8 x 8 pixels (Alpaydin and Kaynak 1998)."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from laconic.core.extras import require
from laconic.tools.tasks.source import tensor
from laconic.tools.tasks.task import Recipe, Task, Tensors

NUM_TEST = 360


def load(folder: Path | None = None) -> Tensors:
    """Load images uint8 (n, 1, 8, 8) in 0..16 and labels uint8 (n,).

    >>> {name: tuple(part.shape) for name, part in load().items()}["train_x"]
    (1437, 1, 8, 8)
    """
    require("sklearn", "the task digits")
    from sklearn.datasets import load_digits  # takes a second

    images, labels = load_digits(return_X_y=True)
    order = np.random.default_rng(0).permutation(len(labels))  # sorted by writer
    x = tensor(images[order].astype(np.uint8)).view(-1, 1, 8, 8)
    y = tensor(labels[order].astype(np.uint8))
    return {
        "train_x": x[NUM_TEST:],
        "train_y": y[NUM_TEST:],
        "test_x": x[:NUM_TEST],
        "test_y": y[:NUM_TEST],
    }


def inputs(x: Tensor, rng: torch.Generator | None) -> Tensor:
    return (x.float() - 4.88) / 6.02


def small_cnn() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 32, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(32, 64, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(1024, 256),
        nn.ReLU(),
        nn.Linear(256, 10),
    )


def mlp() -> nn.Module:
    return nn.Sequential(
        nn.Flatten(),
        nn.Linear(64, 512),
        nn.ReLU(),
        nn.Linear(512, 512),
        nn.ReLU(),
        nn.Linear(512, 10),
    )


def wide() -> nn.Module:
    """Build 2.2 million parameters: little computation, many bytes."""
    return nn.Sequential(
        nn.Flatten(),
        nn.Linear(64, 1024),
        nn.ReLU(),
        nn.Linear(1024, 1024),
        nn.ReLU(),
        nn.Linear(1024, 1024),
        nn.ReLU(),
        nn.Linear(1024, 10),
    )


DIGITS = Task(
    name="digits",
    title="handwritten digits, 8 x 8 (scikit-learn)",
    batch=16,
    steps=300,
    load=load,
    inputs=inputs,
    models={"cnn": Recipe(small_cnn, lr=0.05), "mlp": Recipe(mlp, lr=0.05), "wide": Recipe(wide, lr=0.05)},
)

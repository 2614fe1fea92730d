"""MNIST: digits of 28 x 28 pixels (LeCun et al. 1998), from `mnist.npz` or the idx files."""

from __future__ import annotations

import gzip
import math
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from laconic.core.errors import DataError
from laconic.tools.tasks.source import numpy_archive, read_first, tensor
from laconic.tools.tasks.task import PARTS, Recipe, Task, Tensors

IDX = (
    "train-images-idx3-ubyte",
    "train-labels-idx1-ubyte",
    "t10k-images-idx3-ubyte",
    "t10k-labels-idx1-ubyte",
)
HOW = "get the four idx files, plain or .gz, from https://ossci-datasets.s3.amazonaws.com/mnist/"


def load(folder: Path | None = None) -> Tensors:
    """Load images uint8 (n, 1, 28, 28) and labels uint8 (n,)."""
    return read_first("mnist", folder, READERS, HOW)


def read_idx(path: Path) -> Tensor:
    """Read an idx file, plain or gzip: [0 0 8 rank], sizes as big-endian int32, bytes."""
    raw = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    if len(raw) < 4 or raw[:3] != b"\0\0\x08" or len(raw) < 4 + 4 * raw[3]:
        raise DataError(f"{path} is not an idx file of bytes: it must start with 000008, got {raw[:4].hex()}")
    shape = [int.from_bytes(raw[4 + 4 * i : 8 + 4 * i], "big") for i in range(raw[3])]
    head = 4 + 4 * raw[3]
    if len(raw) - head != math.prod(shape):
        raise DataError(
            f"{path} must contain {math.prod(shape)} bytes, got {len(raw) - head}; download it again"
        )
    return tensor(np.frombuffer(raw, dtype=np.uint8, offset=head)).view(shape)


def _from_npz(path: Path) -> Tensors:
    arrays = numpy_archive(path, ("x_train", "y_train", "x_test", "y_test"))
    return _shaped([tensor(array) for array in arrays])


def _from_idx(first: Path) -> Tensors:
    return _shaped([read_idx(_plain_or_gz(first.parent, name)) for name in IDX])


def _plain_or_gz(folder: Path, name: str) -> Path:
    for path in (folder / name, folder / f"{name}.gz"):
        if path.exists():
            return path
    raise DataError(f"mnist: no {name} or {name}.gz in {folder}; {HOW}")


def _shaped(parts: list[Tensor]) -> Tensors:
    train_x, train_y, test_x, test_y = parts
    shaped = [train_x.view(-1, 1, 28, 28), train_y, test_x.view(-1, 1, 28, 28), test_y]
    return dict(zip(PARTS, shaped, strict=True))


def inputs(x: Tensor, rng: torch.Generator | None) -> Tensor:
    return (x.float() / 255 - 0.1307) / 0.3081


def small_cnn() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 16, 5, padding=2),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(16, 32, 5, padding=2),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(1568, 256),
        nn.ReLU(),
        nn.Linear(256, 10),
    )


def bnn() -> nn.Module:
    layers, inside = list[nn.Module]([nn.Flatten()]), 784
    for _ in range(3):
        layers += [nn.Linear(inside, 1024, bias=False), nn.BatchNorm1d(1024), nn.Hardtanh()]
        inside = 1024
    return nn.Sequential(*layers, nn.Linear(1024, 10))


READERS = {"mnist.npz": _from_npz, IDX[0]: _from_idx, f"{IDX[0]}.gz": _from_idx}

MNIST = Task(
    name="mnist",
    title="MNIST: handwritten digits, 28 x 28",
    batch=32,
    steps=600,
    load=load,
    inputs=inputs,
    models={"cnn": Recipe(small_cnn, lr=0.05), "bnn": Recipe(bnn, lr=0.05, weight_decay=0.0)},
    files=tuple(READERS),
    how=HOW,
)

"""CIFAR-10 (Krizhevsky 2009), with ResNet-20 (He et al. 2015, arXiv:1512.03385)."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from laconic.lowbit import Add, EvoNormS0
from laconic.tools.tasks.cifar_files import from_binaries, from_jpegs, from_pickles
from laconic.tools.tasks.source import read_first
from laconic.tools.tasks.task import Recipe, Task, Tensors

HOW = "get https://www.cs.toronto.edu/~kriz/cifar-10-python.tar.gz (or -binary.tar.gz) and unpack it there"
MEAN, STD = (0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)


def load(folder: Path | None = None) -> Tensors:
    """Load images uint8 (n, 3, 32, 32) and labels uint8 (n,)."""
    return read_first("cifar10", folder, READERS, HOW)


def inputs(x: Tensor, rng: torch.Generator | None) -> Tensor:
    if rng is not None:
        x = crop_and_flip(x, rng)
    return (
        x.float() / 255 - torch.tensor(MEAN, dtype=torch.float32, device="cpu").view(3, 1, 1)
    ) / torch.tensor(STD, dtype=torch.float32, device="cpu").view(3, 1, 1)


def crop_and_flip(x: Tensor, rng: torch.Generator) -> Tensor:
    batch, _, height, width = x.shape
    padded = F.pad(x, (4, 4, 4, 4)).permute(0, 2, 3, 1)
    top = torch.randint(0, 9, (batch, 1), generator=rng, dtype=torch.int64, device="cpu")
    left = torch.randint(0, 9, (batch, 1), generator=rng, dtype=torch.int64, device="cpu")
    mirrored = torch.rand(batch, 1, generator=rng, dtype=torch.float32, device="cpu") < 0.5
    rows = top + torch.arange(height, dtype=torch.int64, device="cpu")
    columns = torch.arange(width, dtype=torch.int64, device="cpu").expand(batch, width)
    columns = left + torch.where(mirrored, width - 1 - columns, columns)
    image = torch.arange(batch, dtype=torch.int64, device="cpu")[:, None, None]
    return padded[image, rows[:, :, None], columns[:, None, :]].permute(0, 3, 1, 2)


class Block(nn.Module):
    """Two 3 x 3 convolutions with the paper's shortcut A: drops pixels, pads channels."""

    def __init__(self, inside: int, outside: int) -> None:
        super().__init__()
        self.stride = outside // inside
        self.conv1 = nn.Conv2d(inside, outside, 3, stride=self.stride, padding=1, bias=False)
        self.norm1 = nn.BatchNorm2d(outside)
        self.conv2 = nn.Conv2d(outside, outside, 3, padding=1, bias=False)
        self.norm2 = nn.BatchNorm2d(outside)
        self.add = Add()

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm2(self.conv2(F.relu(self.norm1(self.conv1(x)))))
        if self.stride == 2:
            x = F.pad(x[:, :, ::2, ::2], (0, 0, 0, 0, 0, x.shape[1]))
        return F.relu(self.add(x, y))


def resnet20() -> nn.Module:
    """Build nine blocks: 0.27 million parameters."""
    widths = [16, 16, 16, 16, 32, 32, 32, 64, 64, 64]
    blocks = [Block(inside, outside) for inside, outside in pairwise(widths)]
    model = nn.Sequential(
        nn.Conv2d(3, 16, 3, padding=1, bias=False),
        nn.BatchNorm2d(16),
        nn.ReLU(),
        *blocks,
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(64, 10),
    )
    for module in model.modules():
        if isinstance(module, nn.Conv2d):
            nn.init.kaiming_normal_(module.weight)
    return model


def small_cnn() -> nn.Module:
    """Build 0.3 million parameters, fast on a CPU."""
    return _three_convolutions(lambda channels: nn.ReLU(), bias=True)


def evonorm_cnn() -> nn.Module:
    """Build `small_cnn` with EvoNorm-S0: no batch statistics."""
    return _three_convolutions(EvoNormS0, bias=False)


def _three_convolutions(after: Callable[[int], nn.Module], *, bias: bool) -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 16, 3, stride=2, padding=1, bias=bias),
        after(16),
        nn.Conv2d(16, 32, 3, padding=1, bias=bias),
        after(32),
        nn.MaxPool2d(2),
        nn.Conv2d(32, 64, 3, padding=1, bias=bias),
        after(64),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(1024, 256),
        nn.ReLU(),
        nn.Linear(256, 10),
    )


def bnn() -> nn.Module:
    """Build a network for binary weights: 0.8 million parameters."""
    layers, inside = list[nn.Module](), 3
    for outside, pool in ((32, False), (64, True), (128, True), (128, True)):
        layers.append(nn.Conv2d(inside, outside, 3, padding=1, bias=False))
        layers += [nn.MaxPool2d(2)] if pool else []
        layers += [nn.BatchNorm2d(outside), nn.Hardtanh()]
        inside = outside
    dense = [nn.Linear(2048, 256, bias=False), nn.BatchNorm1d(256), nn.Hardtanh(), nn.Linear(256, 10)]
    return nn.Sequential(*layers, nn.Flatten(), *dense)


READERS = {
    "cifar10_jpeg.npz": from_jpegs,
    "cifar-10-batches-py": from_pickles,
    "cifar-10-batches-bin": from_binaries,
    "data_batch_1": lambda path: from_pickles(path.parent),
    "data_batch_1.bin": lambda path: from_binaries(path.parent),
}

CIFAR10 = Task(
    name="cifar10",
    title="CIFAR-10: photographs, 32 x 32, ten classes",
    batch=32,
    steps=2000,
    load=load,
    inputs=inputs,
    models={
        "resnet20": Recipe(resnet20, lr=0.1),
        "cnn": Recipe(small_cnn, lr=0.1),
        "evonorm": Recipe(evonorm_cnn, lr=0.05),
        "bnn": Recipe(bnn, lr=0.05, weight_decay=0.0),
    },
    files=tuple(READERS),
    how=HOW,
)

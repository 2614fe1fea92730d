"""ResNet-9 on CIFAR-10, with its data and augmentation on the device.

After Page 2018, "How to train your ResNet".
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from laconic.tools.tasks.cifar10 import MEAN, STD, load

PAD = 4
Data = dict[str, Tensor]


class Residual(nn.Module):
    """Two convolutions and a shortcut."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.body = nn.Sequential(*convolution(channels, channels), *convolution(channels, channels))

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.body(x) + x
        return found


class Scale(nn.Module):
    """A constant factor on the logits."""

    def __init__(self, factor: float) -> None:
        super().__init__()
        self.factor = factor

    def forward(self, x: Tensor) -> Tensor:
        return x * self.factor


def convolution(inside: int, outside: int, pool: bool = False) -> list[nn.Module]:
    """Return a 3 x 3 convolution with its norm, pooled if asked for."""
    layers: list[nn.Module] = [nn.Conv2d(inside, outside, 3, padding=1, bias=False), nn.BatchNorm2d(outside)]
    return [*layers, nn.ReLU(), nn.MaxPool2d(2)] if pool else [*layers, nn.ReLU()]


def resnet9(width: int = 64) -> nn.Sequential:
    """Return ResNet-9: 6.57 million parameters at width 64."""
    return nn.Sequential(
        *convolution(3, width),
        *convolution(width, 2 * width, pool=True),
        Residual(2 * width),
        *convolution(2 * width, 4 * width, pool=True),
        *convolution(4 * width, 8 * width, pool=True),
        Residual(8 * width),
        nn.AdaptiveMaxPool2d(1),
        nn.Flatten(),
        nn.Linear(8 * width, 10),
        Scale(0.125),
    )


def raw(small: bool = False) -> Data:
    """Return CIFAR-10 as bytes from the folder that LACONIC_DATA names; with `small`, 512 random images."""
    if not small:
        return dict(load(None))
    labels = torch.arange(512) % 10
    noise = torch.randint(0, 64, (512, 3, 32, 32), generator=torch.Generator().manual_seed(0))
    images = (noise + 16 * labels.view(-1, 1, 1, 1)).to(torch.uint8)
    return {"train_x": images, "train_y": labels, "test_x": images, "test_y": labels}


def prepared(raw: Data, device: torch.device) -> Data:
    """Return images normalised in float16, those for training padded by 4 pixels, and labels."""
    mean = torch.tensor(MEAN, device=device).view(1, 3, 1, 1)
    deviation = torch.tensor(STD, device=device).view(1, 3, 1, 1)
    found = {}
    for part in ("train", "test"):
        images = raw[f"{part}_x"].to(device)
        x = torch.empty(images.shape, dtype=torch.float16, device=device)
        for some, into in zip(images.split(10000), x.split(10000), strict=True):
            into.copy_((some.float() / 255 - mean) / deviation)
        found[f"{part}_x"] = x
        found[f"{part}_y"] = raw[f"{part}_y"].long().to(device)
    found["train_x"] = functional.pad(found["train_x"], (PAD,) * 4)
    return found


def augmented(x: Tensor, rng: torch.Generator) -> Tensor:
    """Crop 32 x 32 of padded images float16 (b, 3, 40, 40) at random, and mirror half of them: float32.

    The random numbers come from the CPU, the same for every method; the images stay on the device.
    """
    size, device = x.shape[0], x.device
    drawn = torch.randint(0, 2 * PAD + 1, (2, size), generator=rng)
    mirrored = torch.rand(size, generator=rng) < 0.5
    top, left = drawn.to(device, non_blocking=True)
    flip = mirrored.to(device, non_blocking=True)[:, None]
    span = torch.arange(32, device=device)
    rows = top[:, None] + span
    columns = left[:, None] + torch.where(flip, 31 - span, span)
    image = torch.arange(size, device=device)[:, None, None]
    cropped = x.permute(0, 2, 3, 1)[image, rows[:, :, None], columns[:, None, :]]
    return cropped.permute(0, 3, 1, 2).float().contiguous(memory_format=torch.channels_last)

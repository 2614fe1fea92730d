"""Autoencoder: a small convolutional net that reduces values to a quarter as many numbers, and back.

The net of LGC (Abrahamyan et al. 2021, arXiv:2103.08870), as in a public third-party implementation:

    encoder   1 -> 64 -> 128 -> 256 -> 64 channels, kernel 3, stride 2; then 64 -> 4, kernel 1
    decoder   4 -> 32 -> 64 -> 128 -> 32 channels, transposed, kernel 3, stride 2; then 32 -> 1, kernel 1

with a leaky ReLU (0.01) after each but the last of both. Ours: zero padding to a multiple of 16, and no ReLU
on the code: with one the error was 0.89 instead of 0.81 of the energy.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise

import torch
from torch import Tensor
from torch.nn.functional import conv1d, conv_transpose1d, leaky_relu, pad

from laconic import kernels
from laconic.core.layout import Layout
from laconic.core.turn import name_key

STRIDE, CHANNELS = 16, 4  # input values, and numbers of code, per position
SLOPE = 0.01
DOWN, UP = (1, 64, 128, 256, 64), (CHANNELS, 32, 64, 128, 32)


def _shapes() -> Iterator[tuple[str, tuple[int, ...]]]:
    for i, (a, b) in enumerate(pairwise(DOWN)):
        yield from ((f"down{i}.weight", (b, a, 3)), (f"down{i}.bias", (b,)))
    yield from (("code.weight", (CHANNELS, DOWN[-1], 1)), ("code.bias", (CHANNELS,)))
    for i, (a, b) in enumerate(pairwise(UP)):
        yield from ((f"up{i}.weight", (a, b, 3)), (f"up{i}.bias", (b,)))
    yield from (("value.weight", (1, UP[-1], 1)), ("value.bias", (1,)))


LAYOUT = Layout.of(_shapes())
DECODER = sum(entry.numel for entry in LAYOUT if entry.name.startswith(("up", "value")))
ENCODER = LAYOUT.numel - DECODER  # weights of the encoder come first


def code_length(k: int) -> int:
    """Return the number of elements in the code of k values.

    >>> code_length(100), code_length(1)
    (28, 4)
    """
    return CHANNELS * math.ceil(k / STRIDE)


@lru_cache(maxsize=1)
def first_weights() -> Tensor:
    """Return initial weights: float32 (LAYOUT.numel,), uniform within 1 / sqrt(fan-in), equal everywhere.

    Cached: do not modify.
    """
    flat = torch.empty(LAYOUT.numel, dtype=torch.float32, device="cpu")
    for entry, view in zip(LAYOUT, LAYOUT.segments.views(flat), strict=True):
        own = LAYOUT[f"{entry.name.partition('.')[0]}.weight"].shape
        fan_in = own[0] if entry.name.startswith("up") else own[1]
        view.copy_(kernels.uniform(name_key(entry.name), entry.numel))
        view.mul_(2).sub_(1).div_(math.sqrt(fan_in * own[2]))
    return flat


def with_decoders(weights: Tensor, count: int) -> Tensor:
    decoders = weights[ENCODER:].view(-1, DECODER)
    chosen = [decoders[node % len(decoders)] for node in range(count)]
    return torch.cat([weights[:ENCODER], *chosen])


@dataclass(frozen=True)
class Autoencoder:
    """The net, on the CPU, with flat weights (LAYOUT.numel,). It computes in their dtype.

    With several decoders, only `encode` and `nodes` work.
    """

    weights: Tensor

    def nodes(self) -> list[Autoencoder]:
        decoders = self.weights[ENCODER:].view(-1, DECODER)
        return [Autoencoder(torch.cat([self.weights[:ENCODER], each])) for each in decoders]

    def encode(self, x: Tensor) -> Tensor:
        """Return codes (b, 4, ceil(K / 16)) of x (b, K)."""
        own = self._named()
        x = pad(x, (0, -x.shape[-1] % STRIDE)).unsqueeze(1)
        for i in range(len(DOWN) - 1):
            x = leaky_relu(conv1d(x, own[f"down{i}.weight"], own[f"down{i}.bias"], 2, 1), SLOPE)
        return conv1d(x, own["code.weight"], own["code.bias"])

    def decode(self, code: Tensor, k: int) -> Tensor:
        return self.decode_along(code, None, k)[0]

    def decode_along(self, code: Tensor, change: Tensor | None, k: int) -> tuple[Tensor, Tensor]:
        """Return D(code) and D'(code) change, the response to a small change; both (b, k).

        Codes and changes are (b, 4, ceil(k / 16)); None is no change.
        """
        own = self._named()
        y, dy = code, torch.zeros_like(code[:0]) if change is None else change
        for i in range(len(UP) - 1):
            weight = own[f"up{i}.weight"]
            y = conv_transpose1d(y, weight, own[f"up{i}.bias"], 2, 1, 1)
            slope = torch.ones_like(y, dtype=torch.float32).masked_fill_(~(y > 0), SLOPE).to(y.dtype)
            y, dy = y * slope, conv_transpose1d(dy, weight, None, 2, 1, 1) * slope[: len(dy)]
        weight = own["value.weight"]
        y, dy = conv1d(y, weight, own["value.bias"]), conv1d(dy, weight)
        return y.squeeze(1)[:, :k], dy.squeeze(1)[:, :k]

    def _named(self) -> dict[str, Tensor]:
        views = LAYOUT.segments.views(self.weights[: LAYOUT.numel])
        return {entry.name: view.view(entry.shape) for entry, view in zip(LAYOUT, views, strict=True)}

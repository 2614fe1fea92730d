"""Grid of 2^bits evenly spaced values between two ends.

    s = max((high - low) / (2^bits - 1), 1e-8)
    Q(x; low, high) = round(clip((x - low) / s, 0, 2^bits - 1)) * s + low

Banner et al. 2018, arXiv:1805.11046, as in the code of Aketi et al. 2021, arXiv:2111.09389. All tensors stay
float32.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal, get_args

import torch
from torch import Tensor

from laconic import kernels
from laconic.core import arguments
from laconic.core.turn import mix, name_key
from laconic.lowbit.gradient import straight_through, with_gradient

Rounding = Literal["nearest", "stochastic"]
MIN_SPACING = 1e-8
FINE = 2.0**24  # values of the dither


@dataclass(frozen=True)
class Precision:
    """Rounding of a layer. Weights are rounded to nearest, gradients at random.

    Args:
        bits: Bits of activations, weights and gradients, 2 to 8.
        rounding: Of activations, also in evaluation: "nearest" or "stochastic".
        seed: Seed of rounding, different on each rank.

    Raises:
        SpecError: An argument is out of range.
    """

    bits: int = 8
    rounding: Rounding = "nearest"
    seed: int = 0

    def __post_init__(self) -> None:
        arguments.whole("bits", self.bits, 2, 8)
        arguments.choice("rounding", self.rounding, get_args(Rounding))
        arguments.whole("seed", self.seed, most=(1 << 64) - 1)

    def at(self, name: str) -> Precision:
        return replace(self, seed=mix(self.seed, name_key(name)))


def quantise(x: Tensor, low: Tensor, high: Tensor, bits: int = 8, key: int | None = None) -> Tensor:
    """Return Q(x). `low` and `high` have one element; a `key` selects random rounding.

    Error between the ends: at most s / 2 to nearest; below s at random, with mean 0.

    >>> quantise(torch.tensor([0.0, 0.3, 0.4, 1.0, 5.0]), torch.tensor(0.0), torch.tensor(1.5), bits=2)
    tensor([0.0000, 0.5000, 0.5000, 1.0000, 1.5000])
    """
    top = 2**bits - 1
    spacing = ((high - low) / top).clamp(min=MIN_SPACING)
    level: Tensor = ((x - low) / spacing).clamp_(0, top)
    if key is None:
        level.round_()
    else:
        whole = level.floor()
        threshold = ((level - whole) * FINE).to(torch.int32)
        dither = kernels.dither24(key, x.numel(), device=x.device).view(x.shape)
        level = whole.add_(dither < threshold)
    return level.mul_(spacing).add_(low)


def ends(x: Tensor) -> tuple[Tensor, Tensor]:
    if not x.numel():
        return x.new_zeros(()), x.new_zeros(())
    low, high = torch.aminmax(x)
    return low, high


def straight(x: Tensor, low: Tensor, high: Tensor, bits: int, key: int | None = None) -> Tensor:
    return straight_through(lambda x: quantise(x, low, high, bits, key), x)


def fitted(x: Tensor, bits: int) -> Tensor:
    return straight(x, *ends(x.detach()), bits)


def rounded_gradient(x: Tensor, bits: int, key: int) -> Tensor:
    return with_gradient(x, lambda gradient: quantise(gradient, *ends(gradient), bits, key))

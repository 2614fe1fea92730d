"""Threshold controller: keeps the sent density at its target by adapting the threshold.

With error feedback the unsent entries grow at first, like t^a with a from 1/2 (noise) to 1 (a steady
gradient): the rule of MiCRO and ExDyna sent far more than the target for many steps. This controller
is ours. With K' of K requested entries sent in a step, t steps after the threshold d was set:

    d_1   = 2^a q, where K entries of the first step reach q in size (from a `histogram`)
    e     = K' / K - 1, at most 4
    g     = 2 / t, within 0.01 and 0.15
    a     = a + 2 g e, within 0 and 1; 3/4 at first
    log d = log d + g e + a log(1 + 1/t)

Since log d is bounded, the average of e tends to 0. After more than 8 K entries the threshold is set again.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from laconic.core.layout import Segments

FASTEST, SLOWEST, DAMPING = 0.15, 0.01, 2.0
MOST, RESET = 4.0, 8.0  # largest error counted; ratio that indicates changed data
SHIFT, BINS = 20, 2048  # float32 as [sign 1 | exponent 8 | mantissa 3 | the rest 20]
LARGEST = torch.finfo(torch.float32).max


@dataclass(frozen=True)
class ThresholdController:
    """`threshold`: 0 until it is set; `growth`: a; `steps`: t."""

    threshold: float = 0.0
    growth: float = 0.75
    steps: int = 0

    @classmethod
    def of(cls, state: Tensor) -> ThresholdController:
        threshold, growth, steps = state.tolist()
        return cls(threshold, growth, int(steps))

    @property
    def state(self) -> Tensor:
        return torch.tensor([self.threshold, self.growth, self.steps], dtype=torch.float64, device="cpu")

    def made(self, histogram: Tensor, asked: float) -> ThresholdController:
        return replace(self, threshold=quantile(histogram, asked) * 2.0**self.growth, steps=2)

    def after(self, sent: int, asked: float) -> ThresholdController:
        if sent > RESET * asked + RESET:
            return replace(self, threshold=0.0)
        gain = min(FASTEST, max(SLOWEST, DAMPING / self.steps))
        error = gain * min(MOST, sent / asked - 1)
        growth = min(1.0, max(0.0, self.growth + 2 * error))
        factor = math.exp(error + growth * math.log1p(1 / self.steps))
        return ThresholdController(min(LARGEST, self.threshold * factor), growth, self.steps + 1)


def histogram(x: Tensor, segments: Segments) -> Tensor:
    """Count nonzero entries of these ranges of flat x by size, int32 (2048,): eight bins per octave."""
    sizes = torch.cat([x[:0], *segments.views(x)]).abs_()
    bins = sizes[sizes > 0].view(torch.int32) >> SHIFT
    return torch.bincount(bins, minlength=BINS).to(torch.int32)


def quantile(histogram: Tensor, k: float) -> float:
    """Return the size that k entries reach, interpolated in a bin on a log scale; 0 if empty.

    >>> quantile(histogram(torch.arange(1.0, 1001.0), Segments.whole(1000)), 250)
    750.45...
    """
    above, least = 0.0, 0.0
    for number in reversed(histogram.nonzero().flatten().tolist()):
        count = int(histogram[number])
        low, high = (_border(each) for each in (number, number + 1))
        low = low or high / 2
        if above + count >= k:
            return float(high * (low / high) ** ((k - above) / count))
        above, least = above + count, low
    return least


def _border(number: int) -> float:
    size = torch.tensor(number << SHIFT, dtype=torch.int32, device="cpu").view(torch.float32)
    return min(LARGEST, float(size))

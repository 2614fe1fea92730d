"""Learning rates for large batches: scaled with the batch, warmed up, decayed by a polynomial.

Goyal et al. 2017, arXiv:1706.02677: a k times larger batch takes a k times larger rate, after a warm-up. For
Adam, the root of k (Krizhevsky 2014, arXiv:1404.5997; You et al. 2020, arXiv:1904.00962). LARS has the power
2, LAMB 1.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from laconic.core import arguments
from laconic.core.errors import SpecError

Scaling = Literal["linear", "sqrt", "none"]


def rate_factor(batch: int, base_batch: int, scaling: Scaling = "linear") -> float:
    """Return the factor of the rate for `batch` examples instead of `base_batch`.

    >>> rate_factor(1024, 64), rate_factor(1024, 64, "sqrt"), rate_factor(1024, 64, "none")
    (16.0, 4.0, 1.0)
    """
    arguments.whole("batch", batch, 1)
    arguments.whole("base_batch", base_batch, 1)
    arguments.choice("scaling", scaling, ("linear", "sqrt", "none"))
    more = batch / base_batch
    return {"linear": more, "sqrt": math.sqrt(more), "none": 1.0}[scaling]


@dataclass(frozen=True)
class WarmUpThenDecay:
    """Factor of the peak rate at a step, from 0; for `torch.optim.lr_scheduler.LambdaLR`.

        step < warmup_steps    start + (1 - start) * (step + 1) / warmup_steps
        afterwards             end + (1 - end) * (1 - (step - warmup_steps) / (steps - warmup_steps))^power
        step >= steps          end

    `start`: first factor, such as base_batch / batch; may exceed 1. Raises `SpecError`.

    >>> schedule = WarmUpThenDecay(steps=6, warmup_steps=2, start=0.5, power=1)
    >>> [schedule(step) for step in range(7)]
    [0.75, 1.0, 1.0, 0.75, 0.5, 0.25, 0.0]
    """

    steps: int
    warmup_steps: int = 0
    start: float = 0.0
    power: float = 2.0
    end: float = 0.0

    def __post_init__(self) -> None:
        arguments.whole("steps", self.steps, 1)
        arguments.whole("warmup_steps", self.warmup_steps)
        if self.warmup_steps >= self.steps:
            raise SpecError(
                f"warmup_steps must be below steps={self.steps}, got {self.warmup_steps}: use a tenth of the"
                " steps"
            )
        arguments.number("start", self.start, least=0)
        arguments.number("power", self.power, above=0)
        arguments.number("end", self.end, least=0, most=1)

    def __call__(self, step: int) -> float:
        if step < self.warmup_steps:
            return self.start + (1 - self.start) * (step + 1) / self.warmup_steps
        left = max(0.0, 1 - (step - self.warmup_steps) / (self.steps - self.warmup_steps))
        return float(self.end + (1 - self.end) * left**self.power)

"""Threshold: every entry that is large enough."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from laconic import kernels
from laconic.core import arguments
from laconic.core.errors import SpecError
from laconic.core.layout import Segments
from laconic.core.selector import Selector
from laconic.core.spec import Status


@dataclass(frozen=True, repr=False)
class Threshold(Selector):
    """Every |x_i| >= value. Strom 2015 ("Scalable distributed DNN training").

    `value` is rounded to float32 and must stay above zero. Error: |x - x_S|^2 <= n value^2; omega = 1.

    >>> Threshold(value=1.0).select(torch.tensor([0.1, -3.0, 1.0])).tolist()
    [1, 2]
    """

    value: float

    paper: ClassVar[str] = "Strom 2015, Interspeech"
    status: ClassVar[Status] = "recalled"
    examples: ClassVar[tuple[str, ...]] = (
        "threshold(value=0.001)",
        "threshold(value=0.0003)",
        "threshold(value=1.5)",
    )

    def __post_init__(self) -> None:
        arguments.number("threshold: value", self.value, above=0)
        if not 0 < self.single < math.inf:
            raise SpecError(f"threshold: value must be a finite float32 above 0, got {self.value!r}")

    @property
    def single(self) -> float:
        return float(torch.tensor(self.value, dtype=torch.float64, device="cpu").to(torch.float32))

    def select_segments(self, x: Tensor, segments: Segments, keys: Sequence[int]) -> tuple[Tensor, Tensor]:
        return kernels.above(
            x, segments, torch.full((len(segments),), self.single, dtype=torch.float32, device="cpu")
        )

    def max_count(self, n: int) -> int:
        return n

    def omega(self, n: int) -> float:
        return 1.0

    def absolute_error(self, n: int) -> float:
        return n * self.single**2

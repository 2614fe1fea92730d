"""Training with the signs of weights and inputs (Courbariaux et al. 2016, arXiv:1602.02830).

`laconic.lowbit.binarise` explains the arguments.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import nn
from torch.optim import Optimizer

from laconic.core import arguments
from laconic.core.spec import Status
from laconic.lowbit.binarise import FIRSTS, LASTS, NORMS, First, Last, Norm, binarise
from laconic.lowbit.few_bit_handle import FewBitHandle
from laconic.lowbit.few_bits import FewBits
from laconic.lowbit.training import LowBitTraining


@dataclass(frozen=True, repr=False)
class BinariseTraining(LowBitTraining):
    """The arguments of `laconic.lowbit.binarise`."""

    name: ClassVar[str] = "binarise"
    paper: ClassVar[str] = "Courbariaux et al. 2016, arXiv:1602.02830"
    status: ClassVar[Status] = "verified"
    code: ClassVar[str] = "MatthieuCourbariaux/BinaryNet"
    examples: ClassVar[tuple[str, ...]] = ("binarise()", "binarise(first='weights', last='binary')")

    first: First = "real"
    last: Last = "real"
    stochastic: bool = False
    norm: Norm = "float"
    keep: tuple[str, ...] = ()
    seed: int = 0

    def __post_init__(self) -> None:
        arguments.names("keep", self.keep, "head")
        arguments.choice("first", self.first, FIRSTS)
        arguments.choice("last", self.last, LASTS)
        arguments.choice("norm", self.norm, NORMS)
        FewBits(stochastic=self.stochastic, seed=self.seed)

    def attach(self, model: nn.Module, optimizer: Optimizer) -> FewBitHandle:
        return binarise(
            model,
            self.first,
            self.last,
            self.stochastic,
            norm=self.norm,
            keep=self.keep,
            seed=self.seed,
        )

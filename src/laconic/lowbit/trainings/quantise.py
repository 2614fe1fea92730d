"""Training with few bits in weights, inputs and gradients (Hubara et al. 2016, arXiv:1609.07061).

`laconic.lowbit.quantise` explains the arguments.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import nn
from torch.optim import Optimizer

from laconic.core import arguments
from laconic.core.spec import Status
from laconic.lowbit.binarise import FIRSTS, LASTS, NORMS, First, Last, Norm, quantise
from laconic.lowbit.few_bit_handle import FewBitHandle
from laconic.lowbit.few_bits import FewBits, Scale
from laconic.lowbit.training import LowBitTraining


@dataclass(frozen=True, repr=False)
class QuantiseTraining(LowBitTraining):
    """The arguments of `laconic.lowbit.quantise`."""

    name: ClassVar[str] = "quantise"
    paper: ClassVar[str] = "Hubara et al. 2016, arXiv:1609.07061"
    status: ClassVar[Status] = "reconstruction"
    examples: ClassVar[tuple[str, ...]] = ("quantise()", "quantise(activations=4, gradients=None)")

    weights: int = 1
    activations: int | None = 2
    gradients: int | None = 6
    scale: Scale = "linear"
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
        FewBits(self.weights, self.activations, self.gradients, self.scale, self.stochastic, self.seed)

    def attach(self, model: nn.Module, optimizer: Optimizer) -> FewBitHandle:
        return quantise(
            model,
            self.weights,
            self.activations,
            self.gradients,
            scale=self.scale,
            first=self.first,
            last=self.last,
            stochastic=self.stochastic,
            norm=self.norm,
            keep=self.keep,
            seed=self.seed,
        )

"""ADMM towards a table of few bits, for recurrent language models (Xu et al. 2021, arXiv:2111.14836).

The optimiser's gradient gets gamma (Theta - G + lambda), and every so many steps G becomes the nearest to
Theta + lambda that a table and its scales can hold. `laconic.lowbit.admm` explains the arguments.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import nn
from torch.optim import Optimizer

from laconic.core import arguments
from laconic.core.spec import Status
from laconic.lowbit.admm import Admm
from laconic.lowbit.admm.settings import AdmmSettings
from laconic.lowbit.training import LowBitTraining


@dataclass(frozen=True, repr=False)
class AdmmTraining(LowBitTraining, AdmmSettings):
    """The arguments of `laconic.lowbit.admm`: a table, what shares a scale, and gamma's schedule."""

    name: ClassVar[str] = "admm"
    paper: ClassVar[str] = "Xu et al. 2021, arXiv:2111.14836"
    status: ClassVar[Status] = "reconstruction"
    examples: ClassVar[tuple[str, ...]] = ("admm()", "admm(table='binary', tie='layer')")

    keep: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        super().__post_init__()
        arguments.names("keep", self.keep, "head")

    def attach(self, model: nn.Module, optimizer: Optimizer) -> Admm:
        return Admm(model, optimizer, self, self.keep)

"""Blocks: activations in a fixed number of bits, linear between the extremes of a block (ActNN, GACT)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from laconic import kernels
from laconic.activations.coding import Norms
from laconic.activations.compress import Coding
from laconic.core import arguments
from laconic.core.layout import Segments
from laconic.core.spec import Status


@dataclass(frozen=True, repr=False)
class Blocks(Coding):
    """Range and `bits` bits per element for each block of 256 elements, with unbiased stochastic rounding.

    32 / (bits + 0.25) times smaller; each ReLU also stores one bit per element. All layers get the same bits.
    """

    paper: ClassVar[str] = "Chen et al. 2021, arXiv:2104.14129"
    status: ClassVar[Status] = "recalled"
    examples: ClassVar[tuple[str, ...]] = ("blocks(bits=2)",)
    keeps_signs: ClassVar[bool] = False

    bits: int = 4
    norms: Norms = "bounded"

    def __post_init__(self) -> None:
        arguments.whole("bits", self.bits, 2, 8)
        arguments.choice("norms", self.norms, ("bounded", "exact"))

    @property
    def form(self) -> kernels.MinMaxForm:
        return kernels.MinMaxForm((self.bits,), block=256, rounding="stochastic")

    def encode(self, x: Tensor, bound: float, signs: bool, key: int) -> Tensor:
        return kernels.minmax_encode(x, Segments.whole(x.numel()), [key], self.form)

    def decode(self, wire: Tensor, n: int) -> Tensor:
        out = torch.zeros(n, device=wire.device, dtype=torch.float32)
        return kernels.minmax_add_(wire, Segments.whole(n), out, self.form)

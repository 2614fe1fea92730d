"""NUQSGD: levels at powers of 2 of the norm of each block, dense where most entries are."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from laconic.codecs.quantiser import Quantiser, longest, variance
from laconic.core.layout import Segments
from laconic.core.spec import Status
from laconic.kernels.quantise.form import Form, Measure


@dataclass(frozen=True, repr=False)
class NUQSGD(Quantiser):
    """NUQSGD (Ramezani-Kebrya et al. 2021, arXiv:1908.06077), p = 1/2.

    Levels 0, 2^(1 - s), ..., 1/2, 1 of the L2 norm of each `block`, s = `levels`. Small entries are finer
    than with `qsgd(norm='l2')`, large ones coarser.

    Wire: that of `qsgd`; 1 to 127 levels. Error, with m the longest block and r = 2^(1 - s) sqrt(m): omega =
    r - 1 where r >= 9/4, else 1/8 + 2/9 r^2. Unbiased.

    >>> import torch
    >>> codec = NUQSGD(levels=3, block=0)
    >>> wire = codec.encode(torch.tensor([0.0, -4.0, 0.0]))
    >>> wire.numel(), codec.decode(wire, 3).tolist()
    (6, [0.0, -4.0, 0.0])
    """

    levels: int = 7
    block: int = 512

    unbiased: ClassVar[bool] = True
    paper: ClassVar[str] = "Ramezani-Kebrya et al. 2021, arXiv:1908.06077"
    status: ClassVar[Status] = "verified"
    code: ClassVar[str] = "fartashf/nuqsgd"
    examples: ClassVar[tuple[str, ...]] = ("nuqsgd()", "nuqsgd(levels=3, block=64)")

    @property
    def form(self) -> Form:
        return Form(self.levels, self.block, grid="powers")

    def measures(self, x: Tensor, segments: Segments) -> Measure:
        return Measure("l2")

    def omega(self, n: int) -> float:
        return variance.powers(longest(n, self.block), self.levels, "l2")

"""SWAT: the largest weights compute, and the largest inputs are kept for backward; no masks.

Raihan and Aamodt 2020, arXiv:2001.01969. It changes a model's layers, where a sparsifier masks its weights:
`laconic train --sparsity` takes both, and `laconic.sparsity.sparsify` only sparsifiers. Scripts call
`laconic.sparsity.swat`, which explains the arguments.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import nn

from laconic.core import arguments
from laconic.core.spec import Spec, Status
from laconic.sparsity.swat import FIRSTS, LAYOUTS, First, Layout, Swat, swat


@dataclass(frozen=True, repr=False)
class SwatTraining(Spec):
    """The arguments of `laconic.sparsity.swat`.

    >>> SwatTraining(sparsity=0.8)
    swat(sparsity=0.8)
    """

    name: ClassVar[str] = "swat"
    paper: ClassVar[str] = "Raihan and Aamodt 2020, arXiv:2001.01969"
    status: ClassVar[Status] = "verified"
    code: ClassVar[str] = "AamirRaihan/SWAT"
    examples: ClassVar[tuple[str, ...]] = ("swat(sparsity=0.9)",)

    sparsity: float = 0.9
    refresh: int = 10
    first: First = "dense"
    layout: Layout = "uniform"
    keep: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        arguments.number("sparsity", self.sparsity, above=0, below=1)
        arguments.whole("refresh", self.refresh, 1)
        arguments.choice("first", self.first, FIRSTS)
        arguments.choice("layout", self.layout, LAYOUTS)
        arguments.names("keep", self.keep, "head")

    def attach(self, model: nn.Module) -> Swat:
        """Begin with a model, before it is distributed."""
        return swat(model, self.sparsity, self.refresh, self.first, layout=self.layout, keep=self.keep)

"""Coding: an activation to bytes and back, within a bound that each layer is given."""

from __future__ import annotations

from abc import abstractmethod
from typing import ClassVar, Literal

from torch import Tensor

from laconic.core.spec import Spec

Norms = Literal["bounded", "exact"]


class Coding(Spec):
    """Base of the codings, without their handle. `norms`: whether inputs of batch norms are coded too."""

    adaptive: ClassVar[bool]  # whether it asks each layer for a bound
    every: int = 0
    share: float = 0.01
    mode: Literal["law", "paper"] = "law"
    norms: Norms = "bounded"

    @abstractmethod
    def encode(self, x: Tensor, bound: float, signs: bool, key: int) -> Tensor:
        """Return wire uint8 (m,) of x float32 (n,). `signs`: with exact zeros and signs, if it can."""

    @abstractmethod
    def decode(self, wire: Tensor, n: int) -> Tensor:
        """Return the float32 (n,) of a wire."""

    @property
    @abstractmethod
    def keeps_signs(self) -> bool:
        """Whether `signs=True` is honoured, so that a ReLU needs no mask beside its output."""

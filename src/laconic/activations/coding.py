"""Base of the codings of activations."""

from __future__ import annotations

from abc import abstractmethod
from typing import ClassVar, Literal

from torch import Tensor

from laconic.core.spec import Spec

Norms = Literal["bounded", "exact"]


class CodingRule(Spec):
    """Base of the codings; see `Comet` for `every`, `share`, `mode`.

    `norms`: 'bounded' encodes inputs of batch norms too, 'exact' leaves them.
    """

    adaptive: ClassVar[bool] = False  # each layer has its own bound
    every: int = 100
    share: float = 0.01
    mode: Literal["law", "paper"] = "law"
    norms: Norms = "bounded"

    @abstractmethod
    def encode(self, x: Tensor, bound: float, signs: bool, key: int) -> Tensor:
        """Return wire uint8 (m,) of x float32 (n,). `signs`: keep zeros and signs exact if supported."""

    @abstractmethod
    def decode(self, wire: Tensor, n: int) -> Tensor:
        """Return the float32 (n,) of a wire."""

    def nonzero(self, wire: Tensor, n: int) -> Tensor:
        return self.decode(wire, n) != 0

    @property
    @abstractmethod
    def keeps_signs(self) -> bool:
        """Whether `signs=True` is supported; a ReLU then needs no mask."""

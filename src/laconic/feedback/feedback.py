"""Feedback: what was not sent now is sent later."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import Any, ClassVar, Protocol

from torch import Tensor

from laconic.core.codec import Codec
from laconic.core.layout import Layout
from laconic.core.spec import Spec
from laconic.core.turn import Turn


class Share(Protocol):
    """What a reducer says this rank sent."""

    def add_to_(self, x: Tensor, alpha: float = 1.0) -> Tensor: ...
    def subtract_from_(self, x: Tensor) -> Tensor: ...
    def clear_(self, memory: Tensor) -> Tensor: ...


Hyper = Callable[[str], Mapping[str, Any]]  # tensor name -> its parameter group's present settings


class Feedback(Spec):
    """Configuration of a feedback; `bind` gives the working object.

    `owns_momentum`: momentum happens here, before the exchange, and the optimiser must not apply it again.
    """

    owns_momentum: ClassVar[bool] = False

    @abstractmethod
    def bind(self, layout: Layout, hyper: Hyper, size: int) -> BoundFeedback:
        """The working object for these tensors, in a group of `size` ranks."""

    def admit(self, codec: Codec, layout: Layout) -> None:
        """Raise `SpecError` where this feedback would diverge with this codec."""


class BoundFeedback(ABC):
    """A feedback at work: owns its memory, keyed by tensor name."""

    @abstractmethod
    def correct(self, grad: Tensor, layout: Layout, turn: Turn, scale: float = 1.0) -> Tensor | None:
        """What should be sent for scale * grad: flat x (n,) in the layout's coordinates, None if not finite.

        The returned tensor is the memory itself, or `grad`.
        """

    @abstractmethod
    def settle(self, sent: Share, layout: Layout, turn: Turn) -> None:
        """Keep what was not sent."""

    @abstractmethod
    def put_back(self, layout: Layout) -> None:
        """Undo this turn's `settle` of these tensors: the step will not be applied."""

    @abstractmethod
    def state_dict(self) -> dict[str, Tensor]:
        """Memory of this rank: "<kind>/<tensor name>" to a tensor."""

    @abstractmethod
    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Take the memory back. Raises `StateError` for other tensors or shapes."""

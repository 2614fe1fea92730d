"""Feedback: entries that are not sent now are sent later."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

from torch import Tensor

from laconic.core.codec import Codec
from laconic.core.layout import Layout
from laconic.core.lazy import name_makers
from laconic.core.spec import Spec
from laconic.core.turn import Turn

if TYPE_CHECKING:
    from laconic.feedback.ef21 import EF21 as ef21
    from laconic.feedback.error_feedback import ErrorFeedback as error_feedback
    from laconic.feedback.momentum_correction import MomentumCorrection as momentum_correction
    from laconic.feedback.no_feedback import NoFeedback as no_feedback
    from laconic.feedback.worker_momentum import WorkerMomentum as worker_momentum

__all__ = [
    "BoundFeedback",
    "Feedback",
    "Optimised",
    "Share",
    "ef21",
    "error_feedback",
    "momentum_correction",
    "no_feedback",
    "worker_momentum",
]

name_makers(__name__)


class Share(Protocol):
    def subtract_from_(self, x: Tensor) -> Tensor: ...
    def clear_(self, memory: Tensor) -> Tensor: ...


class Optimised(Protocol):
    def settings(self, name: str) -> Mapping[str, Any]:
        """Return the current settings of this tensor's group."""

    def is_local(self, name: str) -> bool:
        """Return whether feedback applies the momentum."""

    def momentum_buffer(self, name: str) -> Tensor | None:
        """Return SGD's momentum of this tensor, or None."""

    def continue_momentum(self, name: str, velocity: Tensor) -> None:
        """Let SGD continue from this mean velocity, flat (n,)."""


class Feedback(Spec):
    """Configuration of a feedback; `bind` returns the working object.

    `keeps_unsent`: whether it holds back unsent entries.
    """

    keeps_unsent: ClassVar[bool] = True

    @property
    def clears_sent(self) -> bool:
        """Whether sent entries of a memory are cleared."""
        return False

    @abstractmethod
    def bind(self, layout: Layout, optimised: Optimised, size: int) -> BoundFeedback:
        """Return the working object for these tensors, among `size` ranks."""

    def gain(self, codec: Codec | None, layout: Layout) -> float:
        """Return the factor of the decoded mean. Raises `SpecError` if feedback would diverge."""
        return 1.0

    def clip_at(self, step: int) -> float | None:
        """Return the limit of the whole gradient's norm, summed over ranks, or None."""
        return None

    @property
    def local_momentum(self) -> bool:
        """Whether momentum is applied before the exchange if possible."""
        return False

    @property
    def needs_optimiser(self) -> bool:
        """Whether it applies an optimiser's momentum."""
        return False

    @property
    def dense_steps(self) -> int:
        """Steps of a dense warm-up, which leaves momentum to the optimiser."""
        return 0


class BoundFeedback(ABC):
    """Feedback bound to tensors: owns its memory, keyed by tensor name.

    `detects_non_finite`: whether `correct` returns None if the gradient is not finite. `holds_back`:
    whether a part of a gradient can be sent later. `replaces_mean`: whether it has a `receive_`.
    """

    detects_non_finite: ClassVar[bool] = True
    holds_back: ClassVar[bool] = True
    replaces_mean: ClassVar[bool] = False

    @abstractmethod
    def correct(
        self, grad: Tensor, layout: Layout, turn: Turn, scale: float = 1.0, *, free: bool = False
    ) -> Tensor | None:
        """Return the tensor to send for scale * grad: flat x in the layout's coordinates, or None.

        It is the memory itself, or `grad`. None stands for a non-finite gradient; no memory has then
        changed. `free`: whether the buffer of `grad` may hold old values of a memory until `accept` or
        `put_back`.
        """

    @abstractmethod
    def settle(self, share: Share, layout: Layout, turn: Turn) -> None:
        """Keep the unsent part. The sent share leaves the memory when the next turn begins."""

    def receive_(self, mean: Tensor, layout: Layout, turn: Turn, scale: float) -> None:
        """Replace scale * the mean of the sent shares by the optimiser's gradient.

        Called after `settle` if `replaces_mean`.
        """
        raise NotImplementedError

    @abstractmethod
    def put_back(self, layout: Layout) -> None:
        """Undo this turn's `correct`, `settle` and `receive_` bit for bit."""

    def accept(self, layout: Layout) -> None:
        return

    def release_momentum(self, kept: float | None = None) -> None:
        """Leave momentum to the optimiser from the next step on. This rank alone acts; all call it.

        `kept`: share of the velocity to apply later, through the residual. None: forget the velocity, and
        do not change residuals.
        """
        return

    @abstractmethod
    def discard(self) -> None:
        """Clear all residuals, between steps."""

    @abstractmethod
    def state_dict(self) -> dict[str, Tensor]:
        """Return the memory of this rank: "<kind>/<tensor name>" to a tensor."""

    @abstractmethod
    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Load the memory. Raises `StateError` for wrong tensors or shapes."""

"""Feedback: entries that are not sent now are sent later."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

from torch import Tensor

from laconic.comm.comm import Comm
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
    """The sent share of this rank, as a reducer returns it."""

    def subtract_from_(self, x: Tensor) -> Tensor: ...
    def clear_(self, memory: Tensor) -> Tensor: ...
    def scale_chosen_(self, memory: Tensor, waited: Tensor, factor: float) -> Tensor: ...


class Optimised(Protocol):
    """The optimiser, as far as a feedback may use it."""

    def settings(self, name: str) -> Mapping[str, Any]:
        """Return the current settings (`lr`, `momentum`, ...) of this tensor's group."""

    def is_local(self, name: str) -> bool:
        """Whether the tensor's momentum is applied by its feedback, and not by the optimiser."""

    def momentum_buffer(self, name: str) -> Tensor | None:
        """The momentum that SGD has gathered of this tensor; None where it has none."""

    def continue_momentum(self, name: str, velocity: Tensor) -> None:
        """Let SGD continue from the mean over ranks of this tensor's velocity, flat (n,)."""


class Feedback(Spec):
    """Configuration of a feedback; `bind` returns the working object.

    `keeps_unsent`: whether it holds back unsent entries, so that it needs the sent share.
    """

    keeps_unsent: ClassVar[bool] = True

    @property
    def clears_sent(self) -> bool:
        """Whether sent entries of a memory are cleared, in addition to subtracting the sent share."""
        return False

    @abstractmethod
    def bind(self, layout: Layout, optimised: Optimised, size: int) -> BoundFeedback:
        """Return the working object for these tensors, in a group of `size` ranks."""

    def gain(self, codec: Codec | None, layout: Layout) -> float:
        """Return the factor of the decoded mean. Raises `SpecError` if feedback would diverge."""
        return 1.0

    def clip_at(self, step: int) -> float | None:
        """Return the limit of the whole gradient's norm, summed over ranks, or None."""
        return None

    @property
    def local_momentum(self) -> bool:
        """Whether momentum is applied here, before the exchange, where the optimiser's kind allows it."""
        return False

    @property
    def needs_optimiser(self) -> bool:
        """Whether it needs an optimiser whose momentum it applies."""
        return False

    @property
    def dense_steps(self) -> int:
        """Number of first steps of a dense warm-up, which leaves momentum to the optimiser; default: 0."""
        return 0


class BoundFeedback(ABC):
    """A feedback bound to tensors: owns its memory, keyed by tensor name.

    `detects_non_finite`: whether `correct` returns None for a gradient that is not finite. `holds_back`:
    whether a part of a gradient can be sent in a later step. `replaces_mean`: whether it has a `receive_`.
    """

    detects_non_finite: ClassVar[bool] = True
    holds_back: ClassVar[bool] = True
    replaces_mean: ClassVar[bool] = False

    @abstractmethod
    def correct(
        self, grad: Tensor, layout: Layout, turn: Turn, scale: float = 1.0, *, free: bool = False
    ) -> Tensor | None:
        """Return the tensor to send for scale * grad: flat x in the layout's coordinates; None if not finite.

        The returned tensor is the memory itself, or `grad`. With None, no memory has changed.

        Args:
            free: Whether the buffer of `grad` is unused until `accept` or `put_back`, so that it may hold old
                values of a memory.
        """

    @abstractmethod
    def settle(self, share: Share, layout: Layout, turn: Turn) -> None:
        """Keep the unsent part. The sent share leaves the memory when the next turn begins."""

    def receive_(self, mean: Tensor, layout: Layout, turn: Turn, scale: float) -> None:
        """Replace scale * the mean of the sent shares by the optimiser's gradient.

        Called after `settle` if `replaces_mean`, with the same flat `mean` on every rank.
        """
        raise NotImplementedError

    @abstractmethod
    def put_back(self, layout: Layout) -> None:
        """Undo this turn's `correct`, `settle` and `receive_` bit for bit, since the step is skipped."""

    def accept(self, layout: Layout) -> None:
        """Drop the old values of these tensors' memory, since the step is not skipped."""
        return

    def release_momentum(self) -> None:
        """Leave momentum to the optimiser from the next step on, and forget the velocity."""
        return

    def give_back(self, comm: Comm) -> None:
        """Leave momentum to the optimiser, which continues it if it can; between steps, on all ranks."""
        self.release_momentum()

    @abstractmethod
    def discard(self) -> None:
        """Clear all residuals, between steps, so that no earlier gradient affects a later step."""

    @abstractmethod
    def state_dict(self) -> dict[str, Tensor]:
        """Return the memory of this rank: "<kind>/<tensor name>" to a tensor."""

    @abstractmethod
    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Load the memory. Raises `StateError` for wrong tensors or shapes."""

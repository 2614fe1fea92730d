"""Feedback: what was not sent now is sent later."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, ClassVar, Protocol

from torch import Tensor

from laconic.core.codec import Codec
from laconic.core.layout import Layout
from laconic.core.spec import Spec
from laconic.core.turn import Turn


class Share(Protocol):
    """What a reducer says this rank sent."""

    def subtract_from_(self, x: Tensor) -> Tensor: ...
    def clear_(self, memory: Tensor) -> Tensor: ...


class Optimised(Protocol):
    """What a feedback may know of the optimiser."""

    def settings(self, name: str) -> Mapping[str, Any]:
        """The present settings (`lr`, `momentum`, ...) of the group that this tensor is in."""

    def take_momentum(self, name: str) -> Tensor | None:
        """The tensor's momentum buffer, which the optimiser then forgets; None where it has none."""

    def give_momentum(self, name: str, buffer: Tensor) -> None:
        """Give the optimiser back the momentum buffer that `take_momentum` returned: the step is skipped."""


class Feedback(Spec):
    """Configuration of a feedback; `bind` gives the working object.

    `keeps_unsent`: whether it holds back what was not sent, for which someone must account for that.
    """

    keeps_unsent: ClassVar[bool] = True

    @property
    def clears_sent(self) -> bool:
        """Whether a memory forgets the entries that were sent, beside what was sent of them."""
        return False

    @abstractmethod
    def bind(self, layout: Layout, optimised: Optimised, size: int) -> BoundFeedback:
        """The working object for these tensors, in a group of `size` ranks."""

    def gain(self, codec: Codec | None, layout: Layout) -> float:
        """By how much the decoded mean is multiplied. Raises `SpecError` where feedback would diverge."""
        return 1.0

    def clip_at(self, step: int) -> float | None:
        """The norm that the whole gradient is limited to, summed over ranks; None where it is not."""
        return None

    def owns_momentum(self, step: int) -> bool:
        """Whether momentum happens here, before the exchange, not in the optimiser."""
        return False


class BoundFeedback(ABC):
    """A feedback at work: owns its memory, keyed by tensor name.

    `detects_non_finite`: whether `correct` returns None for a gradient that is not finite. `holds_back`:
    whether a gradient can come back in a later step.
    """

    detects_non_finite: ClassVar[bool] = True
    holds_back: ClassVar[bool] = True

    @abstractmethod
    def correct(
        self, grad: Tensor, layout: Layout, turn: Turn, scale: float = 1.0, *, free: bool = False
    ) -> Tensor | None:
        """Return the tensor to send for scale * grad: flat x in the layout's coordinates; None if not finite.

        The returned tensor is the memory itself, or `grad`. If it is None, no memory has changed.

        Args:
            free: Whether the buffer of `grad` is free from now on until `accept` or `put_back`: old values of
                a memory may be there meanwhile.
        """

    @abstractmethod
    def settle(self, share: Share, layout: Layout, turn: Turn) -> None:
        """Keep what was not sent. What was sent leaves the memory when the next turn begins."""

    def receive_(self, mean: Tensor, layout: Layout, turn: Turn, scale: float) -> None:
        """What the optimiser gets, in place of scale * mean of what ranks sent: by default that itself.

        Called after `settle`, on every rank with the same `mean`, flat in the layout's coordinates.
        """
        return

    @abstractmethod
    def put_back(self, layout: Layout) -> None:
        """Undo this turn's `correct`, `settle` and `receive_` to the last bit: the step is skipped."""

    def accept(self, layout: Layout) -> None:
        """Forget the old values of the memory of these tensors: the step counts."""
        return

    @abstractmethod
    def discard(self) -> None:
        """Forget all gradients so far, between steps: nothing of them comes back."""

    @abstractmethod
    def state_dict(self) -> dict[str, Tensor]:
        """Memory of this rank: "<kind>/<tensor name>" to a tensor."""

    @abstractmethod
    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Take the memory back. Raises `StateError` for other tensors or shapes."""

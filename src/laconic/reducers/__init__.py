"""Reducer: each rank's tensor to the group's mean, over a Comm, with codecs."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from torch import Tensor

from laconic.comm.comm import Comm
from laconic.comm.sent import Sent
from laconic.core.codec import Codec
from laconic.core.errors import StateError
from laconic.core.layout import Layout
from laconic.core.mask import Mask, cleared
from laconic.core.spec import Spec
from laconic.core.turn import Turn


@dataclass(frozen=True)
class Gathering:
    """An all-gather of this codec's messages among `size` members."""

    codec: Codec
    size: int
    members: str = "ranks"


class Reducer(Spec):
    """Configuration of a reduction: a frozen dataclass. `bind` gives the working object."""

    @property
    def exact_mean(self) -> bool:
        """Whether mean = average of what the ranks sent + what its own memory gave: laws hold it to that."""
        return True

    @property
    def unaccountable(self) -> str | None:
        """Why no rank can account for what its share lost, so that feedback is refused; else None."""
        return None

    @property
    def adaptive(self) -> bool:
        """Whether what it sends depends on clocks, so that no run tells what another will send."""
        return False

    @abstractmethod
    def bind(self, layout: Layout, comm: Comm) -> BoundReducer:
        """The working object.

        Args:
            layout: all tensors that it will reduce, in parts that DDP's buckets decide.
            comm: the group over which it takes means. All ranks bind in the same order.

        Raises:
            SpecError: this reduction cannot serve these tensors, or so many ranks.
        """

    @abstractmethod
    def nbytes(self, layout: Layout) -> int:
        """Payload of one rank for one exchange of these tensors, in bytes.

        Returns:
            The exact number, or the most it can be in a group of any size.
        """

    def gathers(self, size: int) -> tuple[Gathering, ...]:
        """Return the all-gathers of messages that a reduction makes in a group of `size` ranks."""
        return ()

    def feedback_codec(self) -> Codec | None:
        """The codec whose error stays behind on this rank; None where there is none to name.

        That is: where nothing is lost, where nobody can account for it (`unaccountable`), or where what stays
        behind follows from what all ranks agree on, as with chosen entries that are sent as they are.
        """
        return None

    @property
    def needs_feedback(self) -> bool:
        """Whether what stays behind should be sent later: by default where the codec says so.

        A reducer that says yes without a codec leaves behind no more than it was given: |x - sent| <= |x|.
        """
        codec = self.feedback_codec()
        return codec is not None and codec.needs_feedback


class Composition:
    """Reducers with what goes with them, each for some tensors: a method, as a reducer's argument."""


class BoundReducer(ABC):
    """A reduction at work: owns whatever state it needs."""

    @property
    def detects_non_finite(self) -> bool:
        """Whether `reduce` may be given an x that is not finite, and then returns None on every rank.

        By default not: a feedback, or the exchange itself, looks at x before, which can cost a pass over it.
        """
        return False

    @abstractmethod
    def reduce(
        self, x: Tensor | None, layout: Layout, turn: Turn, out: Tensor, alpha: float = 1.0
    ) -> Sent | None:
        """out[layout] = alpha * mean over ranks of x[layout], for flat x and out in the layout's coordinates.

        Args:
            x: finite float32 (n,), which is not changed unless it is `out`; None where this rank's gradient
                is not finite.
            layout: a part of the layout given at `bind`, the same on all ranks.
            turn: the step, and the keys that random numbers are drawn from.
            out: float32 (n,); it may be x itself.
            alpha: factor of the mean.

        Returns:
            This rank's share, as the others decode it; None on every rank where any of them has no finite x.
            `out[layout]` is then undefined.

        Raises:
            WireError: a message is damaged; the error names the rank that sent it.
        """

    def begin(
        self, x: Tensor | None, layout: Layout, turn: Turn, out: Tensor, alpha: float = 1.0
    ) -> Callable[[], Sent | None] | None:
        """The first part of `reduce`, whose arguments it takes, so that others reduce meanwhile.

        Returns:
            The call that ends it, which is made also where the step is void. Until then nobody may touch
            x[layout] or out[layout]. None, with nothing begun, where a reduction has no such parts: here.
        """
        return None

    def put_back(self, layout: Layout) -> None:
        """Undo to the last bit what the present turn's `reduce` of this layout did to its state.

        The step is skipped. Also called where `reduce` was not, or has returned None.
        """
        assert not self.remembers, f"{type(self).__name__} keeps state, and must put it back"

    def accept(self, layout: Layout) -> None:
        """Forget what `put_back` of this layout would need: the step counts."""
        return

    @property
    def remembers(self) -> bool:
        """Whether it has state that a step changes: by default where `put_back` is overridden."""
        return type(self).put_back is not BoundReducer.put_back

    @property
    def checks_mean(self) -> bool:
        """Whether the last `reduce` has found out by itself whether the mean is finite: by default not."""
        return False

    def writes_late(self, step: int) -> bool:
        """Whether it writes means by `laconic.core.deferred.write`, which can wait; by default False.

        Then `reduce` returns None on every rank if the mean of one could overflow.
        """
        return False

    @property
    def own_shapes(self) -> tuple[str, ...]:
        """How keys of its state begin whose values have not the shape of the tensor they name: here none."""
        return ()

    @property
    def holds_back(self) -> bool:
        """Whether a part of a mean can come back in a later step: by default not."""
        return False

    def discard(self) -> None:
        """Forget what is held back of the means so far, between steps."""
        assert not self.holds_back, f"{type(self).__name__} holds back, and must forget"

    def remask(self, masks: Mapping[str, Mask]) -> None:
        """Other entries of the tensors are in use from now on: memory of those that are not is to go.

        Called on every rank, between two backward passes. State from which nothing comes back stays.
        """
        kept = cleared(self.state_dict(), masks) if self.holds_back else None
        if kept is not None:
            self.load_state_dict(kept)

    def state_dict(self) -> dict[str, Tensor]:
        """State of this rank: "<kind>/<tensor name>" to a tensor; empty where there is none."""
        return {}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Take the state back.

        Raises:
            StateError: this reduction did not make such a state.
        """
        if state:
            raise StateError(f"{type(self).__name__} keeps no state, got {sorted(state)}")

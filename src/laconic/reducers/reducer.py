"""Reducer: each rank's tensor to the group's mean, over a Comm, with codecs."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from torch import Tensor

from laconic.comm.comm import Comm
from laconic.core.codec import Codec
from laconic.core.errors import StateError
from laconic.core.layout import Layout, Segments
from laconic.core.spec import Spec
from laconic.core.turn import Turn


class Sent(ABC):
    """This rank's share as the others decode it. No method makes a dense temporary."""

    @abstractmethod
    def add_to_(self, x: Tensor, alpha: float = 1.0) -> Tensor:
        """x += alpha * share, in place."""

    @abstractmethod
    def clear_(self, memory: Tensor) -> Tensor:
        """Set to zero the entries of memory that were sent."""

    def subtract_from_(self, x: Tensor) -> Tensor:
        """x -= share, in place."""
        return self.add_to_(x, -1.0)


@dataclass(frozen=True)
class SentMessage(Sent):
    """A share that is a codec's message."""

    codec: Codec
    wire: Tensor
    segments: Segments

    def add_to_(self, x: Tensor, alpha: float = 1.0) -> Tensor:
        return self.codec.decode_segments_add_(self.wire, self.segments, x, alpha)

    def clear_(self, memory: Tensor) -> Tensor:
        return self.codec.clear_segments_(self.wire, self.segments, memory)


class Reducer(Spec):
    """Configuration of a reduction; `bind` gives the working object."""

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
        """The working object for the tensors of this layout, over this group."""

    @abstractmethod
    def nbytes(self, layout: Layout) -> int:
        """Payload of one rank for one exchange of these tensors, in bytes: exact, or the most it can be in a
        group of any size."""

    def codec(self) -> Codec | None:
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
        codec = self.codec()
        return codec is not None and codec.needs_feedback


class BoundReducer(ABC):
    """A reduction at work: owns whatever state it needs."""

    @abstractmethod
    def reduce(
        self, x: Tensor | None, layout: Layout, turn: Turn, out: Tensor, alpha: float = 1.0
    ) -> Sent | None:
        """out[layout] = alpha * mean over ranks of x[layout], for flat x and out in the layout's coordinates.

        `x is None` says that this rank's gradient is not finite: every rank then returns None, and `out` is
        undefined. `x` may be `out` itself. `layout` is a part of the one given at bind.
        """

    def begin(
        self, x: Tensor | None, layout: Layout, turn: Turn, out: Tensor, alpha: float = 1.0
    ) -> Callable[[], Sent | None] | None:
        """The same as `reduce` in two parts, so that others reduce meanwhile; the call that is returned ends
        it, also where the step is void. None, and nothing begun, where a reduction has no such parts: here.

        Between the two nobody may touch x[layout] or out[layout]. It leaves no state behind.
        """
        return None

    def put_back(self, layout: Layout) -> None:
        """Undo what the present turn's `reduce` of this layout did to its state: the step is void."""
        assert not self.state_dict(), f"{type(self).__name__} keeps state, and must put it back"

    def state_dict(self) -> dict[str, Tensor]:
        """State of this rank, "<kind>/<tensor name>" to a tensor; empty where there is none."""
        return {}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Take the state back. Raises `StateError` for a state that this reduction did not make."""
        if state:
            raise StateError(f"{type(self).__name__} keeps no state, got {sorted(state)}")

"""Reducers: the mean of all ranks' tensors, over a Comm, using codecs."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import Tensor

from laconic.codecs.sparse import Sparse
from laconic.comm.comm import Comm
from laconic.comm.messages import Sent
from laconic.core.codec import Codec
from laconic.core.errors import StateError
from laconic.core.layout import Layout
from laconic.core.lazy import name_makers
from laconic.core.mask import Mask, cleared
from laconic.core.selector import check_density
from laconic.core.spec import Spec
from laconic.core.turn import Turn
from laconic.feedback import Optimised
from laconic.feedback.error_feedback import AHEAD

if TYPE_CHECKING:
    from laconic.reducers.autotune import Autotune as autotune
    from laconic.reducers.cltk import CLTk as cltk
    from laconic.reducers.deft import Deft as deft
    from laconic.reducers.deft.exdyna import Exdyna as exdyna
    from laconic.reducers.deft.micro import Micro as micro
    from laconic.reducers.dense_first import DenseFirst as dense_first
    from laconic.reducers.gather import Gather as gather
    from laconic.reducers.gtopk import GTopk as gtopk
    from laconic.reducers.learned_code import LearnedCode as learned_code
    from laconic.reducers.majority_vote import MajorityVote as majority_vote
    from laconic.reducers.masked import Masked as masked
    from laconic.reducers.oktopk import OkTopk as oktopk
    from laconic.reducers.powersgd import PowerSGD as powersgd
    from laconic.reducers.scatter_reduce import ScatterReduce as scatter_reduce
    from laconic.reducers.scatter_reduce.adaptive_bits import AdaptiveBits as adaptive_bits
    from laconic.reducers.server import Server as server
    from laconic.reducers.shared_scale import SharedScale as shared_scale
    from laconic.reducers.sum import Sum as sum
    from laconic.reducers.two_level import TwoLevel as two_level

__all__ = [
    "BoundReducer",
    "Composition",
    "Gathering",
    "Reducer",
    "adaptive_bits",
    "autotune",
    "cltk",
    "deft",
    "dense_first",
    "exdyna",
    "gather",
    "gtopk",
    "learned_code",
    "majority_vote",
    "masked",
    "micro",
    "oktopk",
    "powersgd",
    "scatter_reduce",
    "server",
    "shared_scale",
    "sum",
    "two_level",
]

name_makers(__name__)


@dataclass(frozen=True)
class Gathering:
    """All-gather of this codec's messages among `size` members."""

    codec: Codec
    size: int
    members: str = "ranks"


class Reducer(Spec):
    """Configuration of a reduction: a frozen dataclass."""

    @property
    def exact_mean(self) -> bool:
        """Whether the mean is the average of the sent shares plus released memory."""
        return True

    @property
    def unaccountable(self) -> str | None:
        """Reason why ranks cannot account for the loss of their share, which excludes feedback; or None."""
        return None

    @property
    def adaptive(self) -> bool:
        """Whether the sent data depends on timing."""
        return False

    @abstractmethod
    def bind(self, layout: Layout, comm: Comm) -> BoundReducer:
        """Return the working object, bound by all ranks in the same order.

        Args:
            layout: All tensors to reduce.
            comm: Group to average over.

        Raises:
            SpecError: The tensors or the number of ranks are not supported.
        """

    def momentum_tensors(self, layout: Layout) -> Layout:
        """Return the tensors whose SGD momentum the reduction may apply."""
        return Layout(())

    def bind_optimised(self, layout: Layout, comm: Comm, optimised: Optimised) -> BoundReducer:
        """Bind with the optimiser of `momentum_tensors`."""
        return self.bind(layout, comm)

    @abstractmethod
    def nbytes(self, layout: Layout) -> int:
        """Return the bytes that a rank sends per exchange: exact, or the maximum over group sizes."""

    def gathers(self, size: int) -> tuple[Gathering, ...]:
        """Return the all-gathers in a group of `size` ranks."""
        return ()

    def feedback_codec(self) -> Codec | None:
        """Return the codec whose error stays on this rank.

        None: nothing is lost, the loss is `unaccountable`, or all ranks agree on the unsent part.
        """
        return None

    @property
    def needs_feedback(self) -> bool:
        """Whether the unsent part should be sent later. Without a codec, True requires |x - sent| <= |x|."""
        codec = self.feedback_codec()
        return codec is not None and codec.needs_feedback

    @property
    def local_momentum(self) -> bool:
        """Whether error feedback by default applies momentum before this reduction."""
        return True

    @property
    def ahead(self) -> float:
        """Default `ahead` of error feedback."""
        codec = self.feedback_codec()
        return AHEAD if codec is None or isinstance(codec, Sparse) else 0.0


@dataclass(frozen=True, repr=False)
class DensityReducer(Reducer):
    """Base of reducers that send a share of the entries, with feedback."""

    density: float = 0.001

    def __post_init__(self) -> None:
        check_density(self.density)

    @property
    def needs_feedback(self) -> bool:
        return True


class Composition:
    """Reducers by tensor: a method, as an argument of a reducer."""


class BoundReducer(ABC):
    """Working reduction; owns its state."""

    @property
    def detects_non_finite(self) -> bool:
        """Whether `reduce` returns None on every rank for a non-finite x; else x is checked before."""
        return False

    @abstractmethod
    def reduce(
        self, x: Tensor | None, layout: Layout, turn: Turn, out: Tensor, alpha: float = 1.0
    ) -> Sent | None:
        """Write out[layout] = alpha * mean over ranks of x[layout], for flat x and out with equal offsets.

        Args:
            x: Finite float32 (n,), unchanged unless it is `out`; None if this rank's gradient is not finite.
            layout: Part of the layout given at `bind`, equal on all ranks.
            turn: Step and random keys.
            out: float32 (n,); may be x.
            alpha: Factor of the mean.

        Returns:
            This rank's share, as the others decode it. None on every rank if one has no finite x;
            `out[layout]` is then undefined.

        Raises:
            WireError: A message is damaged; it names the sending rank.
        """

    @property
    def overlaps(self) -> bool:
        """Whether `begin` starts a reduction in the background."""
        return False

    def begin(
        self, x: Tensor | None, layout: Layout, turn: Turn, out: Tensor, alpha: float = 1.0
    ) -> Callable[[], Sent | None]:
        """Run the first part of `reduce`, if the reduction `overlaps`; return a callable that finishes it.

        The callable also runs if the step is skipped; until then x[layout] and out[layout] must not be used.
        """
        raise NotImplementedError

    def begin_pass(self, *, stepped: bool) -> None:
        """Begin a backward pass, on all ranks.

        `stepped`: whether the optimisers have applied the last one; otherwise momentum stays.
        """
        return

    @property
    def momentum_names(self) -> Collection[str]:
        """Tensors whose SGD momentum this step applies here."""
        return ()

    def release_momentum(self, kept: float | None = None) -> None:
        """Leave momentum to the optimiser from the next step on; see `BoundFeedback`."""
        return

    def put_back(self, layout: Layout) -> None:
        """Restore, bit for bit, the state before this step's `reduce` of this layout: the step is skipped.

        Also called if `reduce` was not called or returned None.
        """
        assert not self.remembers, f"{type(self).__name__} is stateful and must override put_back"

    def accept(self, layout: Layout) -> None:
        """Drop the data for `put_back`: the step is valid."""
        return

    @property
    def remembers(self) -> bool:
        """Whether a step changes its state."""
        return type(self).put_back is not BoundReducer.put_back

    @property
    def checks_mean(self) -> bool:
        """Whether the last `reduce` has checked that the mean is finite."""
        return False

    def writes_late(self, step: int) -> bool:
        """Whether it writes means with `laconic.core.deferred.write` while writing must wait.

        `reduce` then returns None on every rank if a mean could overflow.
        """
        return False

    @property
    def own_shapes(self) -> tuple[str, ...]:
        """Key prefixes of state that is not of its tensor's shape."""
        return ()

    @property
    def holds_back(self) -> bool:
        """Whether part of a mean may be delayed to a later step."""
        return False

    def discard(self) -> None:
        """Drop the delayed parts of all means, between steps."""
        assert not self.holds_back, f"{type(self).__name__} delays parts of means and must override discard"

    def remask(self, masks: Mapping[str, Mask]) -> None:
        """Change the entries in use, between steps on all ranks; clear the memory of the others."""
        kept = cleared(self.state_dict(), masks) if self.holds_back else None
        if kept is not None:
            self.load_state_dict(kept)

    def state_dict(self) -> dict[str, Tensor]:
        """Return this rank's state by "<kind>/<tensor name>"."""
        return {}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Restore the state. Raises `StateError` if it is not such a reduction's."""
        if state:
            raise StateError(f"{type(self).__name__} is stateless, got {sorted(state)}")

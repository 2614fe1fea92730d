"""Dense first: the exact mean for some steps, then another reduction."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from laconic.comm.comm import Comm
from laconic.comm.messages import Sent
from laconic.core import arguments
from laconic.core.codec import Codec
from laconic.core.errors import SpecError
from laconic.core.layout import Layout
from laconic.core.spec import Status
from laconic.core.turn import Turn
from laconic.reducers import BoundReducer, Gathering, Reducer
from laconic.reducers.masked import Masked
from laconic.reducers.sum import Sum


@dataclass(frozen=True, repr=False)
class DenseFirst(Reducer):
    """`sum()` for the first `steps` steps, then `then`. Payload: 4 bytes per element, then that of `then`.

    >>> from laconic.core.spec import parse
    >>> parse("dense_first(gather(cast('bf16')), steps=100)")
    dense_first(gather(cast(dtype='bf16')), steps=100)
    """

    status: ClassVar[Status] = "own"

    then: Reducer
    steps: int

    examples: ClassVar[tuple[str, ...]] = ("dense_first(gather(sparse(topk(density=0.1))), steps=4)",)

    def __post_init__(self) -> None:
        arguments.piece("dense_first: then", self.then, Reducer, "gather(sign())")
        if isinstance(self.then, Masked):
            raise SpecError("masked must be outermost: write masked(dense_first(...)), without masked inside")
        arguments.whole("dense_first: steps", self.steps, 1)

    @property
    def warm_at(self) -> int:
        return max(self.steps, self.then.warm_at)

    @property
    def exact_mean(self) -> bool:
        return self.then.exact_mean

    @property
    def unaccountable(self) -> str | None:
        return self.then.unaccountable

    def bind(self, layout: Layout, comm: Comm) -> BoundReducer:
        return BoundDenseFirst(self.steps, Sum().bind(layout, comm), self.then.bind(layout, comm))

    def nbytes(self, layout: Layout) -> int:
        return max(Sum().nbytes(layout), self.then.nbytes(layout))

    def gathers(self, size: int) -> tuple[Gathering, ...]:
        return self.then.gathers(size)

    def feedback_codec(self) -> Codec | None:
        return self.then.feedback_codec()

    @property
    def local_momentum(self) -> bool:
        return self.then.local_momentum

    @property
    def ahead(self) -> float:
        return self.then.ahead

    @property
    def needs_feedback(self) -> bool:
        return self.then.needs_feedback


@dataclass
class BoundDenseFirst(BoundReducer):
    steps: int
    dense: BoundReducer
    then: BoundReducer

    def at(self, step: int) -> BoundReducer:
        return self.dense if step < self.steps else self.then

    @property
    def detects_non_finite(self) -> bool:
        return self.then.detects_non_finite

    def reduce(
        self, x: Tensor | None, layout: Layout, turn: Turn, out: Tensor, alpha: float = 1.0
    ) -> Sent | None:
        return self.at(turn.step).reduce(x, layout, turn, out, alpha)

    def writes_late(self, step: int) -> bool:
        return self.at(step).writes_late(step)

    @property
    def remembers(self) -> bool:
        return self.then.remembers

    def put_back(self, layout: Layout) -> None:
        self.then.put_back(layout)

    def accept(self, layout: Layout) -> None:
        self.then.accept(layout)

    @property
    def holds_back(self) -> bool:
        return self.then.holds_back

    def discard(self) -> None:
        self.then.discard()

    def state_dict(self) -> dict[str, Tensor]:
        return self.then.state_dict()

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        self.then.load_state_dict(state)

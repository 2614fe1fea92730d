"""Two levels: one reduction inside each machine, another between one leader per machine.

For N ranks on G machines, machine g with n_g ranks:

    1. m_g = mean of x over the ranks of machine g, by `inner`
    2. y_g = G n_g / N * m_g    mean = 1/G * sum of y_g, by `outer`, between the leaders
    3. the leader broadcasts the mean inside its machine

Rank i's share is that of `inner`, on the leader less N/G * (y_g - share_g), the loss of `outer`: the average
of the shares is the mean. Groups as in hierarchical all-reduce (Jia et al. 2018, arXiv:1807.11205);
compressing only step 2 is ours.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from laconic import kernels
from laconic.comm.comm import Comm
from laconic.comm.mesh import machines, ranks_beside
from laconic.comm.messages import Sent
from laconic.core import arguments
from laconic.core.codec import Codec
from laconic.core.errors import SpecError
from laconic.core.layout import Layout, Segments
from laconic.core.spec import Status
from laconic.core.turn import Turn, mix
from laconic.feedback.memory.contraction import safe_gain
from laconic.reducers import BoundReducer, Composition, Gathering, Reducer
from laconic.reducers.masked import Masked
from laconic.reducers.sum import DenseShare

BETWEEN = 0x2E7E1  # separates the leaders' keys


@dataclass(frozen=True, repr=False)
class TwoLevel(Reducer):
    """mean by `inner` inside machines and by `outer` between their leaders, the first rank of each.

    `ranks_per_node`: consecutive ranks per machine; 0 uses LOCAL_RANK and LOCAL_WORLD_SIZE of `torchrun`,
    needed for machines of different sizes. `inner` is stateless: `sum()`, or `gather` of a codec. `outer` is
    any reducer, or, for `compress`, a method, whose reductions are then between machines; tensors that it
    sums are summed over all ranks. `tells`: the leader sends its machine a mask of its sent entries, one bit
    per entry; set if a method's feedback clears these. Payload of a leader: that of both, and 4 bytes per
    element inside.

    >>> from laconic.core.spec import parse
    >>> parse("two_level(sum(), gather(sparse(topk(density=0.01))), ranks_per_node=8)")
    two_level(sum(), outer=gather(sparse(topk(density=0.01))), ranks_per_node=8)
    """

    inner: Reducer
    outer: Reducer | Composition
    ranks_per_node: int = 0
    tells: bool = False

    paper: ClassVar[str] = "Jia et al. 2018, arXiv:1807.11205"
    status: ClassVar[Status] = "recalled"
    examples: ClassVar[tuple[str, ...]] = (
        "two_level(sum(), gather(sparse(topk(density=0.1))), ranks_per_node=1)",
        "two_level(gather(cast('bf16')), server(cast('bf16'), cast('bf16')), ranks_per_node=1)",
    )

    def __post_init__(self) -> None:
        arguments.piece("two_level: inner", self.inner, Reducer, "sum()")
        if not isinstance(self.outer, Composition):
            arguments.piece("two_level: outer", self.outer, Reducer, "gather(sparse(topk(density=0.01)))")
        if isinstance(self.outer, Masked) or isinstance(self.inner, Masked):
            raise SpecError("masked must be outermost: write masked(two_level(...)), without masked inside")
        arguments.flag("two_level: tells", self.tells)
        arguments.whole("two_level: ranks_per_node", self.ranks_per_node)

    @property
    def between(self) -> Reducer:
        """Reducer between machines. Raises `SpecError` if a method chooses it."""
        if isinstance(self.outer, Composition):
            raise SpecError(
                f"two_level with a method, {self.outer!r}, is a method: `compress` and `distribute` take it,"
                " but a reducer is needed here, such as gather(sparse(topk(density=0.01)))"
            )
        return self.outer

    @property
    def exact_mean(self) -> bool:
        return self.inner.exact_mean and self.between.exact_mean

    @property
    def adaptive(self) -> bool:
        return self.inner.adaptive or self.between.adaptive

    @property
    def unaccountable(self) -> str | None:
        return self.inner.unaccountable or self.between.unaccountable

    @property
    def local_momentum(self) -> bool:
        return self.inner.local_momentum and self.between.local_momentum

    @property
    def ahead(self) -> float:
        return max((each.ahead for each in (self.inner, self.between) if each.needs_feedback), default=0.0)

    @property
    def needs_feedback(self) -> bool:
        """Whether either needs it; |x - sent| <= |x| then holds for the sum over a machine's ranks."""
        return self.inner.needs_feedback or self.between.needs_feedback

    def gathers(self, size: int) -> tuple[Gathering, ...]:
        inside = ranks_beside(self.ranks_per_node)
        inner, outer = self.inner.gathers(inside), self.between.gathers(-(-size // inside))
        return (
            *(replace(each, members="ranks of the machine") for each in inner),
            *(replace(each, members="machines' first ranks") for each in outer),
        )

    def feedback_codec(self) -> Codec | None:
        return self.inner.feedback_codec() if self.inner.needs_feedback else self.between.feedback_codec()

    def bind(self, layout: Layout, comm: Comm) -> BoundReducer:
        if self.inner.needs_feedback and self.between.needs_feedback:
            safe_gain(self.between.feedback_codec(), layout)
        return _TwoLevel(self, layout, comm)

    def nbytes(self, layout: Layout) -> int:
        inside = 4 * (layout.numel + 1) + (layout.numel // 8 + len(layout) if self.tells else 0)
        return self.inner.nbytes(layout) + self.between.nbytes(layout) + inside


@dataclass(frozen=True)
class Relayed(Sent):
    """Leader's share: that of `inner`, less `ranks` times the loss of `outer` in y."""

    inner: Sent
    outer: Sent
    y: DenseShare
    ranks: float

    def add_to_(self, x: Tensor, alpha: float = 1.0) -> Tensor:
        self.inner.add_to_(x, alpha)
        self.y.add_to_(x, -alpha * self.ranks)
        return self.outer.add_to_(x, alpha * self.ranks)

    def clear_(self, memory: Tensor) -> Tensor:
        return self.outer.clear_(self.inner.clear_(memory))


@dataclass(frozen=True)
class MaskedShare(Sent):
    """Share, and `crossed` bool (runs.numel,): the entries that have crossed machines."""

    share: Sent
    inner: Sent
    runs: Segments
    crossed: Tensor

    def add_to_(self, x: Tensor, alpha: float = 1.0) -> Tensor:
        return self.share.add_to_(x, alpha)

    def clear_(self, memory: Tensor) -> Tensor:
        cleared = self.inner.clear_(memory.clone())
        parts = torch.split(self.crossed, list(self.runs.sizes))
        for view, new, crossed in zip(self.runs.views(memory), self.runs.views(cleared), parts, strict=True):
            view.copy_(torch.where(crossed, new, view))
        return memory


class _TwoLevel(BoundReducer):
    """Working reduction. A broadcast ends in NaN if a rank's gradient is not finite."""

    def __init__(self, spec: TwoLevel, layout: Layout, comm: Comm) -> None:
        homes = machines(comm, spec.ranks_per_node)
        home = homes[comm.rank]
        self._inside = comm.split(home)
        self._leads = self._inside.rank == 0
        # collective: the other ranks reduce nothing in their group
        self._leaders = comm.split(int(not self._leads))
        self._weight = homes.count(home) * len(set(homes)) / comm.size
        self._ranks = comm.size / len(set(homes))
        self._tells = spec.tells
        self._inner = spec.inner.bind(layout, self._inside)
        if self._inner.state_dict():
            raise SpecError(f"two_level: inner must be stateless, such as sum(), got {spec.inner!r}")
        self._outer = spec.between.bind(layout, self._leaders)

    @property
    def detects_non_finite(self) -> bool:
        return self._inner.detects_non_finite

    def reduce(
        self, x: Tensor | None, layout: Layout, turn: Turn, out: Tensor, alpha: float = 1.0
    ) -> Sent | None:
        runs = layout.segments.merged
        apart = x is not out
        y = torch.empty_like(out) if apart else out
        sent = inner = self._inner.reduce(x, layout, turn, y)
        mean = out.new_zeros(runs.numel + 1)  # the last element marks a finite mean
        parts = list(zip(runs.views(out), torch.split(mean[:-1], list(runs.sizes)), strict=True))
        if self._leads:
            sent = self._between(sent, layout, turn, y, out, alpha)
            for view, part in parts:
                part.copy_(view)
            mean[-1] = torch.nan if sent is None else 0.0
        self._inside.broadcast(mean)
        if not bool(mean[-1].isfinite()):
            return None
        if not self._leads:
            for view, part in parts:
                view.copy_(part)
        if not self._tells or sent is None or inner is None:
            return sent
        return MaskedShare(sent, inner, runs, self._crossed(sent, runs, out))

    def _crossed(self, sent: Sent, runs: Segments, out: Tensor) -> Tensor:
        bits = torch.zeros(-(-runs.numel // 8), dtype=torch.uint8, device=out.device)
        places = torch.arange(8, dtype=torch.uint8, device=out.device)
        if isinstance(sent, Relayed):
            left = sent.outer.clear_(torch.ones_like(out))
            crossed = torch.cat([*runs.views(left), left[:0]]) == 0
            padded = torch.nn.functional.pad(crossed.to(torch.uint8), (0, 8 * len(bits) - runs.numel))
            bits = (padded.view(-1, 8) << places).sum(dim=1, dtype=torch.uint8)
        if runs.numel:
            self._inside.broadcast(bits)
        return (bits[:, None] >> places & 1).bool().view(-1)[: runs.numel]

    def _between(
        self, sent: Sent | None, layout: Layout, turn: Turn, y: Tensor, out: Tensor, alpha: float
    ) -> Sent | None:
        runs = layout.segments.merged
        finite = sent is not None and kernels.all_finite(layout.segments.scale_(y, self._weight), runs)
        turn = replace(turn, rank=self._leaders.rank, seed=mix(turn.seed, BETWEEN))
        share = self._outer.reduce(y if finite else None, layout, turn, out, alpha)
        if sent is None or share is None:
            return None
        kept = None if y is out else torch.cat([*runs.views(y), y[:0]])
        return Relayed(sent, share, DenseShare(runs, kept, 1.0), self._ranks)

    def put_back(self, layout: Layout) -> None:
        if self._leads:
            self._outer.put_back(layout)

    def accept(self, layout: Layout) -> None:
        if self._leads:
            self._outer.accept(layout)

    @property
    def remembers(self) -> bool:
        return self._outer.remembers

    @property
    def holds_back(self) -> bool:
        return self._outer.holds_back

    def discard(self) -> None:
        self._outer.discard()

    def state_dict(self) -> dict[str, Tensor]:
        state = self._outer.state_dict()
        return state if self._leads else {key: torch.zeros_like(value) for key, value in state.items()}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Restore the state on a leader; `outer` need not accept the zeros of other ranks."""
        if self._leads:
            self._outer.load_state_dict(state)

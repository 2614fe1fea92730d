"""A new group after a loss: threads as ranks, in which nobody dies and one has missed a group."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from tests.laws.strategy_ranks import Rank, Together
from tests.unit.shared import for_each

from laconic.comm.loopback import Loopback
from laconic.comm.metered import Metered
from laconic.strategies.membership.average import Stand, average_


@dataclass
class Renewed(Together):
    """A membership whose groups are made anew; `missed`: groups that this rank was not in."""

    missed: int = 0
    generation: int = 0
    living: list[int] = field(default_factory=list)
    told: list[Any] = field(default_factory=list)

    def renew(self, why: str) -> None:
        self.generation += 1 + self.missed

    def tell(self, *what: Any) -> None:
        self.told.append(what)


def renewed(spec: str, comm: Loopback, away: int) -> Rank:
    """A rank under such a membership; `away` has missed a group."""
    rank = Rank(spec, comm)
    missed = int(comm.rank == away)
    rank.controller.membership = Renewed(Metered(comm.split(0)), comm.split(0), missed=missed)  # type: ignore[assignment]
    return rank


@for_each("dtype", [torch.float32, torch.float16])
def test_an_infinite_statistic_survives_a_rank_that_comes_back(dtype: torch.dtype) -> None:
    """Causal masks are buffers of -inf. Its share counts for nothing, also where it is not finite."""
    mask = torch.full((3, 3), -torch.inf, dtype=dtype).triu(1)

    def play(comm: Loopback) -> torch.Tensor:
        rank = Rank("local_sgd()", comm)
        own = mask.clone()
        rank.model.register_buffer("mask", own)
        x = torch.full_like(rank.replica.flat, torch.nan if comm.rank == 1 else comm.rank)
        agreed = average_(rank.replica, x, Stand(comm.rank, comm.rank != 1, True, {}), comm)
        assert (agreed.averaged, agreed.place, agreed.trained) == ([0, 2], 2, True)
        assert torch.equal(rank.replica.flat, torch.ones_like(x))
        return own

    assert all(torch.equal(own, mask) for own in Loopback.run(3, play))


MEMORIES = {
    **{"diloco(every=2)": "velocity", "slowmo(every=2)": "momentum"},
    **{"slowmo(every=2, base=sgp())": "momentum", "easgd(every=2)": "centre"},
}


@for_each("spec", MEMORIES)
def test_memory_that_all_share_outlives_a_loss(spec: str) -> None:
    """The rank that was away takes it over too, bit for bit."""
    key = MEMORIES[spec]

    def play(comm: Loopback) -> None:
        rank = renewed(spec, comm, away=1)
        rank.train(range(4))
        before = rank.memory()[key]
        if comm.rank == 1:
            rank.controller.bound.agreed()[key].fill_(7.0)
        rank.controller._regroup(4, "a test")
        assert bool(before.any()) and torch.equal(before, rank.memory()[key])
        rank.train(range(4, 8))
        rank.optimizer.finish()

    Loopback.run(3, play)


@for_each("strategy, key", [("diloco(every=2)", "velocity"), ("slowmo(every=2)", "momentum")])
def test_memory_of_first_ranks_outlives_a_loss_under_by_machine(strategy: str, key: str) -> None:
    """Another rank of the first machine is furthest; what it knows of it is from an earlier group."""

    def play(comm: Loopback) -> list[torch.Tensor]:
        rank = renewed(f"by_machine({strategy}, ranks_per_node=2)", comm, away=3)
        seen = []
        for start in (0, 4):
            rank.train(range(start, start + 4))
            before = rank.memory().get(key)
            rank.controller._regroup(start + 4 + (comm.rank == 1), "a test")
            seen += [before, rank.memory().get(key)]
        rank.optimizer.finish()
        return seen

    for number, seen in enumerate(Loopback.run(4, play)):
        if number % 2:
            assert seen == [None] * 4
            continue
        first, kept, second, kept_again = seen
        assert bool(first.any()) and torch.equal(first, kept)
        assert not torch.equal(first, second) and torch.equal(second, kept_again)


@for_each("spec, reset", [("diloco(every=2)", {"anchor"}), ("sgp()", {"weight"})])
def test_every_regroup_tells_what_starts_anew(spec: str, reset: set[str]) -> None:
    def play(comm: Loopback) -> list[Any]:
        rank = renewed(spec, comm, away=1)
        rank.train(range(2))
        rank.controller._regroup(2, "a test")
        return rank.controller.membership.told  # type: ignore[attr-defined, no-any-return]

    for ((before, step, agreed, fresh),) in Loopback.run(3, play):
        assert (before, step, agreed.averaged, {*fresh}) == ([], 2, [0, 2], reset)


@for_each("keep", [False, True])
def test_each_rank_keeps_its_statistics_where_it_is_told_to(keep: bool) -> None:
    """Rank 1 was away, and takes the others' mean over as it does their model. Frozen ones are one rank's."""

    def play(comm: Loopback) -> tuple[float, float]:
        rank = Rank("local_sgd()", comm)
        own, frozen = torch.tensor([10.0 * comm.rank]), torch.tensor([100.0 + comm.rank])
        rank.model.register_buffer("mean", own)
        rank.model.register_parameter("frozen", torch.nn.Parameter(frozen, requires_grad=False))
        stand = Stand(1, comm.rank != 1, True, {})
        average_(rank.replica, rank.replica.flat, stand, comm, keep)
        return own.item(), frozen.item()

    means = [0.0, 10.0, 20.0] if keep else [10.0, 10.0, 10.0]
    assert Loopback.run(3, play) == [(mean, 100.0) for mean in means]

"""The laws of strategies: each holds for every strategy that is registered, as it declares it.

Those that depend on clocks have theirs in processes: `tests/dist/test_clocked.py`.
"""

from __future__ import annotations

import copy
from contextlib import nullcontext
from functools import partial
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor

from laconic.comm.loopback import Loopback
from laconic.core.errors import LaconicError, NonFiniteError, StateError
from laconic.core.spec import parse
from laconic.exchange.state import resize
from laconic.strategies.strategy import Strategy
from tests.cases import over
from tests.unit.strategy_world import N, Numbers, same_bits, sgd

from .strategy_ranks import Rank, fits, is_clocked, played
from .table import first_of_each, specs

SIZES = (2, 3, 4)
SPECS = [spec for spec in specs(Strategy) if not is_clocked(spec)]
FIRST = first_of_each(SPECS)
LARGEST = {spec: max(size for size in SIZES if fits(spec, size)) for spec in SPECS}  # group of each
each_spec = over(spec=SPECS)
OVER_OSGP = ("slowmo(every=6, base=osgp())", "quasi_global(osgp())", "by_machine(osgp(), ranks_per_node=2)")
ROUNDING = {"rtol": 1e-4, "atol": 1e-5}  # float32, over a few dozen steps of numbers around 1


def steps_of(spec: str) -> int:
    """Two periods of a short one, and always one whole period and a few steps."""
    period = parse(spec).period
    return max(6, 2 * period if period <= 16 else period) + 2


@over(spec=SPECS, size=SIZES, where=fits)
def test_ranks_are_alike_when_they_meet_and_after_finish(spec: str, size: int) -> None:
    """Bit for bit: after each period where it says so, and always after `finish`; training then goes on."""
    strategy, steps = parse(spec), steps_of(spec)
    assert strategy.period >= 1

    def act(rank: Rank) -> tuple[list[Tensor], Tensor, Tensor]:
        met = []
        for step in range(steps):
            rank.train([step])
            if (step + 1) % strategy.period == 0:
                met.append(rank.flat)
        rank.optimizer.finish()
        end = rank.flat
        rank.train([steps])
        return met, end, rank.flat

    met, ends, further = zip(*played(spec, size, act), strict=True)
    assert len(met[0]) >= 1
    assert all(same_bits(models) for models in zip(*met, strict=True)) or not strategy.meets
    assert same_bits(ends)
    assert all(bool(model.isfinite().all()) and not torch.equal(model, ends[0]) for model in further)


@over(spec=[spec for spec in SPECS if parse(spec).keeps_mean], size=SIZES, where=fits)
def test_talking_alone_brings_ranks_together_about_their_mean(spec: str, size: int) -> None:
    """At a rate of 0, from models that differ."""
    models = torch.randn(size, N, generator=torch.Generator().manual_seed(size))
    mean = models.mean(0)

    def play(comm: Loopback) -> tuple[float, float, Tensor, Tensor]:
        rank = Rank(spec, comm, lr=0.0)
        rank.replica.flat.copy_(models[comm.rank])
        apart = float((rank.flat - mean).norm())
        rank.train(range(steps_of(spec) + 12))
        rank.optimizer.state_dict()  # settles what is under way
        with rank.optimizer.averaged():
            inside = rank.flat
        closer = float((rank.flat - mean).norm())
        rank.optimizer.finish()
        end = rank.flat
        rank.optimizer.remove()
        return apart, closer, inside, end

    found = Loopback.run(size, play)
    assert sum(closer for _, closer, *_ in found) < sum(apart for apart, *_ in found)
    for _, _, inside, end in found:
        torch.testing.assert_close(inside, mean, **ROUNDING)
        torch.testing.assert_close(end, mean, **ROUNDING)


@each_spec
def test_resumed_is_never_stopped(spec: str) -> None:
    """The same bits. Saving settles open messages: both are asked for their state at that step."""
    size, steps = LARGEST[spec], steps_of(spec)
    stop = steps // 2 + 1

    def play(comm: Loopback) -> bool:
        whole, first, second = (Rank(spec, comm) for _ in range(3))
        whole.train(range(stop))
        first.train(range(stop))
        whole.optimizer.state_dict()
        second.optimizer.load_state_dict(first.optimizer.state_dict())
        ranks = [whole, second]
        for rank in ranks:
            rank.train(range(stop, steps))
        same = torch.equal(whole.flat, second.flat)
        for rank in (whole, first, second):
            rank.optimizer.finish()
            rank.optimizer.remove()
        return same and torch.equal(whole.flat, second.flat)

    assert Loopback.run(size, play) == [True] * size


@over(spec=(*FIRST, *OVER_OSGP))
def test_loading_leaves_nothing_of_the_model_that_it_replaces(spec: str) -> None:
    """A model that has trained, with messages under way, and a new one load the same state: the same bits."""
    size, steps = LARGEST.get(spec, 4), steps_of(spec)

    def play(comm: Loopback) -> bool:
        saver, new, used = (Rank(spec, comm) for _ in range(3))
        saver.train(range(steps))
        saved = saver.optimizer.state_dict()
        used.train(range(100, 103))
        for rank in (new, used):
            rank.optimizer.load_state_dict(copy.deepcopy(saved))
            rank.train(range(steps, steps + 4))
        same = torch.equal(new.flat, used.flat)
        for rank in (saver, new, used):
            rank.optimizer.finish()
            rank.optimizer.remove()
        return same and torch.equal(new.flat, used.flat)

    assert Loopback.run(size, play) == [True] * size


OF_FOUR_OR_TWO = (
    *(spec for spec, size in LARGEST.items() if size == 4 and fits(spec, 2)),
    *OVER_OSGP,
    "lsgd(every=4, local_every=2, ranks_per_node=1)",
)


@over(spec=OF_FOUR_OR_TWO)
def test_a_group_of_four_goes_on_as_two(spec: str) -> None:
    """From their average; `by_machine`, whose ranks keep different things, is refused."""

    def save(rank: Rank) -> tuple[dict[str, Any], Tensor]:
        rank.train(range(steps_of(spec)))
        state = rank.optimizer.state_dict()
        rank.optimizer.finish()
        return state, rank.flat

    saved, ends = zip(*played(spec, 4, save), strict=True)
    states = [state["laconic"] for state in saved]
    if spec.startswith("by_machine"):
        with pytest.raises(StateError, match="same tensors"):
            resize(states, 2)
        return

    def load(rank: Rank) -> tuple[Tensor, Tensor]:
        state = {**rank.optimizer.optimizer.state_dict(), "laconic": resize(states, 2)[rank.comm.rank]}
        rank.optimizer.load_state_dict(state)
        begun = rank.flat
        rank.train(range(3))
        rank.optimizer.finish()
        return begun, rank.flat

    begun, further = zip(*played(spec, 2, load), strict=True)
    assert same_bits(begun) and same_bits(further)
    if parse(spec).keeps_mean:
        torch.testing.assert_close(begun[0], ends[0], **ROUNDING)


@each_spec
def test_one_rank_trains_or_is_told_that_it_is_alone(spec: str) -> None:
    """What keeps the mean of one leaves its model as it is: that is plain training, up to rounding."""
    if not fits(spec, 1):
        with pytest.raises(LaconicError, match=r"number of ranks|ranks_per_node=\d does not divide"):
            parse(spec).check(1, sgd(Numbers()))
        return
    steps = range(steps_of(spec))

    def together(rank: Rank) -> Tensor:
        rank.train(steps)
        rank.optimizer.finish()
        return rank.flat

    def plain(rank: Rank) -> Tensor:
        alone = rank.optimizer.optimizer
        rank.optimizer.remove()
        for step in steps:
            rank.give(step)
            alone.step()
            for name, view in rank.replica.views(rank.replica.flat).items():  # by which gradients go
                view.copy_(rank.replica.parameters[name].detach())
        return rank.flat

    (found,), (wanted,) = played(spec, 1, together), played(spec, 1, plain)
    assert bool(found.isfinite().all())
    assert torch.allclose(found, wanted, **ROUNDING) or not parse(spec).keeps_mean


@over(spec=SPECS, bad=(0, 1))
def test_a_gradient_that_is_not_finite_is_skipped_and_the_round_taken(spec: str, bad: int) -> None:
    """The rank is told, and goes on with its next batch: the same bits as if a GradScaler had skipped."""

    def act(rank: Rank, scaled: bool) -> Tensor:
        for step in range(7):
            rank.give(step)
            if step == 4 and rank.comm.rank == bad:
                rank.spoil()
                if scaled:
                    rank.optimizer.found_inf = torch.ones(1)  # type: ignore[attr-defined]
                with (
                    nullcontext()
                    if scaled
                    else pytest.raises(NonFiniteError, match="it took part in the round")
                ):
                    rank.optimizer.step()
                if scaled:
                    del rank.optimizer.found_inf  # type: ignore[attr-defined]
                rank.optimizer.zero_grad()
            else:
                rank.optimizer.step()
        rank.optimizer.finish()
        return rank.flat

    told, skipped = (played(spec, LARGEST[spec], partial(act, scaled=scaled)) for scaled in (False, True))
    assert same_bits([*told, *skipped]) and bool(told[0].isfinite().all())


@each_spec
def test_a_scaler_skips_the_update_of_the_rank_that_overflowed(spec: str) -> None:
    """That rank alone, or its machine, skips it; all of them talk, and none is ever not finite."""
    size = LARGEST[spec]

    def act(rank: Rank) -> tuple[float, bool, Tensor]:
        scaler, finite = torch.amp.GradScaler("cpu", init_scale=8.0), True
        for step in range(7):
            rank.give(step)
            scale = scaler.scale(torch.ones(()))
            for each in rank.replica.parameters.values():
                each.grad.mul_(scale)
            if step == 4 and rank.comm.rank == 1:
                rank.spoil()
            scaler.step(rank.optimizer)
            scaler.update()
            finite &= bool(rank.flat.isfinite().all())
        rank.optimizer.finish()
        return scaler.get_scale(), finite, rank.flat

    scales, finite, ends = zip(*played(spec, size, act), strict=True)
    assert scales == tuple(4.0 if rank == 1 else 8.0 for rank in range(size))
    assert all(finite) and same_bits(ends)


@over(specs=pairwise([*FIRST, FIRST[0]]))
def test_two_strategies_side_by_side_do_not_disturb_each_other(specs: tuple[str, str]) -> None:
    """In turns in one group: each has the bits that it has alone."""
    size, steps = max(size for size in SIZES if all(fits(spec, size) for spec in specs)), range(9)

    def alone(rank: Rank) -> Tensor:
        rank.train(steps)
        rank.optimizer.finish()
        return rank.flat

    def beside(comm: Loopback) -> list[Tensor]:
        ranks = [Rank(spec, comm) for spec in specs]
        for step in steps:
            for rank in ranks:
                rank.train([step])
        for rank in ranks:
            rank.optimizer.finish()
        for rank in ranks:
            rank.optimizer.remove()
        return [rank.flat for rank in ranks]

    wanted = [played(spec, size, alone) for spec in specs]
    for rank, found in enumerate(Loopback.run(size, beside)):
        assert all(torch.equal(a, ends[rank]) for a, ends in zip(found, wanted, strict=True))

"""LSGD and EASGD against their equations, written out over a list of tensors."""

from __future__ import annotations

import math
import re
from typing import Any

import pytest
import torch
from tests.unit.shared import for_each, refuses, same
from torch import Tensor, nn

import laconic
from laconic.comm.loopback import Loopback
from laconic.core.errors import AttachError, LaconicError, NonFiniteError, SpecError
from laconic.strategies.leaders.lsgd.election import Losses, elect, poll

from .strategy_world import N, gradient, same_bits, sgd, start, stopped_and_resumed, trained, worker

TWO = "lsgd(every=4, local_every=2, ranks_per_node=2)"
ROUNDING = 1e-5  # float32, over a dozen steps of numbers around 1
LOSSES = torch.rand(40, 8, generator=torch.Generator().manual_seed(3)).tolist()


def by_table(rank: int, step: int) -> float:
    return float(LOSSES[step][rank])


def lsgd_twin(size, steps, *, local, g_comm, l_comm, p, c, average) -> list[Tensor]:
    """LSGD as in spec 2.1 with (local, global) p and c; plain SGD of rate 0.1."""
    (p1, p2), (c1, c2) = p, c
    x, several = [start() for _ in range(size)], local < size
    nearest, far = [start() for _ in range(size)], start()
    for step in range(steps):
        for k in range(size):
            x[k] = x[k] - 0.1 * gradient(x[k], k, step)
            x[k] = (1 - p2 / g_comm) * x[k] + p2 / g_comm * far
            if several:
                x[k] = (1 - p1 / l_comm) * x[k] + p1 / l_comm * nearest[k]
        window = range(max(0, step + 1 - average), step + 1)
        mean = [sum(LOSSES[s][k] for s in window) / len(window) for k in range(size)]
        for first in range(0, size, local) if several and (step + 1) % l_comm == 0 else ():
            machine = range(first, first + local)
            leader = x[min(machine, key=lambda k: mean[k])].clone()
            for k in machine:
                nearest[k] = leader
                x[k] = (1 - c1) * x[k] + c1 * leader
        if (step + 1) % g_comm == 0:
            far = x[min(range(size), key=lambda k: mean[k])].clone()
            x = [(1 - c2) * each + c2 * far for each in x]
    return x


@for_each("size, local", [(4, 2), (6, 3), (3, 3), (6, 2)])
def test_lsgd_is_what_its_equations_say(size: int, local: int) -> None:
    settings = "every=6, local_every=2, pull=0.6, local_pull=0.3, mix=0.2, local_mix=0.4, average=3"
    found = trained(f"lsgd({settings}, ranks_per_node={local})", size, 15, loss=by_table)
    wanted = lsgd_twin(size, 15, local=local, g_comm=6, l_comm=2, p=(0.3, 0.6), c=(0.4, 0.2), average=3)
    torch.testing.assert_close([*found], [*wanted], rtol=ROUNDING, atol=ROUNDING)


def test_a_leader_is_not_moved_by_its_own_lead() -> None:
    def play(comm: Loopback) -> tuple[bool, bool, Tensor]:
        rank = worker("lsgd(every=3, local_every=3, pull=0.0, mix=1.0, ranks_per_node=3)", comm)
        rank.train(range(2))
        before = rank.replica.flat.clone()
        slope = gradient(before, comm.rank, 2)
        rank.train(range(2, 3), loss=lambda r, step: float(r != 1))
        alone = before.add(slope, alpha=-0.1)
        return torch.equal(rank.replica.flat, alone), rank.bound.notes()["leader"] == 1, rank.replica.flat

    found = Loopback.run(3, play)
    assert [unmoved for unmoved, _, _ in found] == [False, True, False]
    assert all(named for _, named, _ in found)
    assert same_bits([x for _, _, x in found])


def test_equal_ranks_stay_equal() -> None:
    for spec in (TWO, "lsgd(ranks_per_node=4)", "easgd(every=2)"):
        assert same_bits(trained(spec, 4, 9, alike=True)), spec


def test_machines_of_one_rank_each_have_a_global_leader_only() -> None:
    alone = trained("lsgd(every=4, local_every=2, ranks_per_node=1, average=3)", 3, 9, loss=by_table)
    assert same(
        alone, trained("lsgd(every=4, local_every=2, ranks_per_node=3, average=3)", 3, 9, loss=by_table)
    )


def test_ties_go_to_the_first_and_nan_never_leads() -> None:
    nan, inf = math.nan, math.inf

    def voted(told: list[float]) -> list[int | None]:
        def play(comm: Loopback) -> int | None:
            losses = Losses(2)
            losses.note(told[comm.rank])
            return elect(poll(comm, losses, torch.zeros(2)), range(comm.size))

        return Loopback.run(len(told), play)

    assert voted([0.5, 0.25, 0.25]) == [1, 1, 1]
    assert voted([nan, 0.5, inf]) == [1, 1, 1]
    assert voted([nan, -inf, 7.0]) == [2, 2, 2]
    refuses(NonFiniteError, "no rank can lead", voted, [nan, nan, inf])


def test_losses_are_judged_by_the_mean_of_the_last() -> None:
    losses = Losses(3)
    for loss in (9.0, 1.0, 2.0, 3.0, 4.0):
        losses.note(loss)
    assert losses.mean() == 3.0
    assert losses.fresh() == 5
    losses.note(math.nan)
    assert math.isnan(losses.mean())
    for loss in (1.0, 1.0, 1.0):
        losses.note(loss)
    assert losses.mean() == 1.0


def test_a_machine_where_nobody_can_lead_follows_the_global_leader() -> None:
    def play(comm: Loopback) -> dict[str, Any]:
        rank = worker(TWO, comm)
        rank.train(range(4), loss=lambda r, step: math.nan if r < 2 else float(5 - r))
        return rank.bound.notes()

    assert [each["local_leader"] for each in Loopback.run(4, play)] == [-1, -1, 3, 3]
    assert [each["leader"] for each in Loopback.run(4, play)] == [3, 3, 3, 3]


def test_a_rank_that_had_no_inputs_leads_again_at_once() -> None:
    """Under Join its loss is inf: it cannot lead at that election, and its losses before and after count."""

    def play(comm: Loopback) -> list[int]:
        rank, leaders = worker("lsgd(every=2, local_every=2, average=6, ranks_per_node=2)", comm), []
        for step in range(6):
            rank.train([step], loss=lambda r, s: math.inf if r == 1 and s in (2, 3) else 2.0 - r)
            leaders.append(rank.bound.notes()["leader"])
        return leaders

    assert Loopback.run(2, play) == [[-1, 1, 1, 0, 0, 1]] * 2


def said(spec: str, size: int, spoil: int | None = None, **how: Any) -> list[tuple[type, str]]:
    """The error of every rank; the parameters of rank `spoil` become infinite."""

    def play(comm: Loopback) -> tuple[type, str]:
        rank = worker(spec, comm)
        if comm.rank == spoil:
            rank.replica.flat[3] = torch.inf
        try:
            rank.train(range(4), **how)
        except LaconicError as error:
            return type(error), str(error)
        return type(None), ""

    return Loopback.run(size, play)


@for_each("local", [2, 4])
def test_a_loss_that_was_not_told_is_missed_on_every_rank(local: int) -> None:
    found = said(f"lsgd(ranks_per_node={local})", 4, loss=lambda rank, step: None if rank == 2 else 1.0)
    if local == 4:  # the only meeting is at step 16
        assert {kind for kind, _ in found} == {type(None)}
        found = said("lsgd(every=4, ranks_per_node=4)", 4, loss=lambda rank, step: None if rank == 2 else 1.0)
    for kind, text in found:
        assert kind is AttachError
        assert "rank 2 has recorded no loss" in text
        assert "optimizer.note_loss(loss)" in text


def test_a_loss_that_was_told_long_ago_does_not_count() -> None:
    two = "lsgd(every=2, local_every=2, ranks_per_node=2)"
    found = said(two, 2, loss=lambda rank, step: 1.0 if step < 2 else None)
    assert {kind for kind, _ in found} == {AttachError}


@for_each("spec", [TWO, "easgd()"])
def test_what_has_diverged_is_said_on_every_rank(spec: str) -> None:
    for kind, text in said(spec, 4, spoil=1):
        assert kind is NonFiniteError
        assert "has diverged" in text


def easgd_twin(size: int, steps: int, every: int, beta: float) -> tuple[list[Tensor], Tensor]:
    x, centre = [start() for _ in range(size)], start()
    for step in range(steps):
        x = [x[k] - 0.1 * gradient(x[k], k, step) for k in range(size)]
        if (step + 1) % every == 0:
            alpha, mean = beta / size, sum(x, torch.zeros(N)) / size
            x, centre = (
                [(1 - alpha) * each + alpha * centre for each in x],
                (1 - beta) * centre + beta * mean,
            )
    return x, centre


def easgd_on(comm: Loopback) -> tuple[Tensor, Tensor, Tensor]:
    """Parameters, the group's model, and what a meeting without a step changes of x and c together."""
    rank = worker("easgd(every=3, beta=0.5)", comm)
    rank.train(range(11))
    flat, model = rank.replica.flat.clone(), rank.bound.consensus(rank.aside)
    for group in rank.optimizer.param_groups:
        group["lr"] = 0.0
    rank.train(range(11, 12))
    moved = comm.all_reduce(rank.replica.flat - flat) + rank.bound.consensus(rank.aside) - model
    return flat, model, moved


@for_each("size", [2, 5])
def test_easgd_is_what_its_equations_say(size: int) -> None:
    found = Loopback.run(size, easgd_on)
    wanted, centre = easgd_twin(size, 11, 3, 0.5)
    for (flat, model, moved), twin in zip(found, wanted, strict=True):
        torch.testing.assert_close(flat, twin, rtol=ROUNDING, atol=ROUNDING)
        torch.testing.assert_close(model, centre, rtol=ROUNDING, atol=ROUNDING)
        assert float(moved.abs().max()) < ROUNDING
    assert same_bits([model for _, model, _ in found])


@for_each("spec", [TWO, "lsgd(every=4, average=7, ranks_per_node=4)", "easgd(every=3)"])
def test_resumed_is_never_stopped_between_elections(spec: str) -> None:
    assert all(torch.equal(*ends) for ends in stopped_and_resumed(spec, 4, 5, 13, loss=by_table))


@for_each("spec", [TWO, "easgd()"])
def test_an_adopted_model_leaves_nothing_to_pull_to(spec: str) -> None:
    def adopted(comm: Loopback) -> Tensor:
        rank = worker(spec, comm, lambda model: sgd(model, (0.0, 0.0)))
        rank.train(range(6), loss=by_table)
        rank.bound.adopt_(torch.arange(N, dtype=torch.float32))
        rank.train(range(6, 12), loss=by_table)
        return rank.replica.flat.clone()

    assert same_bits([*Loopback.run(4, adopted), torch.arange(N, dtype=torch.float32)])


def test_a_meeting_costs_a_broadcast_of_each_leader() -> None:
    """4 local meetings and 2 global ones: rank 0 leads all, rank 2 its machine."""

    def snapshot(comm: Loopback) -> Any:
        rank = worker(TWO, comm)
        rank.train(range(8), loss=lambda r, step: float(r))
        return rank.comm.snapshot()

    found = Loopback.run(4, snapshot)
    assert [each.payload_sent for each in found] == [4 * 24 + 6 * 4 * N, 4 * 24, 4 * 24 + 4 * 4 * N, 4 * 24]
    assert found[0].parts["leader", "broadcast"].payload_sent == 2 * 4 * N


@for_each(
    "spec, words",
    [
        ("lsgd(every=10)", "every must be a multiple of local_every=4"),
        ("lsgd(every=10)", "use every=12"),
        ("lsgd(local_every=0)", "lsgd: local_every must be a whole number of 1 or more"),
        ("lsgd(pull=1.5)", "lsgd: pull must be a number in [0, 1], got 1.5"),
        ("lsgd(ranks_per_node=-1)", "lsgd: ranks_per_node must be a whole number"),
        ("lsgd(average=-1)", "lsgd: average must be a whole number"),
        ("easgd(every=0)", "easgd: every must be a whole number"),
        ("easgd(beta=0)", "easgd: beta must be a number in (0, 1], got 0"),
    ],
)
def test_wrong_settings_are_refused(spec: str, words: str) -> None:
    refuses(SpecError, re.escape(words), laconic.parse, spec)


@for_each(
    "spec, size, words",
    [
        ("lsgd()", 1, "a leader needs followers: start more workers"),
        ("lsgd(ranks_per_node=4)", 6, "ranks_per_node=4 does not divide 6 ranks: set it to"),
        ("easgd()", 1, "one rank cannot average with another"),
    ],
)
def test_a_group_that_does_not_fit_is_refused(spec: str, size: int, words: str) -> None:
    with pytest.raises(SpecError) as refused:
        laconic.parse(spec).check(size, sgd(nn.ParameterList([torch.zeros(2), torch.zeros(2)])))
    assert words in str(refused.value)

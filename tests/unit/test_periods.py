"""LSGD by the steps of all: how many there are between meetings, who does them, and what comes of it."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
from tests.unit.shared import for_each, refuses, same
from torch import Tensor

from laconic.comm.loopback import Loopback
from laconic.comm.metered import Metered
from laconic.core.errors import AttachError, SpecError
from laconic.core.spec import parse
from laconic.strategies.leaders.lsgd.periods import TotalPeriods

from .strategy_world import gradient, same_bits, start, taken_over, trained, worker
from .test_leaders import by_table

SIZES = [2, 5]
SPEC = (
    "lsgd(every=6, local_every=3, pull=0.6, local_pull=0.3, mix=0.2, local_mix=0.4, average=2, {}"
    "count='total')"
)


def loss_of(rank: int, step: int) -> float:
    """The table again and again: a fast rank may do all of the steps."""
    return by_table(rank, step % 40)


def paced(
    comm: Loopback, spec: str, meetings: int, length: int, begun: list[int]
) -> tuple[list[int], Tensor]:
    """Train until so many meetings; rank 0 does a step when the others have begun all but one of a period's.

    `begun`: steps begun by each rank. This rank's steps in each period, and its parameters.
    """
    rank, steps, size = worker(spec, comm), 0, comm.size
    counts = [0] * meetings
    while (met := rank.bound.notes()["rounds"]) < meetings:
        while comm.rank == 0 and sum(begun) < (met + 1) * size * length - 1:
            time.sleep(0.001)
        begun[comm.rank] += 1
        rank.train(range(steps, steps + 1), loss=loss_of)
        counts[met] += 1
        steps += 1
    return counts, rank.replica.flat.clone()


@for_each("size", SIZES)
def test_a_slow_rank_does_one_step_while_the_others_do_the_rest(size: int) -> None:
    begun = [0] * size
    spec = SPEC.format("ranks_per_node=1, ").replace("every=6", "every=3")
    found = Loopback.run(size, lambda comm: paced(comm, spec, 5, 3, begun))
    assert found[0][0] == [1] * 5
    for period in range(5):
        assert sum(counts[period] for counts, _ in found) == size * 3
        assert all(counts[period] >= 1 for counts, _ in found)
    assert max(sum(counts) for counts, _ in found) > 15


def twin(counts: list[list[int]], local: int) -> list[Tensor]:
    """Spec 2.1 for ranks that have done so many steps (rank, period) between meetings."""
    size, several = len(counts), local < len(counts)
    x, steps = [start() for _ in counts], [0] * size
    nearest, far = [start() for _ in counts], start()
    for period in range(len(counts[0])):
        for k in range(size):
            for _ in range(counts[k][period]):
                x[k] = x[k] - 0.1 * gradient(x[k], k, steps[k])
                x[k] = 0.9 * x[k] + 0.1 * far
                x[k] = 0.9 * x[k] + 0.1 * nearest[k] if several else x[k]
                steps[k] += 1
        told = [[loss_of(k, step) for step in range(max(0, steps[k] - 2), steps[k])] for k in range(size)]
        mean = [sum(losses) / len(losses) for losses in told]
        for first in range(0, size, local) if several else ():
            machine = range(first, first + local)
            leader = x[min(machine, key=lambda k: mean[k])].clone()
            for k in machine:
                nearest[k], x[k] = leader, 0.6 * x[k] + 0.4 * leader
        if (period + 1) % 2 == 0:
            far = x[min(range(size), key=lambda k: mean[k])].clone()
            x = [0.8 * each + 0.2 * far for each in x]
    return x


@for_each("size, local", [(4, 2), (6, 3)])
def test_the_result_is_that_of_the_equations_at_these_paces(size: int, local: int) -> None:
    begun = [0] * size
    found = Loopback.run(
        size, lambda comm: paced(comm, SPEC.format(f"ranks_per_node={local}, "), 4, 3, begun)
    )
    wanted = twin([counts for counts, _ in found], local)
    for (_, flat), model in zip(found, wanted, strict=True):
        torch.testing.assert_close(flat, model, rtol=1e-5, atol=1e-5)  # float32 over some dozens of steps


@for_each("size", [2, 4, 8])
def test_a_meeting_after_every_step_is_the_same_by_both_counts(size: int) -> None:
    each, total = (
        f"lsgd(every=1, local_every=1, ranks_per_node=2{count})" for count in ("", ", count='total'")
    )
    assert same(*(trained(spec, size, 6, loss=loss_of) for spec in (each, total)))


def numbered(comm: Loopback, rounds: int) -> list[bool]:
    """Ranks in lockstep: whether a meeting follows each step."""
    periods, follows = TotalPeriods(3, comm, torch.device("cpu")), []
    for step in range(1, rounds + 1):
        follows.append(periods.step(step))
        if step % 3:
            comm.all_reduce(torch.zeros(1))  # the others have done this step too
    return follows


@for_each("size", [1, *SIZES])
def test_ranks_in_lockstep_meet_after_every_period(size: int) -> None:
    for follows in Loopback.run(size, lambda comm: numbered(comm, 9)):
        assert follows == [False, False, True] * 3


def uneven(comm: Loopback) -> tuple[int, Tensor, Tensor, dict[str, Any]]:
    """Rank r does 4 r + 1 steps and is done. Meetings, its parameters, the group's model, its notes."""
    rank = worker("lsgd(every=2, local_every=2, ranks_per_node=1, count='total')", comm)
    rank.train(range(4 * comm.rank + 1), loss=loss_of)
    rank.bound.drain(rank.aside)
    flat = rank.replica.flat.clone()
    return int(rank.bound.notes()["rounds"]), flat, rank.bound.consensus(rank.aside), rank.bound.notes()


@for_each("size", [*SIZES])
def test_ranks_that_are_done_are_at_the_meetings_of_those_who_are_not(size: int) -> None:
    found = Loopback.run(size, uneven)
    assert len({met for met, *_ in found}) == 1
    assert found[0][0] >= size - 1  # of 2 size^2 - size steps, at most 2 size between meetings
    assert same_bits([model for _, _, model, _ in found])
    mean = torch.stack([flat for _, flat, _, _ in found]).mean(0)
    torch.testing.assert_close(found[0][2], mean)
    assert {notes["leader"] for *_, notes in found} <= set(range(size))


def resumed(comm: Loopback) -> tuple[int, int, bool]:
    """Steps of this rank before and after it was taken over, until they meet, and if that was early."""
    spec = "lsgd(every=3, local_every=3, ranks_per_node=1, count='total')"
    old = worker(spec, comm)
    old.train(range(1), loss=loss_of)
    rank, steps = taken_over(old, worker(spec, comm), 1), 1
    early = rank.bound.notes()["rounds"] > 0
    while rank.bound.notes()["rounds"] == 0:
        rank.train(range(steps, steps + 1), loss=loss_of)
        steps += 1
    return 1, steps - 1, early


@for_each("size", SIZES)
def test_a_resumed_period_has_as_many_steps_as_one_that_was_not_stopped(size: int) -> None:
    found = Loopback.run(size, resumed)
    assert sum(before + after for before, after, _ in found) == 3 * size
    assert not any(early for *_, early in found)


def silent(comm: Loopback) -> None:
    rank = worker("lsgd(every=1, local_every=1, ranks_per_node=1, count='total')", comm)
    with pytest.raises(AttachError, match="rank 1 has recorded no loss"):
        rank.train(range(2), loss=lambda rank, step: None if rank == 1 else 1.0)


def test_a_loss_that_was_not_told_is_missed_on_every_rank() -> None:
    Loopback.run(3, silent)


def test_groups_count_apart() -> None:
    def play(comm: Loopback) -> tuple[int, int, int]:
        comm.counter()
        all_of_us, half = Metered(comm).counter(), comm.split(comm.rank % 2).counter()
        for _ in range(5):
            all_of_us.add(1)
            half.add(10)
        comm.all_reduce(torch.zeros(1))
        return all_of_us.add(0), half.add(0), comm.counter().add(0)

    assert Loopback.run(4, play) == [(20, 100, 0)] * 4


def test_what_cannot_be_counted_is_refused() -> None:
    refuses(SpecError, "lsgd: count must be 'each' or 'total', got 'all'", parse, "lsgd(count='all')")

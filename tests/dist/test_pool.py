"""The pool that serves the distributed tests."""

from __future__ import annotations

from typing import Any

import pytest
import torch.distributed as dist

from tests.dist.pool import on_ranks


def leave_a_count() -> None:
    """Rank 0 would number its next group 1, where rank 1 numbers it 0."""
    rank = dist.get_rank()
    dist.destroy_process_group()
    dist.distributed_c10d._world.group_count = 1 - rank


def test_ranks_meet_whatever_the_job_before_has_left(pool: Any) -> None:
    pool.run(2, leave_a_count)
    assert pool.run(2, dist.get_rank) == [0, 1]


def named(name: str, number: int, more: str) -> str:
    if number == 2 and dist.get_rank() == 1:
        raise ValueError("lost")
    return f"{name}{number}{more}"


def test_a_job_of_many_cases_gives_their_results_and_names_the_one_that_fails(pool: Any) -> None:
    cases = [("a", 0), ("b", 1)]
    assert list(pool.each(2, named, cases, "!")) == [(cases[0], ["a0!"] * 2), (cases[1], ["b1!"] * 2)]
    with pytest.raises(ValueError, match=r"rank 1: case \('c', 2\): lost"):
        pool.each(2, named, [*cases, ("c", 2)], "!")


@on_ranks((1, 2), (1, 2))
def runs_everywhere(number: int) -> None:
    assert dist.get_world_size() * number != 4, "two ranks, second case"


def test_a_decorated_body_runs_on_all_ranks_with_all_cases(pool: Any) -> None:
    with pytest.raises(AssertionError, match="case 2: two ranks, second case"):
        runs_everywhere(pool)
    with pytest.raises(AssertionError, match="cannot fail"):
        on_ranks(2, [])(named)

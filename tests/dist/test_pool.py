"""The pool that serves the distributed tests."""

from __future__ import annotations

import importlib
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from tests.dist.pool import CONNECT_S, on_ranks


def leave_a_count() -> None:
    """Rank 0 would number its next group 1, where rank 1 numbers it 0."""
    rank = dist.get_rank()
    dist.destroy_process_group()
    dist.distributed_c10d._world.group_count = 1 - rank


def test_ranks_meet_whatever_the_job_before_has_left(pool: Any) -> None:
    pool.run(2, leave_a_count)
    assert pool.run(2, dist.get_rank) == [0, 1]


MODULE = """
import multiprocessing, os, time

if multiprocessing.parent_process():
    {in_a_worker}

def nothing():
    return 1
"""


@pytest.fixture
def of_a_module(tmp_path: Path, monkeypatch: Any) -> Callable[[str, str], Any]:
    """Make a function whose module runs a statement when a worker imports it."""

    def made(name: str, in_a_worker: str) -> Any:
        (tmp_path / f"{name}.py").write_text(MODULE.format(in_a_worker=in_a_worker))
        monkeypatch.syspath_prepend(tmp_path)
        return importlib.import_module(name).nothing

    return made


def test_what_ranks_need_to_start_is_not_the_time_of_a_job(pool: Any, of_a_module: Any) -> None:
    assert pool.run(2, of_a_module("slow_to_import", "time.sleep(3)"), timeout_s=2.0) == [1, 1]


def test_a_rank_that_dies_before_it_is_connected_is_noticed_at_once(pool: Any, of_a_module: Any) -> None:
    began = time.monotonic()
    with pytest.raises(Exception, match="exit code 3"):
        pool.run(2, of_a_module("ends_on_import", "os._exit(3)"))
    assert time.monotonic() - began < CONNECT_S / 2


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

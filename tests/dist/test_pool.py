"""The pool that serves the distributed tests."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist


def leave_a_count() -> None:
    """Rank 0 would number its next group 1, where rank 1 numbers it 0."""
    rank = dist.get_rank()
    dist.destroy_process_group()
    dist.distributed_c10d._world.group_count = 1 - rank


def test_ranks_meet_whatever_the_job_before_has_left(pool: Any) -> None:
    pool.run(2, leave_a_count)
    assert pool.run(2, dist.get_rank) == [0, 1]

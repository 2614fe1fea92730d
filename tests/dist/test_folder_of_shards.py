"""Checkpoint folders of sharded models with error feedback: each rank saves its own memory there."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import laconic
from laconic.core.errors import LaconicError, StateError
from laconic.integrations import folder
from tests.dist.test_fsdp import FED, LONG, sharded_gpt, step_on


def memory(handle: Any) -> list[torch.Tensor]:
    return list(handle.state_dict()["memory"].values())


def resumed(path: str) -> tuple[bool, bool, list[str]]:
    """Whether nothing is there first, and the same memory after a load; and what is said of wrong files."""
    model, optimizer = sharded_gpt()
    handle = laconic.compress(model, optimizer, FED)
    for step in range(2):
        step_on(model, optimizer, step)
    nothing = not folder.load(handle, path)
    folder.save(handle, path)
    before = [each.clone() for each in memory(handle)]
    step_on(model, optimizer, 2)
    assert not all(map(torch.equal, before, memory(handle)))
    found = folder.load(handle, path)
    same = found and all(map(torch.equal, before, memory(handle)))
    dist.barrier()
    own = Path(path) / f"{folder.NAME}-rank{dist.get_rank()}.pt"
    said = []
    kept = torch.load(own)

    def saved(**other: Any) -> None:
        torch.save({**kept, **other}, own)

    damages = (
        lambda: own.write_bytes(b"no state"),
        lambda: saved(seed=7),
        lambda: saved(memory={"unknown": torch.ones(3)}),
        lambda: saved(step=1),
        own.unlink,
    )
    for damage in damages:
        if dist.get_rank() == 1:
            damage()
        dist.barrier()
        try:
            folder.load(handle, path)
        except LaconicError as error:
            assert isinstance(error, StateError)
            said.append(str(error))
    assert all(map(torch.equal, before, memory(handle)))
    return nothing, same, said


@pytest.mark.timeout(LONG)
def test_each_rank_finds_its_memory_again(pool: Any, tmp_path: Path) -> None:
    for nothing, same, (damaged, seed, memory, step, gone) in pool.run(2, resumed, str(tmp_path)):
        assert nothing and same
        assert f"{folder.NAME}-rank1.pt cannot be used" in damaged
        assert seed.startswith("rank 1: the saved state is of seed 7") and memory.startswith("rank 1: ")
        assert (
            "of different steps (2, 1, by rank)" in step and "of different steps (2, none, by rank)" in gone
        )

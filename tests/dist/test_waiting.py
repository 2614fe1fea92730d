"""A rank that waits for others which do not make the same call says so."""

from __future__ import annotations

import logging
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import laconic
from laconic.comm import waiting
from tests.dist.nets import SGD, net
from tests.dist.pool import on_ranks
from tests.dist.runs import MANY

CALLS = ("laconic.compress", "state_dict(gather=True)")


class Telling(logging.Handler):
    """Each call that a line names gets a file, for the other rank to see."""

    def __init__(self, folder):
        super().__init__(logging.WARNING)
        self.folder, self.lines = folder, []

    def emit(self, record):
        self.lines.append(record.getMessage())
        for call in CALLS:
            if call in self.lines[-1]:
                (self.folder / call).touch()


def told_by_rank_0(folder):
    """What it says while rank 1 makes each call only when rank 0 has said that it waits there."""
    rank, model, telling = dist.get_rank(), DistributedDataParallel(net(), **MANY), Telling(Path(folder))
    optimizer = torch.optim.SGD(model.parameters(), **SGD)
    waiting.PATIENT_S, patient_s = 0.2, waiting.PATIENT_S
    waiting.log.addHandler(telling)
    try:
        later(rank, Path(folder) / CALLS[0])
        handle = laconic.compress(model, optimizer, "dgc(density=0.1)")
        later(rank, Path(folder) / CALLS[1])
        handle.state_dict(gather=True)
        handle.remove()
    finally:
        waiting.log.removeHandler(telling)
        waiting.PATIENT_S = patient_s
    return telling.lines


def later(rank, file):
    while rank and not file.exists():
        time.sleep(0.01)


def test_a_rank_that_waits_names_the_call(pool, tmp_path):
    lines = pool.run(2, told_by_rank_0, str(tmp_path))[0]
    attaching, gathering = lines[0], next(line for line in lines if CALLS[1] in line)
    assert attaching.startswith(
        "rank 0 has waited 0.2 s for the other ranks in a call that attaches, such as"
    )
    assert "in state_dict(gather=True): every rank has to make this call" in gathering


@on_ranks(2)
def test_a_rank_that_need_not_wait_says_nothing():
    telling = Telling(Path())
    waiting.log.addHandler(telling)
    try:
        model = DistributedDataParallel(net(), **MANY)
        handle = laconic.compress(model, torch.optim.SGD(model.parameters(), **SGD), "dgc(density=0.1)")
        handle.state_dict(gather=True)
        handle.remove()
    finally:
        waiting.log.removeHandler(telling)
    assert telling.lines == []

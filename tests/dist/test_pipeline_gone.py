"""A process that ends inside a step ends the step of its neighbours too: no one waits for its messages."""

from __future__ import annotations

import os

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

import laconic
from tests.dist.pipelines import SAMPLES, TESTED, Pipeline, block, order

pytestmark = TESTED
BAD, SAW_IT, WENT_ON, GONE = 2, 0, 1, 3  # a step, and how processes end


class Ends(torch.nn.Module):
    """A stage whose process ends in its forward pass."""

    on = False

    def __init__(self, index: int) -> None:
        super().__init__()
        self.inner = block(index)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if Ends.on and dist.get_rank() == 1:
            os._exit(GONE)
        return self.inner(x)


def train(rank: int, kind: str, file: str) -> None:
    """Two good steps, and one in which rank 1 ends."""
    dist.init_process_group("gloo", init_method=f"file://{file}", rank=rank, world_size=2)
    pipeline = Pipeline(kind, make=Ends)
    handle = laconic.pipeline.compress(pipeline.schedule, forward="change(minmax(bits=4))", samples=SAMPLES)
    for step in range(BAD + 1):
        Ends.on, handle.samples = step == BAD, order(step)
        try:
            pipeline.train(order(step))
        except RuntimeError:
            os._exit(SAW_IT if step == BAD else WENT_ON)
    os._exit(WENT_ON)


@pytest.mark.parametrize("kind", ["1F1B", "Interleaved1F1B"])
def test_a_rank_that_is_gone_ends_the_step_of_the_other(tmp_path, kind):
    context = mp.get_context("spawn")
    ranks = [context.Process(target=train, args=(rank, kind, str(tmp_path / "store"))) for rank in range(2)]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join(120)
    ended = [process.exitcode for process in ranks]
    for process in ranks:
        process.kill()
    assert ended == [SAW_IT, GONE]

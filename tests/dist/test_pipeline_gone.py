"""A process that ends inside a step ends the step of its neighbours too: no one waits for its messages."""

from __future__ import annotations

import os

import pytest
import torch
import torch.distributed as dist

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


def train(kind: str) -> None:
    """Two good steps, and one in which rank 1 ends."""
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
def test_a_rank_that_is_gone_ends_the_step_of_the_other(pool, kind):
    ended = [outcome.exit_code for outcome in pool.fresh(2, train, kind, timeout_s=120.0)]
    assert ended == [SAW_IT, GONE]

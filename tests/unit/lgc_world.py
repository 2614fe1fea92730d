"""Gradients, and a net trained on them, for tests of LGC."""

from __future__ import annotations

from functools import cache

import pytest
import torch
from tests.unit.shared import for_each

from laconic.comm.loopback import Loopback
from laconic.core.layout import Layout
from laconic.core.turn import Turn
from laconic.reducers.learned_code import LearnedCode

ROWS = Layout.of([("w", (40, 60))])
K = 480  # of 2400, at density 0.2
INSTANCES = ("ring", "server", "per_node")
both = for_each("instance", INSTANCES)


@pytest.fixture(autouse=True, scope="module")
def one_thread():
    """Ranks are threads here: more of them for each small convolution only wait for one another."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def rows(rank: int, step: int) -> torch.Tensor:
    """A gradient as of a layer behind a ReLU, from a few examples: what all ranks share, and their own."""
    common, own = (torch.Generator().manual_seed(1000 * step + s) for s in (999, rank))
    parts = [torch.randn(40, 2, generator=g) @ torch.randn(2, 60, generator=g).relu() for g in (common, own)]
    return (parts[0] + 0.5 * parts[1]).flatten()


@cache
def trained(instance: str, size: int = 2, steps: int = 60) -> dict[str, torch.Tensor]:
    """The state of a net that has been trained for some steps."""

    def play(comm: Loopback) -> dict[str, torch.Tensor]:
        bound = LearnedCode(0.2, until=steps, instance=instance, innovation=0.005).bind(ROWS, comm)
        for step in range(steps):
            x = rows(comm.rank, step)
            bound.reduce(x, ROWS, Turn(step, comm.rank), torch.empty_like(x))
        return bound.state_dict()

    return Loopback.run(size, play)[0]

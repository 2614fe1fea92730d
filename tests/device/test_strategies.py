"""Every strategy, among 2 ranks on the stand-in device, trains as on the CPU."""

from __future__ import annotations

from unittest import mock

import pytest
import torch
from torch import Tensor

from laconic import kernels
from laconic.core.spec import parse
from laconic.strategies.strategy import Strategy
from tests.device.worlds import CPU, GPU
from tests.laws import strategy_ranks
from tests.laws.strategy_ranks import Rank, fits, is_clocked, played
from tests.laws.table import first_of_each, same, specs
from tests.unit import strategy_world

CANNOT = {"adpsgd": "ranks meet in pairs by their clocks, which threads of a Loopback cannot"}
SPECS = [spec for spec in specs(Strategy) if fits(spec, 2) and spec.partition("(")[0] not in CANNOT]


def trained(spec: str, device: torch.device) -> list[dict[str, Tensor]]:
    """The numbers of every rank after a period and a few steps, and what the strategy keeps."""

    def act(rank: Rank) -> dict[str, Tensor]:
        for group in rank.optimizer.param_groups:
            group["foreach"] = False  # whose sums round otherwise, on the CPU too
        rank.train(range(max(6, parse(spec).period) + 2))
        state = {"flat": rank.flat} | rank.memory()
        rank.optimizer.finish()
        return state

    def gradient(x: Tensor, rank: int, step: int) -> Tensor:
        return strategy_world.gradient(x.cpu(), rank, step).to(x.device)

    with (
        mock.patch.object(strategy_ranks, "Numbers", lambda: strategy_world.Numbers().to(device)),
        mock.patch.object(strategy_ranks, "gradient", gradient),
        kernels.using("reference"),
    ):
        return played(spec, 2, act)


@pytest.mark.parametrize("spec", first_of_each(SPECS))
def test_training_is_that_of_the_cpu(spec: str) -> None:
    found = trained(spec, GPU)
    assert all(each["flat"].device == GPU for each in found)
    if is_clocked(spec):  # no two runs are alike
        return
    for rank, (one, other) in enumerate(zip(found, trained(spec, CPU), strict=True)):
        assert one.keys() == other.keys()
        differing = [key for key, value in one.items() if not same(value.cpu(), other[key])]
        assert not differing, f"rank {rank}: differ: {differing}"

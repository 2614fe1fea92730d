"""Waits and launches of one bucket stay within the limits, whatever the numbers of matrices and ranks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from laconic.comm.loopback import Loopback
from laconic.comm.metered import Metered
from laconic.core.layout import Layout
from laconic.ddp.buckets import Buckets
from laconic.ddp.optimiser import Optimisers
from laconic.exchange.attached import Attached
from tests import cases
from tests.device import counting, triton
from tests.device.budgets import (
    BUDGETS,
    GROWTH,
    LIMITS,
    OTHERS_LAUNCHES,
    OTHERS_WAITS,
    SPREAD,
    Counts,
)
from tests.device.measure import MATRICES, METHODS, NAMES, OTHERS, RANKS, measured
from tests.device.worlds import GPU
from tests.laws.worlds import Settings

KERNELS = "triton" if triton.interpreted() else "reference"
CASES = [(matrices, ranks) for matrices in MATRICES for ranks in RANKS]
if not triton.interpreted() and not cases.full:
    CASES = [(1, 2), (54, 8), (161, 8)]


@pytest.fixture(scope="module")
def rows() -> dict[tuple[str, int, int], dict[str, Any]]:
    """What was measured, so that each case is measured once."""
    return {}


def row_of(rows: dict[Any, Any], name: str, matrices: int, ranks: int) -> dict[str, Any]:
    key = name, matrices, ranks
    if key not in rows:
        rows[key] = measured(*key)
    return rows[key]


@pytest.mark.parametrize(("matrices", "ranks"), CASES)
@pytest.mark.parametrize("name", NAMES)
def test_a_bucket_is_within_its_limits(rows: dict[Any, Any], name: str, matrices: int, ranks: int) -> None:
    row, limit = row_of(rows, name, matrices, ranks), LIMITS[KERNELS][name]
    found = Counts(row["waits"], row["launches"] - row["index_adds"])
    assert found.waits <= limit.waits, row["waits_at"]
    assert found.launches <= limit.launches, row["launched"]


@pytest.mark.skipif(triton.interpreted(), reason="its interpreter is slow, and few matrices do not show it")
@pytest.mark.parametrize("ranks", RANKS if cases.full else RANKS[-1:])
@pytest.mark.parametrize("name", NAMES)
def test_launches_do_not_grow_with_the_number_of_matrices(
    rows: dict[Any, Any], name: str, ranks: int
) -> None:
    """Beyond a few: one matrix alone can be a special case."""
    few, many = (row_of(rows, name, matrices, ranks)["launches"] for matrices in MATRICES[-2:])
    assert many <= few + SPREAD


@pytest.mark.skipif(triton.interpreted(), reason="its interpreter is slow")
@pytest.mark.parametrize("name", OTHERS)
def test_launches_of_others_hardly_grow_with_matrices_and_ranks(name: str) -> None:
    few, many = measured(name, 3, 2), measured(name, 54, 8)
    assert many["waits"] <= OTHERS_WAITS, many["waits_at"]
    assert many["launches"] - many["index_adds"] <= OTHERS_LAUNCHES, many["launched"]
    assert many["launches"] - many["index_adds"] <= few["launches"] - few["index_adds"] + GROWTH


def test_limits_are_of_the_methods_with_a_budget() -> None:
    for limits in LIMITS.values():
        assert limits.keys() == BUDGETS.keys() == {*NAMES}


class Bucket:
    """DDP's GradBucket, as far as hooks read it."""

    def __init__(self, parameters: list[nn.Parameter], flat: torch.Tensor) -> None:
        self._parameters, self._flat = parameters, flat

    def index(self) -> int:
        return 0

    def is_last(self) -> bool:
        return True

    def buffer(self) -> torch.Tensor:
        return self._flat

    def parameters(self) -> list[nn.Parameter]:
        return self._parameters

    def gradients(self) -> list[torch.Tensor]:
        sizes = [each.numel() for each in self._parameters]
        return [*self._flat.split(sizes)]


@pytest.mark.parametrize("name", METHODS)
def test_no_wait_in_the_thread_of_backward(name: str) -> None:
    parameters = [nn.Parameter(torch.zeros(64, 32, device=GPU)) for _ in range(3)]
    layout = Layout.of((f"{i}.weight", (64, 32)) for i in range(3))
    (comm,) = Loopback.world(1)
    exchange = Attached(METHODS[name](), layout, Metered(comm), Settings())
    names = {each: f"{i}.weight" for i, each in enumerate(parameters)}
    optimisers = Optimisers(torch.optim.SGD(parameters), names, ())
    buckets = Buckets(exchange, names, optimisers, None, keep_means=False, joins=lambda: False)
    for _ in range(2):
        bucket = Bucket(parameters, torch.randn(layout.numel).to(GPU))
        with counting.counted() as counts:
            answer = buckets.submit(bucket)
        buckets.wait(answer)
        assert not counts.num_waits(), counts.where()
    buckets.close()

"""DEFT shares its entries out by norm over the whole model, however DDP cuts it in buckets."""

from __future__ import annotations

import math

import pytest
import torch
from tests.laws.worlds import MODEL, cut, everywhere, exchange_on, gradient, one_step
from torch import Tensor

from laconic.comm.loopback import Loopback
from laconic.core.layout import Layout
from laconic.core.spec import parse
from laconic.core.turn import Turn

TWO = Layout.of([("loud", (100, 100)), ("quiet", (100, 100))])
SEPARATE = [Layout.of([(entry.name, entry.shape)]) for entry in TWO]
SPEC = "deft(density=0.01)"


def noise(seed: int, n: int = 10_000) -> Tensor:
    return torch.randn(n, generator=torch.Generator().manual_seed(seed))


def sent(gradients: list[tuple[float, float]], size: int = 2, bad: int = -1) -> list[list[int]]:
    """How many entries of each layer are sent at each step, of layers with these norms, a bucket each."""

    def play(comm: Loopback) -> list[list[int]]:
        bound, counts = parse(SPEC).bind(TWO, comm), []
        for step, norms in enumerate(gradients):
            found = []
            for bucket, norm in zip(SEPARATE, norms, strict=True):
                x = noise(step) * norm
                void = step == bad and bucket is SEPARATE[1]
                out = torch.zeros(10_000)
                share = bound.reduce(None if void else x, bucket, Turn(step, comm.rank), out)
                found.append(int((out != 0).sum()) if share is not None else -1)
            if step == bad:
                bound.put_back(SEPARATE[0])
            counts.append(found)
        return counts

    results = Loopback.run(size, play)
    assert all(each == results[0] for each in results)
    return results[0]


@pytest.mark.parametrize("size", [1, 2, 4])
def test_a_loud_layer_gets_its_share_from_another_bucket_too(size: int) -> None:
    """Norms 100 : 1 and 200 entries: 198 and 2 from the second step on; sizes decide in the first."""
    assert sent([(100.0, 1.0)] * 3, size) == [[100, 100], [198, 2], [198, 2]]


def test_shares_follow_the_last_step() -> None:
    """To one entry, as shares are rounded; what a layer of zeros does not use is sent in the step after."""
    counts = sent([(1.0, 1.0), (1.0, 1.0), (3.0, 1.0), (3.0, 1.0), (0.0, 1.0), (0.0, 1.0)])
    expected = [[100, 100], [100, 100], [100, 100], [150, 50], [0, 50], [0, 200]]
    for found, near in zip(counts, expected, strict=True):
        assert all(abs(a - b) <= 1 for a, b in zip(found, near, strict=True)), counts


def test_a_void_step_tells_nothing() -> None:
    counts = sent([(1.0, 1.0), (1000.0, 1.0), (1.0, 1.0)], bad=1)
    assert counts == [[100, 100], [100, -1], [100, 100]]


@pytest.mark.parametrize("size", [2, 4])
def test_in_many_buckets_as_many_are_sent_as_in_one(size: int) -> None:
    def play(comm: Loopback) -> list[int]:
        exchange, found = exchange_on(comm, "deft(density=0.05)"), []
        for step in range(5):
            buckets = cut(MODEL, 1, 2, 1) if step < 2 else cut(MODEL, 2, 2)
            mean, _ = one_step(exchange, gradient(comm.rank, step), buckets)
            matrices = [e for e in MODEL if len(e.shape) > 1]
            found.append(sum(int((mean[e.offset : e.offset + e.numel] != 0).sum()) for e in matrices))
        return found

    budget = round(0.05 * sum(math.prod(entry.shape) for entry in MODEL if len(entry.shape) > 1))
    for found in everywhere(size, play):
        assert all(abs(each - budget) <= 3 for each in found), "one a bucket, by rounding or as its least"


def test_a_resumed_run_shares_alike() -> None:
    def play(comm: Loopback) -> bool:
        first, buckets = exchange_on(comm, "deft(density=0.05)"), cut(MODEL, 1, 2, 1)
        for step in range(3):
            one_step(first, gradient(comm.rank, step), buckets)
        other = exchange_on(comm, "deft(density=0.05)")
        other.load_state_dict(first.state_dict(), step=3)
        return torch.equal(*(one_step(each, gradient(comm.rank, 3), buckets)[0] for each in (first, other)))

    assert everywhere(2, play) == [True, True]

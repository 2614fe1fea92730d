"""NoLoCo: its recursion, what it costs, and that its pairs bring all ranks together."""

from __future__ import annotations

import torch
from tests.unit.shared import for_each, refuses
from tests.unit.strategy_world import N, gradient, sgd, start, trained, worker
from torch import Tensor

from laconic.comm.loopback import Loopback
from laconic.core.errors import SpecError
from laconic.core.spec import parse
from laconic.strategies.gossip.topologies.random_matching import RandomMatching


def twin(size: int, steps: int, every: int, lr: float, momentum: float, pull: float) -> list[Tensor]:
    """The paper's form: momentum, the pair's mean movement, and the distance to its mean slow model."""
    x, slow, v = ([start() for _ in range(size)] for _ in range(3))
    v = [torch.zeros(N) for _ in v]
    for step in range(steps):
        x = [each - 0.1 * gradient(each, r, step) for r, each in enumerate(x)]
        if step % every == every - 1:
            pairs = [(r, *RandomMatching().peers(r, size, step // every).out) for r in range(size)]
            moved = [a - b for a, b in zip(x, slow, strict=True)]
            mean_moved = [sum((moved[i] for i in pair), torch.zeros(N)) / len(pair) for pair in pairs]
            mean_slow = [sum((slow[i] for i in pair), torch.zeros(N)) / len(pair) for pair in pairs]
            for r in range(size):
                v[r] = momentum * v[r] + lr * mean_moved[r] - pull * (slow[r] - mean_slow[r])
            slow = [y + each for y, each in zip(slow, v, strict=True)]
            x = [y.clone() for y in slow]
    return x


@for_each("size", [2, 3, 4])
def test_noloco_is_momentum_with_a_pull_to_the_pair(size: int) -> None:
    found = trained("noloco(every=3, pull=0.8)", size, 14)
    for one, other in zip(found, twin(size, 14, 3, 0.7, 0.5, 0.8), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)


def test_pairs_bring_all_ranks_together_by_one_message_a_rank() -> None:
    """Nobody moves, from models that differ: 30 outer steps leave 3 thousandths of the distance."""
    models = torch.randn(4, N, generator=torch.Generator().manual_seed(0))

    def play(comm: Loopback) -> Tensor:
        rank = worker("noloco(every=1)", comm, lambda model: sgd(model, (0.0, 0.0)))
        rank.bound.adopt_(models[comm.rank])
        rank.train(range(30))
        assert rank.comm.snapshot().payload_sent == 30 * 4 * N
        return rank.replica.flat.clone()

    found = torch.stack(Loopback.run(4, play))
    assert float((found - found.mean(0)).norm()) < 1e-2 * float((models - models.mean(0)).norm())
    torch.testing.assert_close(found.mean(0), models.mean(0), rtol=1e-5, atol=1e-5)


def test_a_rank_sends_one_message_however_many_there_are() -> None:
    def play(comm: Loopback) -> int:
        rank = worker("noloco(every=2)", comm)
        rank.train(range(6))
        return rank.comm.snapshot().payload_sent

    for size in (2, 6):
        assert Loopback.run(size, play) == [3 * 4 * N] * size


def test_wrong_settings_are_refused() -> None:
    for spec, words in (
        ("every=0", "noloco: every must be a whole number of 1 or more"),
        ("lr=0", "noloco: lr must be a finite number above 0"),
        ("momentum=1", r"noloco: momentum must be a number in \[0, 1\), got 1"),
        ("pull=0.5", r"noloco: pull must be a number in \(0.5, 2\), got 0.5"),
        ("topology=exponential()", r"use random_matching\(\), ring\(\)"),
        ("topology=dense()", "noloco: topology must be a topology"),
    ):
        refuses(SpecError, words, parse, f"noloco({spec})")

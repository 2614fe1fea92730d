"""Signum against its plain twin, and against hostile ranks."""

from __future__ import annotations

import pytest
import torch
from tests.laws.method_ranks import Rank
from tests.laws.worlds import MODEL, gradient
from torch import Tensor

from laconic.comm.loopback import Loopback
from laconic.core.aliases import called_here
from laconic.core.spec import parse

STEPS, MU, RATE, DECAY = 4, 0.9, 0.01, 0.1


class Honest(Rank):
    """All honest ranks have one gradient; the others, the first `f`, have it `factor` times."""

    def __init__(self, comm: Loopback, f: int = 0, factor: float = 1.0) -> None:
        super().__init__("signum()", comm)
        self.factor = factor if comm.rank < f else 1.0

    def gradient(self, step: int) -> Tensor:
        return gradient(7, step) * self.factor


def trained(size: int, f: int, factor: float) -> list[Tensor]:
    def play(comm: Loopback) -> Tensor:
        rank = Honest(comm, f, factor)
        rank.train(range(STEPS))
        return rank.flat

    return Loopback.run(size, play)


@pytest.mark.parametrize("factor", [-1e6, 1e6, 0.0])
@pytest.mark.parametrize(("size", "f"), [(3, 1), (4, 1), (5, 2), (6, 2)])
def test_fewer_than_half_of_the_ranks_change_no_parameter(size: int, f: int, factor: float) -> None:
    alone = trained(1, 0, 1.0)[0]
    for flat in trained(size, f, factor):
        assert torch.equal(flat, alone)


@pytest.mark.parametrize("nesterov", [False, True])
def test_it_is_its_plain_twin(nesterov: bool) -> None:
    """Three ranks, on every tensor. Tolerance: float32 over four steps."""
    size = 3

    def play(comm: Loopback) -> tuple[Tensor, Tensor]:
        rank = Rank("signum()", comm)
        for group in rank.optimizer.param_groups:
            group |= {"lr": RATE, "momentum": MU, "nesterov": nesterov, "weight_decay": DECAY}
        start = rank.flat
        rank.train(range(STEPS))
        return start, rank.flat

    results = Loopback.run(size, play)
    w = results[0][0].clone()
    velocity = torch.zeros(size, MODEL.numel)
    fading = torch.zeros(MODEL.numel)  # the momentum of the weight decay
    for step in range(STEPS):
        g = torch.stack([gradient(rank, step) for rank in range(size)])
        velocity = MU * (velocity + g) if nesterov else MU * velocity + g
        x = velocity + g if nesterov else velocity
        mean = torch.zeros(MODEL.numel)
        for entry in MODEL:
            own = slice(entry.offset, entry.offset + entry.numel)
            if entry.numel:
                scale = x[:, own].abs().mean(dim=1).median()
                mean[own] = scale * x[:, own].sign().sum(dim=0).sign()
        fading = MU * fading + DECAY * w
        w = w - RATE * (mean + (DECAY * w + MU * fading if nesterov else fading))
    for _, flat in results:
        torch.testing.assert_close(flat, w, rtol=1e-5, atol=1e-6)


def test_the_name_stands_for_itself() -> None:
    assert called_here("signum") == ()
    assert repr(parse("signum")) == "signum()"

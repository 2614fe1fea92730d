"""1-bit and 0/1 Adam on threads as ranks, against plain loops; with an exact codec they must be exact."""

from __future__ import annotations

import pytest
import torch
from tests.unit.adam_world import (
    B1,
    B2,
    BOUND,
    EPS,
    ONE,
    SIZE,
    STEPS,
    ZERO,
    World,
    adamw,
    drawn,
    mean_gradient,
    rule_of,
)
from torch import Tensor
from torch.optim import Adam

from laconic.comm.comm import Comm
from laconic.comm.loopback import Loopback
from laconic.optim.rounds import Rounds


def test_one_bit_adam_with_an_exact_codec_is_adam_with_frozen_variance() -> None:
    def play(comm: Comm) -> list[Tensor]:
        world = World(comm, rule_of(ONE), adamw())
        return [world.advance(mean_gradient(t) if t < 5 else drawn(comm.rank, t)) for t in range(STEPS)]

    w = torch.linspace(-1, 1, 20).view(4, 5)
    m = v = torch.zeros(4, 5)
    for t in range(STEPS):
        g = mean_gradient(t)
        m = B1 * m + (1 - B1) * g
        if t < 5:
            v = B2 * v + (1 - B2) * g * g
        root = (v / (1 - B2 ** min(t + 1, 5))).sqrt() + EPS
        w = w * (1 - 0.01 * 0.1) - 0.01 / (1 - B1 ** (t + 1)) * (m / root).clamp(-BOUND, BOUND)
        for found in Loopback.run(SIZE, play):
            torch.testing.assert_close(found[t], w, rtol=1e-5, atol=1e-6)


def test_l2_decay_of_plain_adam_goes_through_the_momentum() -> None:
    def play(comm: Comm) -> Tensor:
        world = World(comm, rule_of(ONE), lambda p: Adam(p, lr=0.01, weight_decay=0.3))
        for t in range(8):
            last = world.advance(mean_gradient(t) if t < 5 else drawn(comm.rank, t))
        return last

    w = torch.linspace(-1, 1, 20).view(4, 5)
    m = v = torch.zeros(4, 5)
    for t in range(8):
        g = mean_gradient(t) + 0.3 * w
        m = B1 * m + (1 - B1) * g
        v = B2 * v + (1 - B2) * g * g if t < 5 else v
        w = w - 0.01 / (1 - B1 ** (t + 1)) * m / ((v / (1 - B2 ** min(t + 1, 5))).sqrt() + EPS)
    for found in Loopback.run(SIZE, play):
        torch.testing.assert_close(found, w, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("double_every", [1000, 2])
def test_zero_one_adam_with_an_exact_codec_is_its_equations(double_every: int) -> None:
    spec = f"{ZERO}, double_every={double_every}, longest=4)"
    rounds = Rounds(5, 2, double_every, 4)

    def play(comm: Comm) -> list[Tensor]:
        world = World(comm, rule_of(spec), adamw())
        return [world.advance(drawn(comm.rank, t)) for t in range(STEPS)]

    start = torch.linspace(-1, 1, 20).view(4, 5)
    w = [start.clone() for _ in range(SIZE)]
    m = [torch.zeros(4, 5) for _ in range(SIZE)]
    u = [torch.zeros(4, 5) for _ in range(SIZE)]
    v, learnt, span, shrink = torch.zeros(4, 5), 0, 0.0, 1.0
    found = Loopback.run(SIZE, play)
    for t in range(STEPS):
        if rounds.learns(t):
            v, learnt = B2 * v + (1 - B2) * mean_gradient(t) ** 2, learnt + 1
        root = (v / (1 - B2**learnt)).sqrt() + EPS
        c = 0.01 / (1 - B1 ** (t + 1))
        span, shrink = span + c, shrink * (1 - 0.01 * 0.1)
        for i in range(SIZE):
            m[i] = B1 * m[i] + (1 - B1) * (mean_gradient(t) if rounds.learns(t) else drawn(i, t))
            u[i] = u[i] + c * m[i]
            w[i] = w[i] * (1 - 0.01 * 0.1) - c * (m[i] / root).clamp(-BOUND, BOUND)
        if rounds.meets(t):
            agreed = torch.stack(u).mean(0) / span
            start = start * shrink - span * (agreed / root).clamp(-BOUND, BOUND)
            w, m, u = [start] * SIZE, [agreed] * SIZE, [torch.zeros(4, 5)] * SIZE
            span, shrink = 0.0, 1.0
        for i in range(SIZE):
            torch.testing.assert_close(found[i][t], w[i], rtol=1e-4, atol=1e-6)
        if rounds.meets(t):
            assert torch.equal(found[0][t], found[1][t]) and torch.equal(found[0][t], found[2][t])
    assert any(not torch.equal(found[0][t], found[1][t]) for t in range(STEPS)) == (double_every == 2)

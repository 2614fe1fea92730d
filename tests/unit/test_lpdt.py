"""Quasi-global momentum and low-precision gossip against their equations, over a list of tensors."""

from __future__ import annotations

import re
from functools import partial

import pytest
import torch
from tests.unit.gossip_world import trajectory
from tests.unit.shared import for_each, refuses, same
from torch import Tensor, nn
from torch.optim import Optimizer

import laconic
from laconic.comm.loopback import Loopback
from laconic.core.errors import AttachError, SpecError
from laconic.exchange.method import lift_codec
from laconic.strategies.gossip.mixing import matrix, uniform
from laconic.strategies.strategy import Strategy

from .strategy_world import (
    RATES,
    N,
    gradient,
    halved,
    sgd,
    spread,
    start,
    taken_over,
    trained,
    worker,
)

CLOSE = {"rtol": 1e-4, "atol": 1e-4}  # float32, over a dozen steps of numbers around 1
DECAY = 0.01


def decayed(model: nn.Module) -> Optimizer:
    return sgd(model, RATES, weight_decay=DECAY)


def twin(size, steps, mu, *, topology="ring()", nesterov=True, choco=False) -> list[Tensor]:
    """SGD with quasi-global momentum and weight decay under `halved` rates, and exact gossip."""
    mixed = matrix(uniform, laconic.parse(topology), size, 0).float()
    x, m, h = (torch.stack([start() * own for _ in range(size)]) for own in (1, 0, 0))
    for step in range(steps):
        lr = spread(halved(step))
        g = torch.stack([gradient(x[r], r, step) + DECAY * x[r] for r in range(size)])
        ahead = x - lr * (g + mu * (mu * m + g) if nesterov else g + mu * m)
        if choco:  # consensus with the copies of the last step, which then are exact
            ahead = ahead + mixed @ h - h
            h = ahead
        else:
            ahead = mixed @ ahead
        m, x = mu * m + (1 - mu) * (x - ahead) / lr, ahead
    return list(x)


@for_each(
    "spec, sizes, how",
    [
        ("quasi_global(momentum=0.8)", (2, 4, 5, 8), {}),
        ("quasi_global(momentum=0.8, nesterov=False)", (4,), {"nesterov": False}),
        ("lpdt(dense(), momentum=0.8)", (2, 5), {"choco": True}),
    ],
)
def test_momentum_of_the_group_is_its_equation(spec: str, sizes: tuple[int, ...], how: dict) -> None:
    for size in sizes:
        seen = trained(spec, size, 9, decayed, schedule=halved)
        torch.testing.assert_close(seen, twin(size, 9, 0.8, **how), **CLOSE, msg=f"{size} ranks")


def test_lpdt_in_8_bits_is_its_equation() -> None:
    size, codec, mu = 4, lift_codec("minmax(bits=8)"), 0.9
    mixed = matrix(uniform, laconic.parse("torus()"), size, 0).float()
    x, m, h = (torch.stack([start() * own for _ in range(size)]) for own in (1, 0, 0))
    for step in range(6):
        g = torch.stack([gradient(x[r], r, step) for r in range(size)])
        ahead = x - 0.1 * (g + mu * (mu * m + g)) + mixed @ h - h
        sent = (ahead - h).clone()
        for row in sent:  # the matrix of 12 in 8 bits; the vector of 5 as it is
            row[:12] = codec.decode(codec.encode(row[:12].contiguous()), 12)
        h = h + sent
        m, x = mu * m + (1 - mu) * (x - ahead) / 0.1, ahead
    seen = trained("lpdt(topology=torus())", size, 6)
    torch.testing.assert_close(seen, list(x), **CLOSE)


def test_without_momentum_it_is_the_base_strategy() -> None:
    for base in ("dpsgd()", "sgp()", "choco(minmax(bits=8))", "deepsqueeze()"):
        plain = trained(base, 4, 6)
        under = trained(f"quasi_global({base}, momentum=0)", 4, 6)
        assert same(plain, under)
    assert same(trained("lpdt(momentum=0)", 4, 6), trained("choco(minmax(bits=8), gamma=1)", 4, 6))


def test_without_momentum_and_compression_it_is_dpsgd() -> None:
    """DeepSqueeze as it is; CHOCO, which mixes before it sends, once it has mixed again."""
    exact = trajectory("dpsgd()", 5, 6)
    squeezed = trajectory("quasi_global(deepsqueeze(dense()), momentum=0)", 5, 6)
    torch.testing.assert_close(squeezed, exact, atol=1e-5, rtol=1e-5)
    mixed = matrix(uniform, laconic.parse("ring()"), 5, 0).float()
    seen = trajectory("lpdt(dense(), momentum=0)", 5, 6)
    torch.testing.assert_close(torch.stack([mixed @ each for each in seen]), exact, atol=1e-5, rtol=1e-5)


def test_equal_gradients_make_the_steps_of_plain_momentum() -> None:
    """g / (1 - mu) in the end, whatever mu."""

    def play(comm: Loopback, mu: float) -> Tensor:
        rank = worker(f"quasi_global(momentum={mu})", comm)
        before = start()
        for _ in range(300):
            before = rank.replica.flat.clone()
            for parameter in rank.replica.parameters.values():
                parameter.grad = torch.ones_like(parameter)
            rank.bound.step(rank.optimizer.step)
        return before - rank.replica.flat

    for mu in (0.5, 0.9):
        for moved in Loopback.run(2, partial(play, mu=mu)):
            torch.testing.assert_close(moved, torch.full((N,), 0.1 / (1 - mu)), rtol=0.01, atol=0)


@for_each("spec", ["lpdt()", "lpdt(topology=complete(), gamma=0.5)", "quasi_global()"])
def test_gossip_keeps_the_mean(spec: str) -> None:
    """At learning rate 0 only the ranks' distance from their mean changes."""

    def play(comm: Loopback) -> tuple[Tensor, Tensor]:
        rank = worker(spec, comm, lambda model: sgd(model, (0.0, 0.0)))
        rank.replica.flat.add_(float(comm.rank))
        began = rank.replica.flat.clone()
        rank.train(range(30))
        return began, rank.replica.flat.clone()

    began, ended = (torch.stack(each).double() for each in zip(*Loopback.run(4, play), strict=True))
    torch.testing.assert_close(ended.mean(0), began.mean(0), atol=1e-4, rtol=0)  # float32, 30 steps
    assert float((ended - ended.mean(0)).abs().max()) < 0.05 < float((began - began.mean(0)).abs().max())


@for_each("spec", ["lpdt(momentum=0)", "quasi_global(sgp(topology=linear()))", "quasi_global(osgp())"])
def test_a_resumed_run_has_the_same_bits(spec: str) -> None:
    def play(comm: Loopback) -> tuple[Tensor, Tensor]:
        whole = worker(spec, comm, decayed)
        whole.train(range(3))
        whole.bound.drain(whole.aside)
        whole.train(range(3, 8))
        first = worker(spec, comm, decayed)
        first.train(range(3))
        second = taken_over(first, worker(spec, comm, decayed), 3)
        second.train(range(3, 8))
        return whole.replica.flat.clone(), second.replica.flat.clone()

    assert all(torch.equal(*ends) for ends in Loopback.run(4, play))


def test_what_others_may_ask_for_comes_from_the_base_strategy() -> None:
    def play(comm: Loopback) -> bool:
        rank = worker("quasi_global(sgp(topology=linear()))", comm)
        rank.train(range(4))
        z = rank.replica.flat.clone()
        assert torch.equal(rank.bound.salvage(), z)
        model = rank.bound.consensus(rank.aside)
        rank.bound.adopt_(model)
        assert torch.equal(rank.replica.flat, model)
        assert rank.bound.notes()["weight"] == 1.0
        return bool(rank.bound.state_dict()["momentum"].any())

    assert all(Loopback.run(3, play))


def test_a_salvaged_model_is_not_the_numerator() -> None:
    """The update of a rank on a path, where PushSum weights differ, fails half-way: its model is still z."""

    def play(comm: Loopback) -> bool:
        rank = worker("quasi_global(sgp(topology=linear()))", comm)
        rank.train(range(2))
        z = rank.replica.flat.clone()

        def fails() -> None:
            raise RuntimeError("half-way")

        refuses(RuntimeError, "half-way", rank.bound.step, fails)
        return torch.allclose(rank.bound.salvage(), z, atol=1e-6)

    assert all(Loopback.run(3, play))


def test_momentum_helps_where_ranks_pull_apart() -> None:
    """The ranks' mean follows the mean gradient: with momentum it is farther on after as many steps."""
    ends = {}
    for spec in ("lpdt(momentum=0)", "lpdt()"):
        slow = trained(spec, 4, 12, lambda model: sgd(model, (0.01, 0.01)))
        ends[spec] = float((torch.stack(slow).mean(0) - 1.5).norm())  # the points' mean is 1.5 and noise
    assert ends["lpdt()"] < 0.85 * ends["lpdt(momentum=0)"]


def test_a_message_is_a_byte_an_entry() -> None:
    def play(comm: Loopback) -> int:
        rank = worker("lpdt()", comm)
        rank.train(range(3))
        return rank.comm.snapshot().payload_sent

    assert Loopback.run(4, play) == [3 * 2 * (12 + 8 + 4 * 5)] * 4


@for_each(
    "make, got",
    [
        (lambda model: sgd(model, momentum=0.9), "SGD(momentum=0.9)"),
        (lambda model: torch.optim.Adam(model.parameters()), "Adam"),
    ],
)
@for_each("spec", ["lpdt()", "quasi_global()", "slowmo(base=lpdt())"])
def test_an_optimiser_with_a_momentum_of_its_own_is_refused(spec: str, make, got: str) -> None:
    with pytest.raises(AttachError) as refused:
        worker(spec, Loopback.world(4)[0], make)
    assert f"got {got}: create SGD(parameters, lr=...), or set momentum=0" in str(refused.value)


def test_without_momentum_any_optimiser_will_do() -> None:
    strategy = laconic.parse("lpdt(momentum=0)")
    strategy.check(4, sgd(nn.Linear(2, 2), momentum=0.9))
    refuses(SpecError, "gossip is between workers", lambda: strategy.check(1, sgd(nn.Linear(2, 2))))


@for_each(
    "spec, words",
    [
        ("lpdt(momentum=1)", "lpdt: momentum must be a number in [0, 1), got 1"),
        ("quasi_global(momentum=-0.1)", "quasi_global: momentum must be"),
        ("quasi_global(adpsgd())", "adpsgd also moves the model between"),
        ("quasi_global(slowmo(base=adpsgd()))", "adpsgd also moves the model between"),
        ("quasi_global(ring())", "base must be a strategy"),
        ("lpdt(gamma=0)", "lpdt: gamma must be"),
        ("lpdt(topology=exponential())", "lpdt needs the same neighbours at every step"),
    ],
)
def test_what_cannot_be_is_refused(spec: str, words: str) -> None:
    refuses(SpecError, re.escape(words), lambda: worker(spec, Loopback.world(4)[0]))


@for_each(
    "spec, owns",
    [
        ("lpdt()", True),
        ("lpdt(momentum=0)", False),
        ("choco()", False),
        ("slowmo(base=quasi_global())", True),
        ("by_machine(lpdt())", True),
        ("slowmo()", False),
    ],
)
def test_who_keeps_the_momentum_is_known_before_the_optimiser_is_built(spec: str, owns: bool) -> None:
    strategy = laconic.parse(spec)
    assert isinstance(strategy, Strategy) and strategy.owns_momentum is owns

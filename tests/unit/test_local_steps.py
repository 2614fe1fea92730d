"""SlowMo and DiLoCo against their equations, written out over a list of tensors."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from tests.unit.shared import for_each, refuses
from torch import Tensor, nn
from torch.optim import Optimizer

import laconic
from laconic.comm.loopback import Loopback
from laconic.core.errors import AttachError, LaconicError, NonFiniteError, SpecError

from .strategy_world import (
    RATES,
    N,
    gradient,
    halved,
    same_bits,
    sgd,
    spread,
    start,
    stopped_and_resumed,
    trained,
    worker,
)

ROUNDING = 1e-5  # float32, over a dozen steps of numbers around 1


def heavy(model: nn.Module) -> Optimizer:
    return sgd(model, RATES, momentum=0.9)


def adam(model: nn.Module) -> Optimizer:
    return torch.optim.Adam(model.parameters(), lr=0.05)


def slowmo_twin(size, steps, every, beta, lr, *, gossip=False, average=True) -> list[Tensor]:
    """Momentum SGD under `halved` rates, averaged at every step where `gossip`, and slow momentum."""
    x, v = [start() for _ in range(size)], [torch.zeros(N) for _ in range(size)]
    anchor, u = [start() for _ in range(size)], [torch.zeros(N) for _ in range(size)]
    for step in range(steps):
        gamma = spread(halved(step))
        v = [0.9 * v[r] + gradient(x[r], r, step) for r in range(size)]
        x = [x[r] - gamma * v[r] for r in range(size)]
        mean = sum(x, torch.zeros(N)) / size
        x = [mean.clone() for _ in x] if gossip else x
        if step % every == every - 1:
            ends = [mean for _ in x] if average else x
            u = [beta * u[r] + (anchor[r] - ends[r]) / gamma for r in range(size)]
            anchor = [anchor[r] - lr * gamma * u[r] for r in range(size)]
            x, v = [each.clone() for each in anchor], [torch.zeros(N) for _ in v]
    return x


@for_each("size", [1, 3])
def test_slowmo_is_what_its_equation_says(size: int) -> None:
    found = trained("slowmo(every=3, beta=0.6, lr=0.8)", size, 11, heavy, schedule=halved)
    torch.testing.assert_close([*found], [*slowmo_twin(size, 11, 3, 0.6, 0.8)], rtol=ROUNDING, atol=ROUNDING)
    assert same_bits(trained("slowmo(every=3)", size, 9, heavy))


@for_each("average", [True, False])
def test_slowmo_over_gossip(average: bool) -> None:
    """Two ranks that gossip with each other are averaged at every step."""
    spec = f"slowmo(every=3, beta=0.6, base=sgp(), average={average})"
    found = trained(spec, 2, 11, heavy, schedule=halved)
    wanted = slowmo_twin(2, 11, 3, 0.6, 1.0, gossip=True, average=average)
    torch.testing.assert_close([*found], [*wanted], rtol=ROUNDING, atol=ROUNDING)


@for_each("base", ["sgp()", "osgp(staleness=2)", "dpsgd()", "local_sgd(every=2)", "easgd()"])
def test_after_a_slow_step_over_any_base_ranks_are_alike(base: str) -> None:
    assert same_bits(trained(f"slowmo(every=4, base={base})", 3, 8))
    assert not same_bits(trained(f"slowmo(every=4, base={base})", 3, 9))


def zeroed_local_sgd(comm: Loopback) -> Tensor:
    """Local SGD whose momentum is zeroed whenever ranks average."""
    rank = worker("local_sgd(every=4)", comm, heavy)
    for step in range(12):
        rank.train(range(step, step + 1))
        for state in rank.optimizer.state.values() if step % 4 == 3 else ():
            state["momentum_buffer"].zero_()
    return rank.replica.flat.clone()


def test_without_slow_momentum_slowmo_is_local_sgd_with_zeroed_momentum() -> None:
    found = trained("slowmo(every=4, beta=0.0)", 3, 12, heavy)
    assert same_bits(found + Loopback.run(3, zeroed_local_sgd))


def test_slowmo_keeps_adams_state() -> None:
    slow = trained("slowmo(every=4, beta=0.0)", 3, 12, adam)
    assert same_bits(slow + trained("local_sgd(every=4)", 3, 12, adam))


def test_a_rate_of_zero_makes_no_slow_momentum_infinite() -> None:
    found = trained("slowmo(every=2)", 2, 12, heavy, schedule=lambda step: (0.1 * (step % 3), 0.0))
    assert same_bits(found)
    assert torch.equal(found[0][12:], start()[12:])


def test_the_momentum_of_ranks_with_equal_gradients_stays_equal() -> None:
    for spec in ("slowmo(every=3)", "diloco(every=3)", "slowmo(every=3, base=sgp(), average=False)"):
        assert same_bits(trained(spec, 3, 8, heavy, alike=True)), spec


def diloco_twin(size: int, steps: int, every: int, lr: float, momentum: float) -> list[Tensor]:
    """Plain local SGD, with torch's own Nesterov SGD for the outer step."""
    anchor = nn.Parameter(start())
    outer = torch.optim.SGD([anchor], lr=lr, momentum=momentum, nesterov=momentum > 0)
    x = [start() for _ in range(size)]
    for step in range(steps):
        x = [x[r] - spread((0.1, 0.1)) * gradient(x[r], r, step) for r in range(size)]
        if step % every == every - 1:
            anchor.grad = sum((anchor.detach() - each for each in x), torch.zeros(N)) / size
            outer.step()
            x = [anchor.detach().clone() for _ in x]
    return x


@for_each("momentum", [0.0, 0.9])
def test_diloco_is_torchs_nesterov_on_the_mean_way(momentum: float) -> None:
    found = trained(f"diloco(every=3, momentum={momentum})", 3, 14)
    for one, other in zip(found, diloco_twin(3, 14, 3, 0.7, momentum), strict=True):
        torch.testing.assert_close(one, other, rtol=ROUNDING, atol=ROUNDING)


def test_diloco_of_rate_one_without_momentum_is_local_sgd() -> None:
    for update in ("dense()", "minmax(bits=4)"):
        outer = trained(f"diloco(every=3, lr=1.0, momentum=0.0, compressor={update})", 3, 9, heavy)
        assert same_bits(outer + trained(f"local_sgd(every=3, compressor={update})", 3, 9, heavy))


def test_a_coarse_outer_update_loses_nothing_for_long() -> None:
    """Error feedback: what 2 bits leave of one way goes with the next, and ranks stay bit-identical."""
    exact = trained("diloco(every=2)", 3, 60)
    coarse = trained("diloco(every=2, compressor=minmax(bits=2, block=8))", 3, 60)
    assert same_bits(coarse)
    assert float((coarse[0] - exact[0]).norm() / exact[0].norm()) < 0.2


RESUMED = (
    "slowmo(every=3)",
    "slowmo(every=3, base=sgp(topology=ring()))",
    "slowmo(every=3, base=sgp(), average=False)",
    "slowmo(every=3, base=osgp())",
    "slowmo(every=3, base=local_sgd(every=2, compressor=topk(density=0.3)))",
    "diloco(every=3)",
    "diloco(every=3, compressor=minmax(bits=4, block=8))",
    "diloco(every=3, compressor=topk(density=0.3))",
)


@for_each("spec", RESUMED)
def test_resumed_is_never_stopped(spec: str) -> None:
    stop = 6 if "osgp" in spec else 4  # osgp settles to save; after a slow step it is settled anyway
    for whole, resumed in stopped_and_resumed(spec, 3, stop, 11):
        assert torch.equal(whole, resumed)


def adopted(spec: str) -> list[Tensor]:
    """A model that all take between meetings, and where they are when nobody moves until the next."""

    def play(comm: Loopback) -> Tensor:
        rank = worker(spec, comm, lambda model: sgd(model, (0.0, 0.0)))
        rank.train(range(4))
        rank.bound.adopt_(torch.arange(N, dtype=torch.float32))
        rank.train(range(4, 6))
        return rank.replica.flat.clone()

    return Loopback.run(2, play)


@for_each("spec", ["slowmo(every=3)", "diloco(every=3)", "slowmo(every=3, base=sgp())"])
def test_an_adopted_model_is_where_the_next_way_begins(spec: str) -> None:
    assert same_bits([*adopted(spec), torch.arange(N, dtype=torch.float32)])


def told(comm: Loopback) -> tuple[dict[str, Any], int]:
    rank = worker("slowmo(every=4, base=local_sgd(every=2))", comm)
    rank.train(range(9))
    return rank.bound.notes(), rank.comm.snapshot().payload_sent


def test_rounds_and_bytes_are_told() -> None:
    for notes, sent in Loopback.run(2, told):
        assert notes["rounds"] == 2
        assert sent == 4 * N * (4 + 2)


def diverged(spec: str) -> list[str]:
    def play(comm: Loopback) -> str:
        rank = worker(spec, comm)
        rank.train(range(2))
        if comm.rank == 1:
            rank.replica.flat[3] = torch.inf
        try:
            rank.train(range(2, 3))
        except NonFiniteError as error:
            return str(error)
        return "nothing"

    return Loopback.run(2, play)


@for_each("spec", ["slowmo(every=3)", "diloco(every=3)", "slowmo(every=3, base=sgp())"])
def test_what_has_diverged_is_said_on_every_rank(spec: str) -> None:
    for text in diverged(spec):
        assert "not finite" in text


class NoRate(Optimizer):
    """An optimiser without a learning rate."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model.parameters(), {})

    def step(self, closure: Any = None) -> None:
        """Nothing moves."""


@for_each(
    "spec, words",
    [
        ("slowmo(every=0)", "slowmo: every must be a whole number of 1 or more"),
        ("slowmo(beta=1.0)", "slowmo: beta must be a number in [0, 1), got 1.0"),
        ("slowmo(lr=0)", "slowmo: lr must be a finite number above 0, got 0"),
        ("slowmo(base=dense())", "slowmo: base must be a strategy, such as sgp(), or None"),
        ("slowmo(average=False)", "got base=None: use base=sgp()"),
        ("slowmo(average=1)", "average must be True or False"),
        ("diloco(every=1.5)", "diloco: every must be a whole number"),
        ("diloco(momentum=1)", "diloco: momentum must be a number in [0, 1), got 1"),
        ("diloco(lr=-1)", "diloco: lr must be a finite number above 0"),
        ("diloco(compressor=comp_ams())", "changes the optimiser"),
    ],
)
def test_wrong_settings_are_refused(spec: str, words: str) -> None:
    refuses(SpecError, re.escape(words), laconic.parse, spec)


def test_what_does_not_fit_is_refused() -> None:
    model = nn.Linear(2, 2)
    with pytest.raises(AttachError, match="use an optimiser with lr="):
        laconic.parse("slowmo()").check(2, NoRate(model))
    refuses(LaconicError, "1", lambda: laconic.parse("slowmo(base=sgp())").check(1, sgd(model)))

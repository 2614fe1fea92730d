"""Sparse Adam on threads as ranks: against plain loops, at the end of its warm-up, resumed and removed."""

from __future__ import annotations

import copy
import logging

import pytest
import torch
from tests.unit.shared import for_each
from tests.unit.test_adam_rules import B1, B2, BOUND, EPS, SIZE, World, adamw, drawn, mean_gradient, rule_of
from torch import Tensor
from torch.optim import AdamW

from laconic.comm.comm import Comm
from laconic.comm.loopback import Loopback
from laconic.core.errors import SpecError
from laconic.core.layout import Layout
from laconic.core.spec import parse
from laconic.methods.sparse_adam import sparse_adam
from laconic.optim.adam_tensors import AdamTensors
from laconic.optim.settled_variance import SettledVariance

WARMUP, STEPS = 5, 14
INNER = "gather(sparse(topk(density=0.1), values=signmean(), indices=golomb()))"
SPARSE = f"sparse_adam(density=0.1, warmup_steps={WARMUP}"


def fed(world: World, t: int) -> Tensor:
    """Take a step whose gradient DDP has averaged in the warm-up, and is this rank's own afterwards."""
    return world.advance(mean_gradient(t) if t < WARMUP else drawn(world.comm.rank, t))


def in_warmup(rows: list[Tensor]) -> tuple[Tensor, Tensor, Tensor]:
    """Return weights, m and D after a warm-up of Adam with these gradients."""
    w = torch.linspace(-1, 1, 20).view(4, 5)
    m = v = torch.zeros(4, 5)
    for t, g in enumerate(rows):
        m, v = B1 * m + (1 - B1) * g, B2 * v + (1 - B2) * g * g
        root = (v / (1 - B2 ** (t + 1))).sqrt() + EPS
        w = w * (1 - 0.01 * 0.1) - 0.01 / (1 - B1 ** (t + 1)) * m / root
    return w, m, root


@for_each("density", [1, 0.1])
def test_with_exact_values_it_is_feedback_in_units_of_the_update(density: float) -> None:
    """With density 1 nothing is held back: it is Adam with frozen variance."""

    def play(comm: Comm) -> list[Tensor]:
        spec = f"sparse_adam(density={density}, warmup_steps={WARMUP}, values=dense())"
        world = World(comm, rule_of(spec), adamw())
        return [fed(world, t) for t in range(STEPS)]

    w, m, root = in_warmup([mean_gradient(t) for t in range(WARMUP)])
    found = Loopback.run(SIZE, play)
    residual = [torch.zeros(20) for _ in range(SIZE)]
    for t in range(WARMUP, STEPS):
        mean = torch.zeros(20)
        for rank in range(SIZE):
            residual[rank] += ((B1 * m + (1 - B1) * drawn(rank, t)) / root).flatten()
            chosen = residual[rank].abs().topk(round(20 * density)).indices
            mean[chosen] += residual[rank][chosen] / SIZE
            residual[rank][chosen] = 0.0
        m = mean.view(4, 5) * root
        w = w * (1 - 0.01 * 0.1) - 0.01 / (1 - B1 ** (t + 1)) * mean.view(4, 5).clamp(-BOUND, BOUND)
        for each in found:
            torch.testing.assert_close(each[t], w, rtol=1e-4, atol=1e-5)
    assert all(torch.equal(found[0][-1], each[-1]) for each in found)


def test_density_1_with_exact_values_is_1_bit_adam_with_an_exact_codec() -> None:
    def play(comm: Comm, spec: str) -> Tensor:
        world = World(comm, rule_of(spec), adamw())
        return [fed(world, t) for t in range(STEPS)][-1]

    exact = Loopback.run(SIZE, lambda comm: play(comm, f"onebit_adam({WARMUP}, codec=dense())"))
    spec = f"sparse_adam(density=1, warmup_steps={WARMUP}, values=dense())"
    for found in Loopback.run(SIZE, lambda comm: play(comm, spec)):
        torch.testing.assert_close(found, exact[0], rtol=1e-5, atol=1e-6)


def fast(parameters: list[Tensor]) -> AdamW:
    """Return AdamW whose variance has a memory of ten steps."""
    return AdamW(parameters, lr=0.01, betas=(B1, 0.9))


def test_an_automatic_warmup_is_adam_on_the_mean_gradient_bit_for_bit() -> None:
    def play(comm: Comm) -> tuple[list[Tensor], bool]:
        world = World(comm, rule_of("sparse_adam(density=0.1)"), fast)
        weights = [world.advance(drawn(comm.rank, t)) for t in range(9)]
        return weights, any(key.startswith("frozen/") for key in world.rule.state_dict())

    def plain(comm: Comm) -> list[Tensor]:
        world = World(comm, rule_of("onebit_adam(warmup_steps=100)"), fast)
        return [
            world.advance(comm.all_reduce(drawn(comm.rank, t).flatten()).view(4, 5) * (1 / SIZE))
            for t in range(9)
        ]

    for (found, frozen), expected in zip(Loopback.run(SIZE, play), Loopback.run(SIZE, plain), strict=True):
        assert not frozen
        assert all(torch.equal(each, other) for each, other in zip(found, expected, strict=True))


def test_the_warmup_ends_when_the_variance_has_settled(caplog: pytest.LogCaptureFixture) -> None:
    """Gradients fall for 40 steps, and stay as large as they are then."""

    def play(comm: Comm) -> int:
        world = World(comm, rule_of("sparse_adam(density=0.1)"), fast)
        for t in range(200):
            world.advance(torch.ones(4, 5) * max(0.1, 1 - t / 40))
            if any(key.startswith("frozen/") for key in world.rule.state_dict()):
                return t
        return -1

    with caplog.at_level(logging.INFO, logger="laconic"):
        ends = Loopback.run(SIZE, play)
    assert len({*ends}) == 1 and 40 < ends[0] < 120
    assert [record.message for record in caplog.records if "has settled" in record.message] == [
        f"Adam's variance has settled and is frozen: from now on {INNER}"
    ]


def test_a_long_warmup_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    def play(comm: Comm) -> None:
        world = World(comm, rule_of("sparse_adam(density=0.1)"), fast)
        for t in range(100):
            world.advance(torch.ones(4, 5) * 0.9**t)

    with caplog.at_level(logging.INFO, logger="laconic"):
        Loopback.run(SIZE, play)
    assert len([record for record in caplog.records if "has not settled after" in record.message]) == 1


def test_a_variance_of_zero_has_not_settled() -> None:
    watch = SettledVariance()
    assert not any(watch.add(0.0, rate=0.1, span=2) for _ in range(6))


def test_momentum_is_finite_where_no_variance_was_learnt() -> None:
    """As of a layer that is first used after the warm-up: D is 0 / 0 there."""

    def play(comm: Comm) -> Tensor:
        world = World(comm, rule_of(f"{SPARSE})"), adamw())
        world.advance(torch.zeros(4, 5))
        tensors = AdamTensors(Layout.of([("weight", (4, 5))]), world.side)
        return tensors.unscaled({"weight": torch.zeros(20)}, {"weight": 0.0})["weight"]

    assert all(torch.equal(each, torch.zeros(20)) for each in Loopback.run(SIZE, play))


def test_a_variance_that_rises_or_a_rate_that_rises_has_not_settled() -> None:
    def ends(norms: list[float], rates: list[float]) -> list[bool]:
        watch = SettledVariance()
        pairs = zip(norms, rates, strict=True)
        return [watch.add(norm, rate, span=1) for norm, rate in pairs]

    assert ends([1.0, 0.97, 0.9, 0.9], [1.0] * 4) == [False, True, False, True]
    assert ends([1.0, 1.03, 1.1, 1.1], [1.0] * 4) == [False, True, False, True]
    assert ends([1.0] * 4, [1.0, 2.0, 2.0, 1.5]) == [False, False, True, True]


@for_each("spec", [f"{SPARSE})", f"{SPARSE}, down=0.2)", "sparse_adam(density=0.1)"])
@for_each("at", [3, 9])
def test_a_resumed_run_ends_with_the_same_bits(spec: str, at: int) -> None:
    rule = rule_of(spec)

    def play(comm: Comm) -> tuple[Tensor, Tensor]:
        world = World(comm, rule, adamw())
        for t in range(at):
            fed(world, t)
        model, optimiser, state = copy.deepcopy(
            (world.model.state_dict(), world.optimiser.state_dict(), world.rule.state_dict())
        )
        again = World(comm, rule, adamw())
        again.model.load_state_dict(model)
        again.optimiser.load_state_dict(optimiser)
        again.rule.load_state_dict(state)
        again.step = at
        return [fed(world, t) for t in range(at, 15)][-1], [fed(again, t) for t in range(at, 15)][-1]

    for straight, resumed in Loopback.run(SIZE, play):
        assert torch.equal(straight, resumed)


@for_each(
    "options, message",
    [
        ({"density": 1.5}, r"density must be a number in \(0, 1\], got 1.5"),
        ({"warmup_steps": 0}, "sparse_adam: warmup_steps"),
        ({"down": 2}, "down"),
        ({"values": 3}, "values must be a Codec"),
    ],
)
def test_wrong_arguments_are_refused(options: dict[str, object], message: str) -> None:
    with pytest.raises(SpecError, match=message):
        sparse_adam(**options)  # type: ignore[arg-type]


def test_its_text_is_its_spec() -> None:
    spec = "sparse_adam(density=0.02, warmup_steps=400, values=cast(dtype='fp16'))"
    assert repr(parse(spec)) == spec

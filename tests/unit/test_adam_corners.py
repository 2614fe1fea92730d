"""1-bit and 0/1 Adam: resuming, resizing, leaving, late and partial attachment, wild gradients."""

from __future__ import annotations

import copy

import pytest
import torch
from tests.unit.adam_world import (
    B1,
    B2,
    BOUND,
    ONE,
    SIZE,
    ZERO,
    Make,
    World,
    adamw,
    drawn,
    mean_gradient,
    rule_of,
)
from torch import Tensor, nn
from torch.optim import SGD, AdamW

import laconic
from laconic.comm.comm import Comm
from laconic.comm.loopback import Loopback
from laconic.core.errors import AttachError
from laconic.core.layout import Layout
from laconic.core.spec import parse
from laconic.exchange.method import Method, lift
from laconic.exchange.state import RankState, label
from laconic.optim.local_adam import LocalAdam


@pytest.mark.parametrize(
    "spec", ["onebit_adam(warmup_steps=5)", "zero_one_adam(freeze_steps=5, double_every=3)"]
)
def test_a_saved_rule_goes_on_bit_for_bit(spec: str) -> None:
    rule = rule_of(spec)

    def feed(world: World, steps: range) -> Tensor:
        for t in steps:
            early = t < 5 and not isinstance(rule, LocalAdam)
            last = world.advance(mean_gradient(t) if early else drawn(world.comm.rank, t))
        return last

    def play(comm: Comm) -> tuple[Tensor, Tensor]:
        world = World(comm, rule, adamw())
        feed(world, range(9))
        model, optimiser, state = copy.deepcopy(
            (world.model.state_dict(), world.optimiser.state_dict(), world.rule.state_dict())
        )
        straight = feed(world, range(9, 15))
        again = World(comm, rule, adamw())
        again.model.load_state_dict(model)
        again.optimiser.load_state_dict(optimiser)
        again.rule.load_state_dict(state)
        again.step = 9
        return straight, feed(again, range(9, 15))

    for straight, resumed in Loopback.run(SIZE, play):
        assert torch.equal(straight, resumed)


def test_an_entry_that_no_gradient_reached_rests() -> None:
    def play(comm: Comm) -> Tensor:
        world = World(comm, rule_of("onebit_adam(warmup_steps=3)"), adamw(decay=0.0))
        for t in range(8):
            g = mean_gradient(t) if t < 3 else drawn(comm.rank, t)
            g[1, 2] = 0.0 if t < 3 else g[1, 2]
            last = world.advance(g)
        return last

    before = torch.linspace(-1, 1, 20).view(4, 5)
    for found in Loopback.run(SIZE, play):
        assert found[1, 2] == before[1, 2] and bool(found.isfinite().all())
        assert bool((found - before).abs().max() < 0.5)  # eight steps at a rate of 0.01, none of them wild


def test_no_entry_moves_further_than_adam_s_own_bound() -> None:
    """A v learnt from tiny gradients, and then a large one: unbounded, the step would be huge."""

    def play(comm: Comm) -> tuple[Tensor, Tensor]:
        world = World(comm, rule_of(ONE), adamw(decay=0.0))
        for t in range(5):
            before = world.advance(1e-6 * mean_gradient(t))
        return before, world.advance(torch.ones(4, 5))

    for before, after in Loopback.run(SIZE, play):
        moved = (after - before).abs() * (1 - B1**6) / 0.01
        torch.testing.assert_close(moved, torch.full((4, 5), BOUND), rtol=1e-3, atol=0)


def test_adam_itself_never_exceeds_that_bound() -> None:
    """Ever growing gradients come nearest to it."""
    m = v = 0.0
    ratios = []
    for t in range(400):
        g = (B2 / B1) ** t
        m, v = B1 * m + (1 - B1) * g, B2 * v + (1 - B2) * g * g
        ratios.append(m / v**0.5)
    assert max(ratios) == pytest.approx(BOUND, rel=1e-6)


def test_a_tensor_without_a_gradient_is_left_alone() -> None:
    def play(comm: Comm, spec: str) -> tuple[Tensor, Tensor]:
        world = World(comm, rule_of(spec), adamw())
        for t in range(7):
            world.advance(mean_gradient(t) if t < 5 and spec == ONE else drawn(comm.rank, t))
        before = world.model.weight.detach().clone()
        for _ in range(3):
            world.model.weight.grad = None
            world.optimiser.step()
            world.step += 1
        return before, world.model.weight.detach().clone()

    for spec in (ONE, f"{ZERO})"):
        for before, after in Loopback.run(SIZE, lambda comm, spec=spec: play(comm, spec)):
            assert torch.equal(before, after)


def test_attached_late_the_first_step_is_as_long_as_adam_s() -> None:
    def play(comm: Comm, spec: str) -> Tensor:
        world = World(comm, rule_of(spec), adamw(decay=0.0))
        world.side.remove()
        for t in range(200):
            before = world.advance(mean_gradient(t))
        world.side.install([world.rule] if spec else [])
        return (world.advance(mean_gradient(200)) - before).norm()

    for spec in (
        "onebit_adam(warmup_steps=1, codec=dense())",
        "zero_one_adam(freeze_steps=300, codec=dense())",
    ):
        late = Loopback.run(SIZE, lambda comm, spec=spec: play(comm, spec))
        plain = Loopback.run(SIZE, lambda comm: play(comm, "onebit_adam(warmup_steps=1000)"))
        torch.testing.assert_close(late[0], plain[0], rtol=0.02, atol=0)


def test_a_removed_rule_leaves_replicas_equal() -> None:
    def play(comm: Comm) -> tuple[Tensor, Tensor]:
        world = World(comm, rule_of("zero_one_adam(freeze_steps=2, double_every=2, longest=8)"), adamw())
        for t in range(8):
            apart = world.advance(drawn(comm.rank, t))
        world.rule.close()
        return apart, world.model.weight.detach().clone()

    found = Loopback.run(SIZE, play)
    assert not torch.equal(found[0][0], found[1][0])
    assert all(torch.equal(found[0][1], other[1]) for other in found)


def test_rounds_count_the_optimiser_s_steps() -> None:
    """With two backward passes a step, exchanges are counted twice; rounds are not."""

    def play(comm: Comm) -> Tensor:
        world = World(comm, rule_of("zero_one_adam(freeze_steps=4, double_every=2, longest=2)"), adamw())
        for t in range(13):
            last = world.advance(drawn(comm.rank, t))
            world.step += 1  # the other backward pass
        return last

    first, *others = Loopback.run(SIZE, play)
    assert all(torch.equal(first, other) for other in others)


def test_resize_moves_a_rule_s_server_residual_once() -> None:
    def play(comm: Comm) -> dict[str, Tensor]:
        world = World(comm, rule_of("onebit_adam(warmup_steps=2)"), adamw())
        for t in range(6):
            world.advance(mean_gradient(t) if t < 2 else drawn(comm.rank, t))
        return {f"rule0/{key}": value for key, value in world.rule.state_dict().items()}

    states = [
        RankState(
            format=2, spec="s", model="m", rank=rank, size=SIZE, seed=0, step=6, tensors=label(tensors, rank)
        )
        for rank, tensors in enumerate(Loopback.run(SIZE, play))
    ]

    def held(found: list[RankState]) -> list[Tensor]:
        return [state["tensors"][f"rank{i}/rule0/route0/once/server/weight"] for i, state in enumerate(found)]

    before = held(states)
    assert sum(bool(value.any()) for value in before) == 1
    for size in (1, 2, 5):
        for value in held(laconic.resize(states, size)):
            assert torch.equal(value, sum(before))


def test_two_arms_of_a_policy_keep_their_own_codecs() -> None:
    method = lift("by_name({'a*': onebit_adam(4, codec=sign()), 'b*': onebit_adam(4, codec=dense())})")
    model = Layout.of([("a", (4, 5)), ("b", (4, 5))])
    assert [(rule.codec, part.names) for rule, part in method.governed(model)] == [  # type: ignore[attr-defined]
        (parse("sign()"), ("a",)),
        (parse("dense()"), ("b",)),
    ]


def test_feedback_keeps_one_bit_momentum_near_the_exact_one() -> None:
    def play(comm: Comm, what: str) -> Tensor:
        world = World(comm, rule_of(f"onebit_adam(warmup_steps=5, codec={what})"), adamw())
        for t in range(200):
            last = world.advance(mean_gradient(t) if t < 5 else drawn(comm.rank, t) + 0.5)
        return last

    exact = Loopback.run(SIZE, lambda comm: play(comm, "dense()"))[0]
    onebit = Loopback.run(SIZE, lambda comm: play(comm, "sign()"))
    assert all(torch.equal(onebit[0], other) for other in onebit)
    start = torch.linspace(-1, 1, 20).view(4, 5)
    assert (onebit[0] - exact).norm() < 0.15 * (exact - start).norm()


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda p: SGD(p, lr=0.1), "needs torch.optim.Adam or AdamW, got SGD"),
        (lambda p: AdamW(p, fused=True), "cannot do fused=True"),
        (lambda p: AdamW(p[:1]), "does not have bias: give it all of"),
    ],
)
def test_another_optimiser_is_refused(make: Make, message: str) -> None:
    with pytest.raises(AttachError, match=message):
        World(Loopback.run(1, lambda comm: comm)[0], rule_of("onebit_adam(warmup_steps=5)"), make)


def test_comp_ams_asks_for_amsgrad() -> None:
    method = parse("comp_ams()")
    assert isinstance(method, Method)
    (rule,) = method.rules
    rule.check(AdamW([nn.Parameter(torch.ones(1))], amsgrad=True), ())
    made = rule.make([nn.Parameter(torch.ones(2, 2))], lr=None, weight_decay=0.0)
    assert made is not None
    rule.check(made, ())
    with pytest.raises(AttachError, match="amsgrad=True, got AdamW"):
        rule.check(AdamW([nn.Parameter(torch.ones(1))]), ())

"""1-bit and 0/1 Adam on threads as ranks: against plain loops with an exact codec, and in unusual cases."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from tests.unit.shared import for_each
from torch import Tensor, nn
from torch.optim import SGD, Adam, AdamW, Optimizer

import laconic
from laconic.comm.comm import Comm
from laconic.comm.loopback import Loopback
from laconic.comm.metered import Metered
from laconic.core.errors import AttachError
from laconic.core.layout import Layout
from laconic.core.spec import parse
from laconic.ddp.optimiser import OptimiserHooks
from laconic.exchange.method import Method, lift
from laconic.exchange.rule import BoundRule, Rule, RuleContext
from laconic.exchange.state import RankState, label
from laconic.exchange.stopwatch import Seconds
from laconic.optim.inner import both_ways
from laconic.optim.local_adam import LocalAdam
from laconic.optim.rounds import Rounds

SIZE, STEPS, B1, B2, EPS = 3, 14, 0.9, 0.999, 1e-8
Make = Callable[[list[Tensor]], Optimizer]


class World:
    """One rank: a model, its optimiser, and a rule at work on the matrix. Gradients are drawn."""

    def __init__(self, comm: Comm, rule: Rule, make: Make) -> None:
        self.comm = comm
        self.model = nn.Linear(5, 4)
        with torch.no_grad():
            for parameter in self.model.parameters():
                parameter.copy_(torch.linspace(-1, 1, parameter.numel()).view_as(parameter))
        self.step = 0
        self.optimiser = make([*self.model.parameters()])
        names = {parameter: name for name, parameter in self.model.named_parameters()}
        self.side = OptimiserHooks(self.optimiser, names, [rule])
        layout = Layout.of([("weight", (4, 5))])
        self.rule: BoundRule = rule.bind(layout, self.side, RuleContext(Metered(comm), 7, Seconds()))
        self.side.install(lambda _: self.rule.step_(self.step))

    def advance(self, weight_grad: Tensor) -> Tensor:
        self.model.weight.grad = weight_grad.clone()
        self.model.bias.grad = torch.full_like(self.model.bias, 0.1)
        self.optimiser.step()
        self.step += 1
        return self.model.weight.detach().clone()


def drawn(rank: int, step: int) -> Tensor:
    return torch.randn(4, 5, generator=torch.Generator().manual_seed(1000 * rank + step))


def mean_gradient(step: int) -> Tensor:
    return torch.stack([drawn(rank, step) for rank in range(SIZE)]).mean(0)


def rule_of(spec: str) -> Rule:
    (rule,) = lift(spec).rules
    return rule


def adamw(decay: float = 0.1) -> Make:
    return lambda parameters: AdamW(parameters, lr=0.01, weight_decay=decay)


BOUND = (1 - B1) / ((1 - B2) * (1 - B1**2 / B2)) ** 0.5  # by Cauchy and Schwarz
ONE, ZERO = (
    "onebit_adam(warmup_steps=5, codec=dense())",
    "zero_one_adam(freeze_steps=5, kappa=2, codec=dense()",
)


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


@for_each("double_every", [1000, 2])
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


@for_each("spec", ["onebit_adam(warmup_steps=5)", "zero_one_adam(freeze_steps=5, double_every=3)"])
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
        world.side.install(lambda _: world.rule.step_(world.step) if spec else ())
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
    assert [(rule.inner, part.names) for rule, part in method.governed(model)] == [  # type: ignore[attr-defined]
        (both_ways(parse("sign()")), ("a",)),
        (both_ways(parse("dense()")), ("b",)),
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


@for_each(
    "make, message",
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

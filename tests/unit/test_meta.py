"""Meta-learning among agents: its gradients, projections, messages and prices, each against a plain count."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.unit.shared import for_each, refuses, same
from torch import Tensor
from torch.func import functional_call, grad, vmap

from laconic.core.errors import SpecError
from laconic.core.turn import Turn
from laconic.federated.coding import Coding
from laconic.federated.meta import (
    PSGA,
    Averaging,
    Energy,
    ImplicitGradient,
    Learner,
    Local,
    MetaGradient,
    Mlp,
    RotatedDigits,
    Sinusoids,
    Trained,
    few_step,
)
from laconic.federated.meta.exchange import Exchange
from laconic.federated.meta.imaml import solved
from laconic.federated.meta.learner import clipped, cross_entropy
from laconic.federated.meta.psga import projected

LEARNER = Learner(Mlp((1, 8, 8, 1)))
N = LEARNER.network.layout.numel
FIRST = LEARNER.network.first(0)
AGENTS = Sinusoids(4, seed=1)
OWN = Local(steps=5)
LOSSY = ["qsgd(levels=7)", "topk(density=0.1)", "sign()", "dgc(density=0.1)"]


def line_of(point: tuple[float, float], x: list[float], y: list[float]) -> tuple[float, float, float]:
    """Mean squared error of w x + b, and its gradient, by hand."""
    (w, b), m = point, len(x)
    away = [w * xi + b - yi for xi, yi in zip(x, y, strict=True)]
    by_w = 2 * sum(a * xi for a, xi in zip(away, x, strict=True)) / m
    return sum(a * a for a in away) / m, by_w, 2 * sum(away) / m


def test_mamls_gradient_is_that_of_a_calculation_by_hand() -> None:
    """w x + b: a step multiplies the outer gradient by I - lr H, H = 2 mean [[x^2, x], [x, 1]]."""
    lr, start = 0.1, (0.7, -0.3)
    support, query = ([1.0, 2.0, -1.0], [0.5, 3.0, 1.0]), ([0.5, -2.0], [1.0, 2.0])
    _, by_w, by_b = line_of(start, *support)
    _, out_w, out_b = line_of((start[0] - lr * by_w, start[1] - lr * by_b), *query)
    xx, x1 = (sum(xi**power for xi in support[0]) / 3 for power in (2, 1))
    expected = (
        (1 - 2 * lr * xx) * out_w - 2 * lr * x1 * out_b,
        -2 * lr * x1 * out_w + (1 - 2 * lr) * out_b,
    )
    line, at = Learner(Mlp((1, 1))), torch.tensor([start])
    rows = [tuple(torch.tensor(column).view(1, -1, 1) for column in pair) for pair in (support, query)]
    near = {"atol": 1e-5, "rtol": 1e-5}
    torch.testing.assert_close(line.meta_gradients(at, *rows, 1, lr), torch.tensor([expected]), **near)
    torch.testing.assert_close(line.first_order(at, *rows, 1, lr), torch.tensor([(out_w, out_b)]), **near)


def test_mamls_gradient_is_that_of_torch_func_for_each_agent_alone() -> None:
    """Stacked rows give what `vmap` over `grad` of `grad` gives, through three inner steps."""
    layers = torch.nn.Sequential(torch.nn.Linear(1, 8), torch.nn.ReLU(), torch.nn.Linear(8, 1))
    learner = Learner(Mlp((1, 8, 1)))
    (sx, sy), (qx, qy) = AGENTS.episode(0, 6, 7)

    def loss(flat: Tensor, x: Tensor, y: Tensor) -> Tensor:
        w1, b1, w2, b2 = torch.split(flat, [8, 8, 8, 1])
        named = {"0.weight": w1.view(1, 8).T, "0.bias": b1, "2.weight": w2.view(8, 1).T, "2.bias": b2}
        return (functional_call(layers, named, (x,)) - y).square().mean()

    def outer(flat: Tensor, sx: Tensor, sy: Tensor, qx: Tensor, qy: Tensor) -> Tensor:
        for _ in range(3):
            flat = flat - 0.05 * grad(loss)(flat, sx, sy)
        return loss(flat, qx, qy)

    weights = learner.network.first(3).repeat(4, 1)
    expected = vmap(grad(outer))(weights, sx, sy, qx, qy)
    made = learner.meta_gradients(weights, (sx, sy), (qx, qy), 3, 0.05)
    torch.testing.assert_close(made, expected, atol=1e-5, rtol=1e-4)


LINE = Learner(Mlp((1, 1)))  # whose loss is quadratic


def test_the_implicit_gradient_is_the_exact_one_on_a_quadratic() -> None:
    """That of the query's loss at the exact solution of the proximal problem, by autograd in float64.

    Two steps of conjugate gradients are exact with two weights. Tolerance: float32 sums of the descent.
    """
    start, (support, query) = torch.tensor([[0.7, -0.3]]).repeat(4, 1), AGENTS.episode(0, 6, 7)
    plan = ImplicitGradient(proximal=2.0, cg_steps=2, inner_lr=0.02, inner_steps=800)
    common = start.double().requires_grad_()
    columns = [
        torch.cat([part[0].double(), torch.ones_like(part[0]).double()], 2) for part in (support, query)
    ]
    hessian = 2 * columns[0].mT @ columns[0] / 6
    pull = 2 * columns[0].mT @ support[1].double() / 6 + plan.proximal * common.unsqueeze(2)
    own = torch.linalg.solve(hessian + plan.proximal * torch.eye(2, dtype=torch.float64), pull)
    loss = (columns[1] @ own - query[1]).square().mean(dim=(1, 2)).sum()
    (expected,) = torch.autograd.grad(loss, common)
    made = plan.gradients(LINE, start, support, query)
    torch.testing.assert_close(made.double(), expected, rtol=1e-3, atol=1e-4)


def test_without_a_step_of_the_solver_imaml_is_first_order() -> None:
    """The proximal term has no gradient in the first inner step."""
    start, (support, query) = FIRST.repeat(4, 1), AGENTS.episode(0, 6, 7)
    plan = ImplicitGradient(rounds=2, cg_steps=0, inner_steps=1)
    made = plan.gradients(LEARNER, start, support, query)
    assert torch.equal(made, LEARNER.first_order(start, support, query, 1, plan.inner_lr))
    other = MetaGradient(rounds=2, order=1)
    assert torch.equal(*(each.train(LEARNER, AGENTS, FIRST).weights for each in (plan, other)))


@for_each("seed", range(5))
def test_conjugate_gradients_solve_each_row_alone(seed: int) -> None:
    """Against torch.linalg.solve; a row with a negative curvature stays where it is."""
    rng = torch.Generator().manual_seed(seed)
    half, right = torch.randn(3, 6, 6, generator=rng), torch.randn(3, 6, generator=rng)
    matrix = half @ half.mT / 6 + torch.eye(6)
    product = lambda v: (matrix @ v.unsqueeze(2)).squeeze(2)  # noqa: E731
    exact = solved(product, right, 12)
    torch.testing.assert_close(exact, torch.linalg.solve(matrix, right), rtol=1e-3, atol=1e-3)
    matrix[1] *= -1
    found = solved(product, right, 12)
    assert torch.equal(found[[0, 2]], exact[[0, 2]]) and not found[1].any()
    assert torch.equal(solved(lambda v: v, right, 4), right), "nothing is left after the first step"


def test_imaml_makes_what_follows_a_few_steps_better() -> None:
    learner = Learner(Mlp((1, 20, 20, 1)))
    first, new = learner.network.first(0), Sinusoids(50, seed=77)
    plan = ImplicitGradient(rounds=60, outer_lr=1e-2)
    found = plan.train(learner, Sinusoids(20, seed=5), first)
    before, after = (few_step(learner, new, at, lr=0.01).loss for at in (first, found.weights))
    assert after[3] < 0.8 * before[3]


def test_maml_without_an_inner_step_is_joint_training() -> None:
    model = FIRST.clone()
    adam = torch.optim.Adam([model], lr=1e-3)
    for k in range(3):
        _, query = AGENTS.episode(k, 10, 10)
        model.grad = LEARNER.gradients(model.detach().repeat(4, 1), *query).mean(dim=0)
        adam.step()
    for order in (1, 2):
        plan = MetaGradient(rounds=3, order=order, inner_steps=0)  # type: ignore[arg-type]
        assert torch.equal(plan.train(LEARNER, AGENTS, FIRST).weights, model)


points = st.lists(st.lists(st.floats(-50, 50, width=32), min_size=3, max_size=3), min_size=1, max_size=5)


@settings(max_examples=50, deadline=None)
@given(points, st.lists(st.floats(-50, 50, width=32), min_size=3, max_size=3), st.floats(0, 60, width=32))
def test_a_projection_is_the_nearest_point_of_the_ball(
    rows: list[list[float]], middle: list[float], radius: float
) -> None:
    at, centre = torch.tensor(rows), torch.tensor(middle)
    moved = projected(at, centre, radius)
    away, before = (moved - centre).norm(dim=1), (at - centre).norm(dim=1)
    slack = 1e-4 * (1 + centre.norm())  # float32 around a far centre
    assert (away <= radius + slack).all()
    if radius > 0:
        assert torch.equal(moved[before <= radius], at[before <= radius])  # who is inside stays
    distance = (at - moved).norm(dim=1)  # the least there is: how far outside it was
    torch.testing.assert_close(distance, (before - radius).clamp(min=0), atol=float(slack), rtol=1e-4)
    torch.testing.assert_close(projected(moved, centre, radius), moved, atol=float(slack), rtol=1e-4)
    if radius == 0:
        assert (moved == centre).all()
    tiny = torch.full((2, 3), 1e-30)  # whose norm is 0 in float32
    assert torch.equal(projected(tiny, torch.zeros(3), 0.0), torch.zeros(2, 3))


@settings(max_examples=50, deadline=None)
@given(points, st.floats(0.125, 100, width=32))
def test_a_clipped_gradient_keeps_its_direction(rows: list[list[float]], most: float) -> None:
    gradients = torch.tensor(rows)
    short = clipped(gradients, most)
    norms = gradients.norm(dim=1)
    torch.testing.assert_close(short.norm(dim=1), norms.clamp(max=most), atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(
        short * norms.unsqueeze(1), gradients * short.norm(dim=1, keepdim=True), atol=1e-2, rtol=1e-3
    )


@for_each("codec, rounds", [("dense()", 7), *((codec, 1 + 3 * (i % 2)) for i, codec in enumerate(LOSSY))])
def test_agents_agree_at_the_end(codec: str, rounds: int) -> None:
    found = PSGA(rounds=rounds, eta=0.1, local=OWN, up=codec, down=codec).train(LEARNER, AGENTS, FIRST)
    assert torch.equal(found.agents, found.weights.repeat(4, 1))
    assert found.weights.isfinite().all()
    assert not torch.equal(found.weights, FIRST)


def test_dense_is_the_algorithm_without_any_message_bit_for_bit() -> None:
    plan = PSGA(rounds=6, eta=0.1, radius=0.5, power=2.0, clip=0.3, local=Local(steps=5, clip=None))
    at, speed = FIRST.repeat(4, 1), torch.zeros(4, N)
    for step in range(5):
        speed = 0.9 * speed + LEARNER.gradients(at, *AGENTS.batch(step, 10))
        at = at - 0.01 * speed
    for k in range(6):
        uphill = LEARNER.gradients(at, *AGENTS.batch(5 + k, 10))
        at = at + 0.1 * torch.stack([g * (0.3 / g.norm().clamp(min=0.3)) for g in uphill])
        centre = at.mean(dim=0)
        if k == 0:
            unit = float((at - centre).norm(dim=1).max())
        reach = float(torch.tensor(unit * 0.5 * (1 - (k + 1) / 6) ** 2))  # as float32, which is what travels
        rows = []
        for row in at:
            norm = (row - centre).norm()
            rows.append(row if norm <= reach else centre + (row - centre) * (reach / norm))
        at = torch.stack(rows)
    found = plan.train(LEARNER, AGENTS, FIRST)
    assert torch.equal(found.weights, centre)


@for_each("method", [Averaging(rounds=3, step=0.5, local=OWN), MetaGradient(rounds=3)])
def test_dense_averages_are_plain_averages(method: Averaging | MetaGradient) -> None:
    model = FIRST.clone()
    adam = torch.optim.Adam([model], lr=1e-3)
    for k in range(3):
        start = model.repeat(4, 1)
        if isinstance(method, MetaGradient):
            model.grad = LEARNER.meta_gradients(start, *AGENTS.episode(k, 10, 10), 1, 0.01).mean(dim=0)
            adam.step()
        else:
            at, speed = start, torch.zeros(4, N)
            for step in range(5 * k, 5 * k + 5):
                speed = 0.9 * speed + clipped(LEARNER.gradients(at, *AGENTS.batch(step, 10)), 10.0)
                at = at - 0.01 * speed
            model = model + 0.5 * (at - start).mean(dim=0)
    assert torch.equal(method.train(LEARNER, AGENTS, FIRST).weights, model)


@for_each("up", ["dense()", *LOSSY])
@for_each("kind", ["states", "updates"])
def test_bytes_are_those_of_the_wires(kind: str, up: str, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes: list[int] = []
    encode: Callable[[Coding, Tensor, Turn], Tensor] = Coding.encode

    def seen(coding: Coding, x: Tensor, turn: Turn) -> Tensor:
        wire = encode(coding, x, turn)
        assert wire.dtype == torch.uint8
        sizes.append(wire.numel())
        return wire

    monkeypatch.setattr(Coding, "encode", seen)
    exchange = Exchange(LEARNER.network.layout, FIRST, 3, up, "bf16()")
    for step in range(2):
        getattr(exchange, kind)(torch.randn(3, N, generator=torch.Generator().manual_seed(step)), step)
    assert exchange.up_nbytes == sum(sizes) and len(sizes) == 6
    exchange.answer(FIRST + 1, 0, 0.25)
    assert exchange.down_nbytes == 3 * (sizes[-1] + 4)  # to each of three agents, with a float32
    if up == "dense()":
        assert exchange.up_nbytes == 6 * (4 * N + 4)


@for_each("codec", LOSSY)
def test_what_is_not_said_of_an_update_is_said_later(codec: str) -> None:
    """Sum of what was read + residual = sum of updates, where anything is remembered."""
    exchange = Exchange(LEARNER.network.layout, FIRST, 2, codec, "dense()")
    updates = torch.randn(5, 2, N, generator=torch.Generator().manual_seed(0))
    read = sum(exchange.updates(update, step) for step, update in enumerate(updates))
    if Coding.up(codec, LEARNER.network.layout).remembers:
        torch.testing.assert_close(read + exchange.residuals, updates.sum(0), atol=1e-4, rtol=1e-4)
    else:
        assert not exchange.residuals.any()


@for_each("codec", ["topk(density=0.1)", "sign()", "qsgd(levels=7)"])
def test_the_server_comes_to_know_agents_that_stand_still(codec: str) -> None:
    exchange = Exchange(LEARNER.network.layout, FIRST, 2, codec, codec)
    still = torch.randn(2, N, generator=torch.Generator().manual_seed(0))
    begin = (exchange.copies - still).norm()
    for step in range(60):
        known = exchange.states(still, step)
    assert (known - still).norm() < 0.05 * begin, codec


def test_energy_is_cycles_and_bits_and_flops_are_those_of_the_matrix_products() -> None:
    """Forward 2 b sum(in out) an agent; backward for weights as much, and for inputs but the first."""
    trained = Trained(FIRST, FIRST.repeat(2, 1), 1, up_nbytes=100, down_nbytes=25, flops=3_000_000)
    price = Energy(cycles_per_flop=0.5, joules_per_cycle=1e-9, joules_per_bit=1e-6)
    assert math.isclose(price.joules(trained), 1.5e6 * 1e-9 + 1000 * 1e-6)
    found = Averaging(rounds=2, local=Local(steps=3, batch=10)).train(LEARNER, AGENTS, FIRST)
    products = [1 * 8, 8 * 8, 8 * 1]
    forward = 2 * 10 * sum(products)
    assert found.flops == 4 * 6 * (2 * forward + (forward - 2 * 10 * products[0]))
    second = MetaGradient(rounds=2).train(LEARNER, AGENTS, FIRST).flops
    assert second > MetaGradient(rounds=2, order=1).train(LEARNER, AGENTS, FIRST).flops


def test_maml_makes_the_first_step_on_a_new_task_larger() -> None:
    """Meta-training makes one step on ten points worth twice what it was, and what follows better."""
    learner = Learner(Mlp((1, 20, 20, 1)))
    first = learner.network.first(0)
    plan = MetaGradient(rounds=150, inner_lr=0.05, outer_lr=1e-2)
    found = plan.train(learner, Sinusoids(8, seed=5, fresh=True), first)
    new = Sinusoids(50, seed=77)
    before = few_step(learner, new, first, lr=0.05).loss
    after = few_step(learner, new, found.weights, lr=0.05).loss
    assert before[0] - before[1] > 0
    assert after[0] - after[1] > 1.5 * (before[0] - before[1])
    assert after[3] < before[3]


def test_tasks_are_drawn_again_alike_and_new_ones_differ() -> None:
    assert same(AGENTS.batch(3, 5), Sinusoids(4, 1).batch(3, 5))
    assert torch.equal(AGENTS.waves(0)[0], AGENTS.waves(9)[0])
    fresh = Sinusoids(4, 1, fresh=True)
    assert not torch.equal(fresh.waves(0)[0], fresh.waves(9)[0])
    amplitudes, phases = Sinusoids(1000).waves()
    assert 0.1 <= amplitudes.min() < 0.3 and 4.8 < amplitudes.max() <= 5
    assert 0 <= phases.min() < 0.1 and 3.0 < phases.max() <= math.pi


def test_a_rotated_digit_is_a_class_of_its_own() -> None:
    tasks = RotatedDigits(3, digits=(2, 3), ways=5)
    (x, y), (query, labels) = tasks.episode(0, 2, 4)
    assert x.shape == (3, 10, 64) and query.shape == (3, 20, 64)
    assert torch.bincount(y[0]).tolist() == [2] * 5 and torch.bincount(labels[2]).tolist() == [4] * 5
    assert all(len(set(classes)) == 5 for classes in tasks.classes())
    assert {name // 4 for classes in tasks.classes() for name in classes} <= {2, 3}
    learned = {tuple(image.tolist()) for image in x[0]}
    assert not learned & {tuple(image.tolist()) for image in query[0]}  # tested on other images
    learner = Learner(Mlp((64, 32, 5)), cross_entropy)
    found = few_step(learner, tasks, learner.network.first(), shots=5, queries=10, lr=0.5)
    assert found.accuracy is not None and found.accuracy[-1] > 0.4 > 0.2  # chance: one in five
    batch = tasks.batch(0, 7)
    assert batch[0].shape == (3, 7, 64) and batch[1][0].tolist() == [0, 1, 2, 3, 4, 0, 1]


def test_what_cannot_be_is_refused_with_a_reason() -> None:
    lossy = PSGA(rounds=1, local=OWN, up="powersgd(rank=2)")
    for says, make, arguments, options in (
        ("count must be .* got 0.*needs agents", Sinusoids, [0], {}),
        ("count must be .* got 0", RotatedDigits, [0], {}),
        ("ways must be a whole number in 2..4, got 5", RotatedDigits, [2], {"digits": (7,), "ways": 5}),
        ("digits must be .* got 10", RotatedDigits, [2], {"digits": (10,)}),
        ("shots \\+ queries must be at most 17., .* got 200", RotatedDigits(2).episode, [0, 100, 100], {}),
        ("shots must be .* got 0", Sinusoids(2).episode, [0, 0, 5], {}),
        ("rounds must be .* got 0", PSGA, [], {"rounds": 0}),
        ("radius must be .* got 0.0.*allows no ascent", PSGA, [], {"radius": 0.0}),
        ("radius must be .* got -1.0", PSGA, [], {"radius": -1.0}),
        ("eta must be .* got -0.1", PSGA, [], {"eta": -0.1}),
        ("clip must be .* got 0.0", PSGA, [], {"clip": 0.0}),
        ("step must be .* got 1.5", Averaging, [], {"step": 1.5}),
        ("inner_steps must be .* got -1", MetaGradient, [], {"inner_steps": -1}),
        ("order must be .* got 3", MetaGradient, [], {"order": 3}),
        ("proximal must be .* got 0.*forget the model", ImplicitGradient, [], {"proximal": 0.0}),
        ("cg_steps must be .* got -1", ImplicitGradient, [], {"cg_steps": -1}),
        ("widths must have .* got \\(3,\\)", Mlp, [(3,)], {}),
        ("joules_per_bit must be .* got -1.0", Energy, [], {"joules_per_bit": -1.0}),
        ("steps must be .* got \\(\\)", few_step, [LEARNER, AGENTS, FIRST], {"steps": []}),
        ("needs all ranks at once", lossy.train, [LEARNER, AGENTS, FIRST], {}),
    ):
        refuses(SpecError, says, make, *arguments, **options)

"""ADMM towards a table: its step by hand, its end, its files, and what it refuses."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from tests.unit.shared import flat, for_each, refuses, resumed
from torch import Tensor, nn
from torch.nn.utils import prune, spectral_norm

from laconic.core.errors import AttachError, NonFiniteError, SpecError, StateError
from laconic.core.spec import parse
from laconic.lowbit import admm, straight_through
from laconic.lowbit.tables.projection import project
from laconic.lowbit.tables.tables import TABLES

LETTERS = 12


class Net(nn.Module):
    """A small language model. `cell`: its recurrent layer."""

    def __init__(self, cell: type[nn.LSTM] | type[nn.GRU] = nn.LSTM, **shape: object) -> None:
        super().__init__()
        self.embed = nn.Embedding(LETTERS, 6)
        self.cell = cell(6, 9, batch_first=True, **shape)
        self.head = nn.Linear(18 if shape.get("bidirectional") else shape.get("proj_size", 9), LETTERS)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.cell(self.embed(x))[0])


def net(seed: int = 0, **shape) -> Net:
    torch.manual_seed(seed)
    return Net(**shape)


def sgd(model: nn.Module, **settings) -> torch.optim.SGD:
    return torch.optim.SGD(model.parameters(), **({"lr": 0.5, "momentum": 0.9, "nesterov": True} | settings))


def batch(step: int) -> tuple[Tensor, Tensor]:
    """Sequences that go up by one, and what comes next."""
    first = torch.randint(0, LETTERS, (8, 1), generator=torch.Generator().manual_seed(step))
    x = (first + torch.arange(7)) % LETTERS
    return x[:, :-1], x[:, 1:]


def backward(model: nn.Module, step: int) -> Tensor:
    x, y = batch(step)
    loss = F.cross_entropy(model(x).flatten(0, 1), y.flatten())
    model.zero_grad()
    loss.backward()
    return loss.detach()


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> float:
    loss = torch.tensor(0.0)
    for step in steps:
        loss = backward(model, step)
        optimizer.step()
    return float(loss)


def begun(*table: str, attach: Callable = admm, **options) -> tuple:
    """A model with its optimiser and the handle of its training."""
    model = net()
    optimizer = sgd(model)
    return model, optimizer, attach(model, optimizer, *table, **options)


def drawn(parts: tuple, steps: range) -> float:
    return train(*parts[:2], steps)


def detached(optimizer: torch.optim.Optimizer) -> bool:
    return not optimizer._optimizer_step_pre_hooks and not optimizer._optimizer_step_post_hooks


def test_each_step_is_that_of_the_equations() -> None:
    """Two models, one with the hooks and one with ADMM written out: the same bits for 23 steps."""
    twin, (model, optimizer, handle) = net(), begun(gamma=0.01, growth=1.5, every=5, start=3)
    twins, plain = sgd(twin), {name: each for name, each in twin.named_parameters() if each.dim() == 2}
    gamma, g, dual = 0.01, {}, {}
    for step in range(23):
        backward(model, step)
        optimizer.step()
        backward(twin, step)
        if step == 3:
            g = {name: torch.mul(*project(each.detach(), TABLES["ternary"])) for name, each in plain.items()}
            dual = {name: torch.zeros_like(each) for name, each in g.items()}
        for name in g:
            aim = g[name] - dual[name]
            plain[name].grad.add_(plain[name].detach() - aim, alpha=gamma)
        twins.step()
        if g and (step + 1 - 3) % 5 == 0:
            raised = min(0.1, gamma * 1.5)
            for name, each in plain.items():
                g[name] = torch.mul(*project(each.detach() + dual[name], TABLES["ternary"]))
                dual[name] = (dual[name] + (each.detach() - g[name])) * (gamma / raised)
            gamma = raised
        assert torch.equal(flat(model), flat(twin)), step
    assert handle.updates == 4 and handle.gamma == gamma
    for name, (alpha, q) in handle.solution().items():
        assert torch.equal(alpha * q, g[name])


def test_the_residual_falls_and_the_model_still_learns() -> None:
    model, optimizer, handle = begun(gamma=0.003, every=10, growth=1.2)
    first, before = float(backward(model, 0)), handle.residual()
    train(model, optimizer, range(300))
    assert handle.residual() < 0.05 < 0.3 < before
    with handle.quantised():
        assert float(backward(model, 0)) < first / 10


def test_every_weight_ends_in_the_table() -> None:
    for table in TABLES:
        model = net()
        handle = admm(model, sgd(model), table)
        assert handle.finish() is model
        for name, each in model.named_parameters():
            if each.dim() == 2:
                assert all(len(row.unique()) <= len(TABLES[table].values) for row in each.detach())
            else:
                assert torch.equal(each, dict(net().named_parameters())[name])


def test_the_penalty_comes_after_accumulation_and_clipping() -> None:
    """Two half batches give the same step as a whole one: the penalty is added once a step."""
    model, twin = net(), net()
    whole, halves = sgd(model), sgd(twin)
    admm(model, whole, gamma=0.05, every=2)
    admm(twin, halves, gamma=0.05, every=2)
    for step in range(6):
        backward(model, step)
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        whole.step()
        twin.zero_grad()
        x, y = batch(step)
        for part in (slice(0, 4), slice(4, 8)):
            (F.cross_entropy(twin(x[part]).flatten(0, 1), y[part].flatten()) / 2).backward()
        nn.utils.clip_grad_norm_(twin.parameters(), 0.5)
        halves.step()
    torch.testing.assert_close(flat(model), flat(twin))


def test_a_closure_is_called_once_and_before_the_penalty() -> None:
    model, twin = net(), net()
    optimizer, plain = sgd(model), sgd(twin)
    admm(model, optimizer, gamma=0.05)
    admm(twin, plain, gamma=0.05)
    calls = []

    def closure() -> Tensor:
        calls.append(len(calls))
        return backward(model, 0)

    loss = optimizer.step(closure)
    assert calls == [0] and loss == backward(twin, 0)
    plain.step()
    assert torch.equal(flat(model), flat(twin))


def test_the_extra_gradient_step_is_that_of_korpelevich() -> None:
    """By hand with plain SGD: each pair of calls steps from the same place with the gradient ahead."""
    model, twin = net(), net()
    optimizer = sgd(model, momentum=0.0, nesterov=False)
    handle = admm(model, optimizer, gamma=0.05, every=1000, extragradient=True)
    theta = {name: each.detach().clone() for name, each in twin.named_parameters()}
    g = {n: torch.mul(*project(v, TABLES["ternary"])) for n, v in theta.items() if v.dim() == 2}

    def gradient(at: dict[str, Tensor], step: int) -> dict[str, Tensor]:
        twin.load_state_dict(at)
        backward(twin, step)
        return {n: p.grad + (0.05 * (at[n] - g[n]) if n in g else 0) for n, p in twin.named_parameters()}

    for step in range(0, 8, 2):
        train(model, optimizer, range(step, step + 2))
        slopes = gradient(theta, step)
        ahead = {name: value - 0.5 * slopes[name] for name, value in theta.items()}
        slopes = gradient(ahead, step + 1)
        theta = {name: value - 0.5 * slopes[name] for name, value in theta.items()}
        for name, each in model.named_parameters():
            torch.testing.assert_close(each.detach(), theta[name])
    assert handle.steps == 4


@for_each("make", [sgd, lambda model: torch.optim.Adam(model.parameters(), lr=0.01)])
def test_a_prediction_leaves_no_trace_in_the_optimiser(make) -> None:
    """Where prediction and step see one gradient of zero rate, its momentum is that of plain steps."""
    model, twin = nn.Sequential(nn.Linear(3, 2)), nn.Sequential(nn.Linear(3, 2))
    optimizer, plain = make(model), make(twin)
    admm(model, optimizer, gamma=1e-12, extragradient=True)
    for step in range(6):
        for parameter in model.parameters():
            parameter.grad = torch.full_like(parameter, step // 2 + 1.0)
        optimizer.step()
        if step % 2:
            for parameter in twin.parameters():
                parameter.grad = torch.full_like(parameter, step // 2 + 1.0)
            plain.step()
    for ours, other in zip(optimizer.state.values(), plain.state.values(), strict=True):
        assert ours.keys() == other.keys()
        for key, value in other.items():
            torch.testing.assert_close(ours[key], value)


@for_each("stop", [2, 3, 10])
@for_each("options", [{}, {"extragradient": True, "tie": "model"}, {"start": 3}])
def test_a_resumed_run_has_the_same_bits(stop, options) -> None:
    stop = stop + stop % 2 if options.get("extragradient") else stop
    ends = resumed(lambda: begun(every=3, **options), drawn, stop, 16)
    (model, _, handle), (again, _, second) = ends
    assert torch.equal(flat(again), flat(model))
    assert second.residual() == handle.residual() and second.gamma == handle.gamma
    assert torch.equal(flat(second.finish()), flat(handle.finish()))


def test_another_state_is_refused_with_nothing_changed() -> None:
    _, _, handle = begun(every=3)
    other = net()
    state = admm(other, sgd(other), "binary").state_dict()
    refuses(StateError, "saved with different settings", handle.load_state_dict, state)
    bigger = nn.Sequential(nn.Linear(4, 4))
    with pytest.raises(StateError, match="saved with different weights"):
        handle.load_state_dict(admm(bigger, sgd(bigger), every=3).state_dict())
    assert handle.steps == 0


DAMAGES = [
    (lambda state: None, "a state of admm must be a dict"),
    (lambda state: {"format": 1}, "saved with different settings"),
    (lambda state: {k: v for k, v in state.items() if k != "tensors"}, "lacks its tensors"),
    (lambda state: {k: v for k, v in state.items() if k != "steps"}, "must be numbers, got"),
    (lambda state: state | {"gamma": "x"}, "must be numbers, got"),
    (lambda state: state | {"tensors": {"x": torch.zeros(1)}}, "lacks 'alpha/"),
    (lambda state: with_tensor(state, "q/", lambda q: q[:2]), "'q/.* must be torch.int8"),
    (lambda state: with_tensor(state, "q/", lambda q: q.float()), "'q/.* must be torch.int8"),
    (lambda state: with_tensor(state, "alpha/", lambda alpha: alpha.T), "'alpha/.* must be torch.float32"),
    (lambda state: with_tensor(state, "lambda/", lambda dual: 3), "lacks 'lambda/"),
]


def with_tensor(state: dict, prefix: str, change) -> dict:
    name = next(name for name in state["tensors"] if name.startswith(prefix))
    return state | {"tensors": state["tensors"] | {name: change(state["tensors"][name])}}


@for_each("damage, says", DAMAGES)
def test_a_damaged_state_is_refused_with_nothing_changed(damage, says: str) -> None:
    model, optimizer, handle = begun(every=3)
    train(model, optimizer, range(4))
    state = handle.state_dict()
    train(model, optimizer, range(4, 9))
    before = handle.state_dict()
    refuses(StateError, says, lambda: handle.load_state_dict(damage(state)))
    after = handle.state_dict()
    assert after.pop("tensors").keys() == before["tensors"].keys() and handle.steps == 9
    assert after == {key: value for key, value in before.items() if key != "tensors"}
    assert all(
        torch.equal(value, before["tensors"][key]) for key, value in handle.state_dict()["tensors"].items()
    )
    train(model, optimizer, range(9, 13))


def test_a_state_is_not_saved_in_the_middle_of_an_extra_gradient_step() -> None:
    model, optimizer, handle = begun(extragradient=True)
    train(model, optimizer, range(1))
    refuses(StateError, "after an even number of calls", handle.state_dict)


def test_a_scaler_that_divides_in_the_optimiser_divides_the_penalty_too() -> None:
    model, twin = net(), net()
    fused = torch.optim.SGD(model.parameters(), lr=0.5, fused=True)
    plain = torch.optim.SGD(twin.parameters(), lr=0.5)
    admm(model, fused, gamma=0.05, every=2)
    admm(twin, plain, gamma=0.05, every=2)
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0)
    for step in range(6):
        x, y = batch(step)
        model.zero_grad()
        scaler.scale(F.cross_entropy(model(x).flatten(0, 1), y.flatten())).backward()
        scaler.step(fused)
        scaler.update()
        train(twin, plain, range(step, step + 1))
    torch.testing.assert_close(flat(model), flat(twin))


def test_straight_through_takes_the_gradient_at_the_rounded_weights() -> None:
    model, twin = net(), net()
    optimizer, plain = sgd(model), sgd(twin)
    handle = straight_through(model, optimizer, "binary", "layer")
    masters = {name: each.detach().clone() for name, each in twin.named_parameters()}
    for step in range(5):
        train(model, optimizer, range(step, step + 1))
        for name, each in twin.named_parameters():
            alpha = masters[name].abs().mean()
            rounded = alpha * torch.where(masters[name] >= 0, 1.0, -1.0)
            each.data.copy_(rounded if each.dim() == 2 else masters[name])
        backward(twin, step)
        for name, each in twin.named_parameters():
            each.data.copy_(masters[name])
        plain.step()
        masters = {name: each.detach().clone() for name, each in twin.named_parameters()}
        for name, master in handle.masters().items():
            torch.testing.assert_close(master, masters[name])
    assert handle.residual() > 0.1


def test_straight_through_leaves_its_masters_behind() -> None:
    model, optimizer, handle = begun("binary", "layer", attach=straight_through)
    train(model, optimizer, range(3))
    masters = {name: each.clone() for name, each in handle.masters().items()}
    handle.remove()
    found = dict(model.named_parameters())
    assert all(torch.equal(found[name], each) for name, each in masters.items())
    assert found["head.weight"].abs().unique().numel() > 1


def test_straight_through_resumes_with_the_same_bits() -> None:
    (model, *_), (again, *_) = resumed(lambda: begun(attach=straight_through), drawn, 4, 9)
    assert torch.equal(flat(model), flat(again))


def test_straight_through_refuses_another_state_with_nothing_changed() -> None:
    model = net()
    handle = straight_through(model, sgd(model))
    good, before = handle.state_dict()["masters"], flat(model)
    name, master = next(iter(good.items()))
    for state, says in [
        (None, "saved for other matrices"),
        ({}, "saved for other matrices"),
        ({"masters": {}}, "saved for other matrices"),
        ({"masters": good | {name: master[:1]}}, f"{name} must be torch.float32"),
        ({"masters": good | {name: master.double()}}, f"{name} must be torch.float32"),
        ({"masters": good | {name: 3}}, f"{name} must be torch.float32"),
        ({"masters": good | {name: master * math.nan}}, f"damaged: {name} is not finite"),
    ]:
        refuses(StateError, says, handle.load_state_dict, state)
        assert torch.equal(flat(model), before)
        assert all(torch.equal(each, good[key]) for key, each in handle.masters().items())


def test_straight_through_leaves_nothing_attached_to_weights_that_are_not_finite() -> None:
    model = net()
    optimizer = sgd(model)
    with torch.no_grad():
        model.head.weight[0, 0] = math.nan
    before = flat(model)
    refuses(NonFiniteError, r"head\.weight is not finite", straight_through, model, optimizer)
    assert detached(optimizer)
    assert torch.equal(flat(model).nan_to_num(), before.nan_to_num())
    with torch.no_grad():
        model.head.weight[0, 0] = 0.5
    straight_through(model, optimizer)


def tied() -> nn.Module:
    model = net()
    model.cell = nn.LSTM(6, 6, batch_first=True)
    model.head = nn.Linear(6, LETTERS)
    model.head.weight = model.embed.weight
    return model


def frozen() -> nn.Module:
    model = net()
    model.head.weight.requires_grad_(False)
    return model


def pruned() -> nn.Module:
    model = net()
    prune.l1_unstructured(model.head, "weight", 0.5)
    return model


def padded() -> nn.Module:
    return nn.Sequential(nn.Embedding(4, 4, padding_idx=0))


LAYER = {"table": "binary", "tie": "layer"}
REFUSED: list[tuple[Callable[[], nn.Module], dict, type[Exception], str]] = [
    (net, {"table": "quaternary"}, SpecError, "table must be 'binary', .* got 'quaternary'"),
    (net, {"tie": "column"}, SpecError, "tie must be 'model', 'layer' or 'row', got 'column'"),
    (net, {"gamma": 0}, SpecError, "gamma must be a finite number above 0, got 0"),
    (net, {"growth": 0.9}, SpecError, "growth must be a finite number of 1 or more, got 0.9"),
    (net, {"most": 1e-6}, SpecError, "most must be a finite number of 0.001 or more"),
    (net, {"every": 0}, SpecError, "every must be a whole number of 1 or more"),
    (net, {"keep": ("cel",)}, AttachError, "no module 'cel': did you mean 'cell'"),
    (net, {"keep": ("embed", "cell", "head")}, AttachError, "no layer to quantise"),
    (lambda: nn.Sequential(nn.Conv2d(3, 3, 3)), {}, AttachError, "has no Embedding, LSTM, GRU, Linear"),
    (tied, {}, AttachError, r"'embed.weight' and 'head.weight' are one tensor.*keep=\('embed', 'head'\)"),
    (frozen, {}, AttachError, r"'head.weight' is not trained.*keep=\('head',\)"),
    (lambda: net(proj_size=4), {}, AttachError, r"an LSTM with proj_size.*keep=\('cell',\)"),
    (lambda: net().double(), {}, AttachError, "torch.float64, but only float32 weights can"),
    (lambda: nn.Sequential(nn.Embedding(4, 4, sparse=True)), {}, AttachError, "sparse gradients or max_norm"),
    (pruned, {}, AttachError, r"'head.weight' is computed by a hook: remove .*keep=\('head',\)"),
    (
        lambda: nn.Sequential(spectral_norm(nn.Linear(4, 4))),
        {},
        AttachError,
        "'0.weight' is computed by a ho",
    ),
    (padded, LAYER, AttachError, r"padding_idx, whose row is zero.*tie='row'.*keep=\('0',\)"),
]


@for_each("make, options, error, words", REFUSED)
def test_what_cannot_work_is_refused_and_nothing_changes(make, options, error, words) -> None:
    model = make()
    optimizer, before = sgd(model), copy.deepcopy(model.state_dict())
    refuses(error, words, admm, model, optimizer, **options)
    assert detached(optimizer)
    after = model.state_dict()
    assert all(torch.equal(after[key], value) for key, value in before.items())


@for_each("table, tie", [("binary", "row"), ("ternary", "layer"), ("quinary", "model")])
def test_a_row_of_padding_stays_zero(table, tie) -> None:
    model = net()
    model.embed = nn.Embedding(LETTERS, 6, padding_idx=0)
    optimizer = sgd(model)
    handle = admm(model, optimizer, table=table, tie=tie, every=2)
    train(model, optimizer, range(6))
    handle.finish()
    assert not model.embed.weight[0].any() and model.embed.weight[1].any()


@for_each("fused", [False, True])
@for_each("extragradient", [False, True])
def test_a_step_that_a_scaler_skips_does_not_count(fused: bool, extragradient: bool) -> None:
    model = net()
    optimizer = torch.optim.Adam(model.parameters(), fused=fused)
    handle = admm(model, optimizer, every=1, extragradient=extragradient)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    for step in range(6):
        x, y = batch(step)
        model.zero_grad()
        loss = F.cross_entropy(model(x).flatten(0, 1), y.flatten())
        scaler.scale(loss * (math.inf if step in (1, 4) else 1)).backward()
        scaler.step(optimizer)
        scaler.update()
    assert handle.steps == handle.updates == (2 if extragradient else 4)
    assert bool(flat(model).isfinite().all())


def test_a_foreign_optimiser_or_one_that_climbs_is_refused() -> None:
    model = net()
    climbing = sgd(model, maximize=True)
    refuses(AttachError, r"maximize=True.*negate the loss", admm, model, climbing)
    assert detached(climbing)
    refuses(AttachError, "trains no weight that would be quantised", lambda: admm(net(), sgd(net())))
    refuses(AttachError, "LBFGS", lambda: admm(model, torch.optim.LBFGS(model.parameters())))


@for_each("second", [admm, straight_through])
def test_a_model_is_drawn_to_one_table_at_a_time(second) -> None:
    model, optimizer, handle = begun()
    refuses(AttachError, "quantised to a table already", second, model, optimizer)
    with pytest.raises(AttachError, match="quantised to a table already"):
        second(nn.Sequential(model.cell, nn.Linear(2, 2)), optimizer)
    handle.remove()
    handle.remove()
    second(model, optimizer).remove()
    assert not optimizer._optimizer_step_pre_hooks
    refuses(StateError, "without finish", handle.pack)


def test_what_is_kept_stays_as_trained() -> None:
    model, optimizer, handle = begun(keep=("head",))
    train(model, optimizer, range(3))
    head = model.head.weight.detach().clone()
    handle.finish()
    assert torch.equal(model.head.weight, head)
    assert set(handle.weights) == {"embed.weight", "cell.weight_ih_l0", "cell.weight_hh_l0"}


def test_weights_that_have_diverged_are_named() -> None:
    model = net()
    optimizer = sgd(model)
    admm(model, optimizer, every=1)
    backward(model, 0)
    model.head.weight.grad.fill_(math.inf)
    refuses(NonFiniteError, r"head\.weight is not finite", optimizer.step)


def test_a_spec_is_the_same_training() -> None:
    model, twin = net(), net()
    ours, other = sgd(model), sgd(twin)
    spec = parse("admm(table='binary', tie='layer', every=3, keep=['head'])")
    assert parse(repr(spec)) == spec
    spec.attach(model, ours)
    admm(twin, other, "binary", "layer", every=3, keep=["head"])
    for a, b in ((model, ours), (twin, other)):
        train(a, b, range(7))
    assert torch.equal(flat(model), flat(twin))
    refuses(SpecError, "table must be", parse, "admm(table='ternry')")

"""Master weights: what 16 bits lose is kept, by any optimiser, and a resumed run does the same bits."""

from __future__ import annotations

import copy
import gc
import weakref

import pytest
import torch
from tests.dist.nets import batch
from tests.unit.shared import for_each, refuses, resumed, same
from torch import nn
from torch.nn.utils import clip_grad_norm_

from laconic.core.errors import AttachError, StateError
from laconic.optim import master_weights
from laconic.optim.master_weights import masters_of

HALF = (torch.bfloat16, torch.float16)
ROUNDINGS = ("nearest", "stochastic")
OPTIMISERS = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9, nesterov=True, weight_decay=1e-3),
    "plain sgd": lambda p: torch.optim.SGD(p, lr=0.05),
    "adam": lambda p: torch.optim.Adam(p, lr=1e-3, amsgrad=True),
    "adamw one by one": lambda p: torch.optim.AdamW(p, lr=1e-3, foreach=False),
    "adamw fused": lambda p: torch.optim.AdamW(p, lr=1e-3, fused=True),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=1e-2),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=1e-3, momentum=0.5),
    "rprop": lambda p: torch.optim.Rprop(p, lr=1e-3),
    "radam": lambda p: torch.optim.RAdam(p, lr=1e-3),
    "adafactor": lambda p: torch.optim.Adafactor(p, lr=1e-3),
}


def net(dtype=torch.bfloat16, seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(20, 16), nn.Tanh(), nn.Linear(16, 5)).to(dtype)


def give_gradients(model, step, scale=1.0):
    """This step's gradients of the model as it is, times `scale`."""
    x, y = batch(0, step)
    model.zero_grad()
    logits = model(x.to(next(model.parameters()).dtype)).float()
    (nn.functional.cross_entropy(logits, y) * scale).backward()


def twin(model):
    """Float32 copies of a model's parameters."""
    return [nn.Parameter(part.detach().float()) for part in model.parameters()]


def share_gradients(expected, model, scale=1.0):
    """Give the twin what the model has got, in float32."""
    for one, other in zip(expected, model.parameters(), strict=True):
        one.grad = other.grad.float() / scale


def step_with_ones(optimizer, *weights):
    for weight in weights:
        weight.grad = torch.ones_like(weight)
    optimizer.step()


def masters(optimizer, model):
    return [masters_of(optimizer).of(weight) for weight in model.parameters()]


def trained(model, optimizer, steps):
    for step in steps:
        give_gradients(model, step)
        optimizer.step()


@for_each("kind", OPTIMISERS)
@for_each("dtype", HALF)
def test_masters_are_what_the_optimiser_makes_of_float32_weights(dtype, kind):
    """Brute force: a second optimiser on float32 tensors that get the same gradients. Equal bit for bit."""
    model = net(dtype)
    expected = twin(model)
    ours, plain = (OPTIMISERS[kind](p) for p in (model.parameters(), expected))
    master_weights(ours)
    for step in range(5):
        give_gradients(model, step)
        share_gradients(expected, model)
        ours.step()
        plain.step()
        assert same(masters(ours, model), expected)
        assert same(model.parameters(), [one.to(dtype) for one in expected])
    saved, known = ours.state_dict()["state"], plain.state_dict()["state"]
    for number, its in known.items():
        assert all(torch.equal(saved[number][key], value) for key, value in its.items())


@for_each("rounding", ROUNDINGS)
@for_each("dtype", HALF)
def test_updates_of_1e_4_are_kept_that_16_bits_lose(dtype, rounding):
    """1,000 weights at 1, 400 updates of 1e-4 each, relative: the mean falls to 0.96.

    Alone, bfloat16 loses all of it: half a step at 1 is 2e-3, and 2.4e-4 in float16. Stochastic rounding: one
    standard deviation of a weight is below sqrt(400 * 1e-4 * 2^-8) = 0.0125, of the mean 4e-4.
    A step of the grid below 1 is 2^-8, and nearest errs by half of it.
    """
    means = {}
    for mastered in (False, True):
        weight = nn.Parameter(torch.ones(1000, dtype=dtype))
        optimizer = torch.optim.SGD([weight], lr=1e-4)
        if mastered:
            master_weights(optimizer, rounding=rounding, seed=3)
        for _ in range(400):
            step_with_ones(optimizer, weight)
        means[mastered] = float(weight.detach().float().mean())
    assert means[False] == 1.0
    assert abs(means[True] - 0.96) < 2e-3


def test_stochastic_rounding_keeps_no_copy_and_draws_the_same_bits_on_every_rank():
    ends = []
    for _ in range(2):
        model = net()
        optimizer = master_weights(OPTIMISERS["sgd"](model.parameters()), rounding="stochastic", seed=1)
        trained(model, optimizer, range(5))
        ends.append([part.detach().clone() for part in model.parameters()])
        state = optimizer.state_dict()["state"]
        assert {key for its in state.values() for key in its} == {"momentum_buffer", "roundings"}
        assert all(its["momentum_buffer"].dtype == torch.float32 for its in state.values())
    assert same(*ends)


@for_each("rounding", ROUNDINGS)
@for_each("kind", ["sgd", "plain sgd", "adam", "adamw fused", "adafactor"])
def test_a_resumed_run_does_the_same_bits(kind, rounding):
    """Through a file that is loaded under weights_only."""
    seeds = iter((0, 0, 9))

    def start():
        model = net(seed=next(seeds))
        return model, master_weights(OPTIMISERS[kind](model.parameters()), rounding=rounding)

    (model, optimizer), (again, other) = resumed(start, lambda parts, steps: trained(*parts, steps), 4, 8)
    assert same(model.parameters(), again.parameters())
    saved, found = optimizer.state_dict()["state"], other.state_dict()["state"]
    for number, its in saved.items():
        assert its.keys() == found[number].keys()
        for key, value in its.items():
            assert not isinstance(value, torch.Tensor) or torch.equal(value, found[number][key]), (
                number,
                key,
            )


@for_each("loaded", ["frozen", "trained"])
@for_each("kind", ["sgd", "adam"])
def test_a_layer_that_is_frozen_for_a_while_goes_on_with_the_same_bits(kind, loaded):
    """Saved while it is frozen, loaded into a model that is or is not, and unfrozen then."""

    def go(model, optimizer, steps):
        for step in steps:
            give_gradients(model, step)
            for part in model.parameters():
                part.grad = part.grad if part.requires_grad else None
            optimizer.step()

    model, again = net(), net(seed=9)
    optimizer = master_weights(OPTIMISERS[kind](model.parameters()))
    go(model, optimizer, range(4))
    model[0].weight.requires_grad_(False)
    go(model, optimizer, range(4, 6))
    saved = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    again[0].weight.requires_grad_(loaded == "trained")
    other = master_weights(OPTIMISERS[kind](again.parameters()))
    for part, state in zip((again, other), saved, strict=True):
        part.load_state_dict(state)
    for one, its in ((model, optimizer), (again, other)):
        one[0].weight.requires_grad_(True)
        go(one, its, range(6, 10))
    assert same(model.parameters(), again.parameters())
    state = other.state_dict()["state"][0]
    assert all(part.dtype is torch.float32 for part in state.values() if isinstance(part, torch.Tensor))


def test_a_gradient_that_a_frozen_layer_still_has_is_stepped_in_float32():
    """Torch's optimisers step whatever has a gradient."""
    model, plain = net(), net().float()
    ours = master_weights(OPTIMISERS["adam"](model.parameters()))
    theirs = OPTIMISERS["adam"](plain.parameters())
    give_gradients(model, 0)
    share_gradients(plain.parameters(), model)
    model.requires_grad_(False)
    plain.requires_grad_(False)
    ours.step()
    theirs.step()
    assert same(model.parameters(), [one.to(torch.bfloat16) for one in plain.parameters()])


def test_groups_schedules_clipping_and_new_groups_work():
    """A schedule from before the masters, one from after, and a group that comes later, beside float32."""
    model, plain = net(), nn.Linear(4, 2)
    expected = twin(model)
    first, rest = [*model.parameters()][:2], [*model.parameters()][2:]
    ours = torch.optim.SGD([{"params": first}, {"params": plain.parameters(), "lr": 1.0}], lr=0.1)
    theirs = torch.optim.SGD([{"params": expected[:2]}], lr=0.1)
    early = torch.optim.lr_scheduler.StepLR(ours, 1, gamma=0.5)
    master_weights(ours)
    late = torch.optim.lr_scheduler.StepLR(ours, 1, gamma=0.5)
    for step in range(4):
        if step == 2:
            ours.add_param_group({"params": rest, "lr": 0.02})
            theirs.add_param_group({"params": expected[2:], "lr": 0.02})
        theirs.param_groups[0]["lr"] = ours.param_groups[0]["lr"]
        give_gradients(model, step)
        plain(torch.ones(4)).sum().backward()
        clip_grad_norm_(model.parameters(), 0.1)
        share_gradients(expected, model)
        ours.step()
        theirs.step()
        if step < 2:
            early.step()
            late.step()
    assert ours.param_groups[0]["lr"] == pytest.approx(0.1 / 16)
    assert same(masters(ours, model), expected)
    assert ours.param_groups[0]["params"][0] is first[0]
    ours.zero_grad()
    assert all(part.grad is None for part in model.parameters())


def test_what_others_write_to_a_parameter_counts():
    """A mask's zeros and a loaded model stay; the entries that nobody touched keep their masters."""
    weight = nn.Parameter(torch.ones(4, dtype=torch.bfloat16))
    optimizer = master_weights(torch.optim.SGD([weight], lr=1e-4))
    for step in range(20):
        if step == 10:
            with torch.no_grad():
                weight[0] = 0.0
        step_with_ones(optimizer, weight)
    master = masters_of(optimizer).of(weight)
    torch.testing.assert_close(master[0].item(), -1e-3, rtol=1e-5, atol=0)
    torch.testing.assert_close(master[1:], torch.full((3,), 1 - 2e-3), rtol=1e-6, atol=0)


def test_closures_and_lbfgs_see_the_weights_of_the_moment():
    """LBFGS needs ten evaluations a step: on its float32 masters it nears the minimum as float32 does."""
    ends = {}
    for dtype in (torch.float32, torch.float16):
        weight = nn.Parameter(torch.tensor([3.0, -2.0], dtype=dtype))
        optimizer = torch.optim.LBFGS([weight], lr=0.5)
        if dtype in HALF:
            master_weights(optimizer)

        def closure(weight=weight, optimizer=optimizer):
            optimizer.zero_grad()
            loss = ((weight.float() - torch.tensor([0.5, 1.5])) ** 2).sum()
            loss.backward()
            return loss

        for _ in range(5):
            loss = optimizer.step(closure)
        assert float(loss.detach()) < 1e-3
        ends[dtype] = weight.detach().float()
    torch.testing.assert_close(ends[torch.float16], ends[torch.float32], rtol=2e-3, atol=2e-3)


@for_each("dtype", HALF)
def test_a_grad_scaler_is_undone_in_float32_and_inf_is_skipped(dtype):
    """Gradients of 2^-20, scaled by 2^16, are numbers in float16; unscaled there, most digits would go."""
    model = net(dtype)
    expected = twin(model)
    ours, plain = torch.optim.SGD(model.parameters(), lr=0.1), torch.optim.SGD(expected, lr=0.1)
    master_weights(ours)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**16)
    for step in range(4):
        give_gradients(model, step, scale=2.0**-20 * scaler.get_scale())
        if step == 2:
            model[0].weight.grad[0, 0] = torch.inf
        share_gradients(expected, model, scaler.get_scale())
        before, scale = [part.detach().clone() for part in model.parameters()], scaler.get_scale()
        scaler.scale(torch.zeros(()))  # which makes the scaler's tensors
        scaler.step(ours)
        scaler.update()
        if step == 2:
            assert same(before, model.parameters())
            assert scaler.get_scale() == scale / 2
        else:
            plain.step()
        assert same(masters(ours, model), expected)


def test_what_cannot_have_masters_is_refused_whole():
    plain = torch.optim.SGD(nn.Linear(2, 2).parameters(), lr=0.1)
    words = r"bfloat16 or float16, but this optimiser.s are torch\.float32"
    refuses(AttachError, words, master_weights, plain)
    assert masters_of(plain) is None and "step" not in vars(plain)
    frozen = torch.optim.SGD(net().requires_grad_(False).parameters(), lr=0.1)
    refuses(AttachError, "trained parameters", master_weights, frozen)
    half = torch.optim.SGD(net().parameters(), lr=0.1)
    refuses(AttachError, "rounding must be one of", master_weights, half, rounding="up")
    assert masters_of(half) is None
    master_weights(half)
    step = half.step
    refuses(AttachError, "already", master_weights, half, rounding="stochastic")
    assert half.step is step


def test_a_state_of_another_model_changes_nothing():
    model = net()
    optimizer = master_weights(OPTIMISERS["sgd"](model.parameters()))
    trained(model, optimizer, range(1))
    before = copy.deepcopy(optimizer.state_dict())
    wrong = copy.deepcopy(before)
    wrong["state"][0]["master_weight"] = torch.zeros(3)
    refuses(StateError, r"shape \(3,\)", optimizer.load_state_dict, wrong)
    groups = before | {"param_groups": []}
    refuses(ValueError, "different number of parameter groups", optimizer.load_state_dict, groups)
    after = optimizer.state_dict()
    for number, its in before["state"].items():
        assert all(torch.equal(value, after["state"][number][key]) for key, value in its.items())
    assert optimizer.param_groups[0]["params"][0] is model[0].weight


def test_a_plain_state_loads_and_masters_start_from_the_parameters():
    model = net()
    plain = OPTIMISERS["sgd"](model.parameters())
    trained(model, plain, range(1))
    state = plain.state_dict()
    ours = master_weights(OPTIMISERS["sgd"](model.parameters()))
    ours.load_state_dict(state)
    found = ours.state_dict()["state"][0]
    assert torch.equal(found["master_weight"], model[0].weight.float())
    assert torch.equal(found["momentum_buffer"], state["state"][0]["momentum_buffer"].float())
    held = weakref.ref(masters_of(ours))
    del ours
    gc.collect()
    assert held() is None, "masters go with their optimiser"


class Around(torch.optim.Optimizer):
    """An optimiser that leaves the step to another one, which no attribute shows if `hidden`."""

    def __init__(self, inner, hidden=False):
        super().__init__([each for group in inner.param_groups for each in group["params"]], {})
        self.inner = (lambda: inner) if hidden else inner

    def step(self, closure=None):
        return (self.inner if isinstance(self.inner, torch.optim.Optimizer) else self.inner()).step(closure)


def test_an_optimiser_around_another_is_refused_at_its_first_step_at_the_latest():
    """Else its step would be undone when masters are published."""
    model = net()
    with pytest.raises(AttachError, match="Around wraps a SGD"):
        master_weights(Around(torch.optim.SGD(model.parameters(), lr=0.1)))
    outer = master_weights(Around(torch.optim.SGD(model.parameters(), lr=0.1), hidden=True))
    before = [each.detach().clone() for each in model.parameters()]
    give_gradients(model, 0)
    refuses(AttachError, "Around steps the model's parameters directly", outer.step)
    assert same(before, model.parameters())
    assert outer.param_groups[0]["params"][0] is model[0].weight
    within = Around(master_weights(torch.optim.SGD(model.parameters(), lr=0.1)))
    within.step()
    assert not torch.equal(before[0], model[0].weight)


def test_a_scaler_reaches_the_float32_parameters_of_the_same_optimiser():
    """A norm in float32 within a model in float16, beside the same model without scaling."""
    ends = []
    for scaled in (False, True):
        half, whole = nn.Parameter(torch.ones(3, dtype=torch.float16)), nn.Parameter(torch.ones(3))
        optimizer = master_weights(torch.optim.SGD([half, whole], lr=0.25))
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, enabled=scaled)
        for _ in range(2):
            optimizer.zero_grad()
            scaler.scale((half.float() * whole).sum() / 8).backward()
            scaler.step(optimizer)
            scaler.update()
        ends.append((half.detach().clone(), whole.detach().clone()))
    assert all(torch.equal(one, other) for one, other in zip(*ends, strict=True))
    assert ends[0][1].tolist() != [1.0] * 3


@for_each("rounding", ROUNDINGS)
def test_a_deep_copy_has_masters_of_its_own_and_goes_on_with_the_same_bits(rounding: str) -> None:
    torch.manual_seed(0)
    model = nn.Linear(40, 40).bfloat16()
    optimizer = master_weights(torch.optim.SGD(model.parameters(), lr=1e-4, momentum=0.9), rounding=rounding)

    def steps(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        for _ in range(30):
            step_with_ones(optimizer, *model.parameters())

    steps(model, optimizer)
    twin, other = copy.deepcopy((model, optimizer))
    third = copy.deepcopy(other)
    before = copy.deepcopy(third.state_dict())
    steps(model, optimizer)
    steps(twin, other)
    assert torch.equal(model.weight, twin.weight) and twin.weight is not model.weight
    mine, its = (part.state_dict()["state"][0] for part in (optimizer, other))
    assert mine.keys() == its.keys() and all(torch.equal(mine[key], its[key]) for key in mine)
    assert set(mine) & {"master_weight", "roundings"}
    for key, value in third.state_dict()["state"][0].items():
        assert torch.equal(value, before["state"][0][key]), "a copy of a copy is on its own"


@for_each("rounding", ROUNDINGS)
def test_hooks_of_others_see_the_models_parameters(rounding) -> None:
    w = nn.Parameter(torch.ones(4, dtype=torch.bfloat16))
    optimizer = master_weights(torch.optim.SGD([w], lr=1.0, momentum=0.9), rounding=rounding)
    seen, once = [], []

    def clip(*_):
        once.append(handle.remove())
        nn.utils.clip_grad_norm_([w], 0.5)

    def clamp(*_):
        seen.append(w.tolist())
        w.data.clamp_(max=0.5)

    handle = optimizer.register_step_pre_hook(clip)
    optimizer.register_step_post_hook(clamp)
    step_with_ones(optimizer, w)
    assert seen == [[0.75] * 4] and w.tolist() == [0.5] * 4 and len(once) == 1
    step_with_ones(optimizer, w)  # not clipped: momentum 0.9 * 0.25 + 1, from the clamped weights
    assert seen[1] == pytest.approx([0.5 - 1.225] * 4, abs=0.004)
    assert len(optimizer._optimizer_step_post_hooks) == 1 and not optimizer._optimizer_step_pre_hooks

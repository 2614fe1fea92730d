"""Sparse training in one process: against a numpy twin, with any optimiser, and what is refused."""

from __future__ import annotations

import copy
import math

import numpy as np
import pytest
import torch
from tests.unit.shared import for_each, refuses, resumed, same
from torch import nn

import laconic
from laconic.core.errors import AttachError, SpecError, StateError
from laconic.core.mask import mask_of
from laconic.sparsity import rigl, sparsify, swat
from laconic.sparsity.slots import slots

OPTIMISERS = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=1e-3),
    "nesterov": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True),
    "adam": lambda p: torch.optim.Adam(p, lr=1e-2),
    "amsgrad": lambda p: torch.optim.Adam(p, lr=1e-2, amsgrad=True),
    "adamw": lambda p: torch.optim.AdamW(p, lr=1e-2, weight_decay=0.1),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=1e-3, momentum=0.5, centered=True),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=1e-2),
    "ours": lambda p: laconic.optim.AMSGrad(p, lr=1e-2),
}


def mlp(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(12, 30), nn.ReLU(), nn.Linear(30, 30), nn.ReLU(), nn.Linear(30, 4))


def batch(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    rng = torch.Generator().manual_seed(step)
    x = torch.randn(32, 12, generator=rng)
    return x, x[:, :4].argmax(1)


def backward(net: nn.Module, step: int) -> None:
    x, y = batch(step)
    nn.functional.cross_entropy(net(x), y).backward()


def run(net: nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> None:
    for step in steps:
        optimizer.zero_grad()
        backward(net, step)
        optimizer.step()


def sgd(net: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(net.parameters(), lr=0.1)


def frozen() -> nn.Module:
    return mlp().requires_grad_(False)


def in_use(weight: torch.Tensor) -> float:
    """Share of a weight's entries that are not zero."""
    return float((weight != 0).float().mean())


def test_a_training_is_that_of_a_numpy_twin() -> None:
    """One linear layer, squared error, SGD with momentum: masks, weights and velocity written out by hand."""
    steps, every, lr, mu, until, drop = 40, 4, 0.05, 0.9, 0.75, 0.5
    net = nn.Linear(8, 6, bias=False).double()
    optimizer = torch.optim.SGD(net.parameters(), lr=lr, momentum=mu)
    sparse = rigl(net, optimizer, 0.25, steps=steps, every=every, drop=drop, until=until)
    rng = np.random.default_rng(0)
    w, mask = net.weight.detach().numpy().copy(), sparse.masks["weight"].numpy().copy()
    assert mask.sum() == 12 and not w[~mask].any()
    v, target = np.zeros_like(w), rng.standard_normal((6, 8))
    for step in range(steps):
        x = rng.standard_normal((16, 8))
        optimizer.zero_grad()
        (net(torch.tensor(x)) - torch.tensor(x @ target.T)).square().sum().backward()
        optimizer.step()
        dense = 2 * (x @ w.T - x @ target.T).T @ x
        if step % every == 0 and step <= until * steps:
            count = int(drop / 2 * (1 + math.cos(math.pi * step / (until * steps))) * mask.sum())
            new = np.zeros(w.size, bool)
            new[np.argsort(np.where(mask, np.abs(w), -1).ravel())[::-1][: mask.sum() - count]] = True
            new[np.argsort(np.where(new, -1, np.abs(dense).ravel()))[::-1][:count]] = True
            new = new.reshape(w.shape)
            w, v, mask = w * (new & mask), v * (new & mask), new
        else:
            v = mu * v + dense * mask
            w = w - lr * v
        np.testing.assert_array_equal(sparse.masks["weight"].numpy(), mask)
        np.testing.assert_allclose(net.weight.detach().numpy(), w, rtol=1e-10, atol=1e-12)
    assert sparse.updates == 8  # at 0, 4, .. 28; until 0.75 * 40 = 30


@for_each("name", OPTIMISERS)
@for_each("spec", ["rigl(density=0.2, every=5)", "sparse_evolution(density=0.2, every=5)"])
def test_what_is_not_in_use_is_zero_with_all_slots(name, spec) -> None:
    net = mlp()
    optimizer = OPTIMISERS[name](net.parameters())
    sparse = sparsify(net, optimizer, spec, steps=30)
    before = {key: mask.clone() for key, mask in sparse.masks.items()}
    for step in range(30):
        weights = {key: net.get_parameter(key) for key in sparse.masks}
        run(net, optimizer, range(step, step + 1))
        for key, mask in sparse.masks.items():
            found = slots(optimizer, weights[key])
            assert len(found) >= (0 if step == 0 else 1)
            for each in (weights[key].detach(), *found):
                assert not each[~mask].any()
            born = mask & ~before[key]
            if spec.startswith("rigl") and bool(born.any()):
                assert not any(each[born].any() for each in (weights[key].detach(), *found))
            assert int(mask.sum()) == int(before[key].sum())
        before = {key: mask.clone() for key, mask in sparse.masks.items()}
    assert sparse.updates >= 4 and sparse.stats().density == pytest.approx(0.2, abs=2e-3)


def test_an_update_takes_the_place_of_the_step_of_all_parameters() -> None:
    net = mlp()
    optimizer = torch.optim.Adam(net.parameters(), lr=1e-2)
    sparse = rigl(net, optimizer, 0.3, steps=100, every=3)
    before = [each.detach().clone() for each in net.parameters()]
    run(net, optimizer, range(1))
    for old, new in zip(before, net.parameters(), strict=True):
        assert torch.equal(old * (new != 0), new)  # dropped ones apart
    assert torch.equal(before[1], net[0].bias) and net[0].bias.grad is not None
    run(net, optimizer, range(1, 3))
    assert not torch.equal(before[1], net[0].bias)
    assert int(optimizer.state[net[0].bias]["step"]) == 2 and sparse.turn == 3


def test_scores_add_up_over_passes_and_turns() -> None:
    """Two passes a step, the last three turns: the score is a sum of three directions, of two passes each."""
    net = nn.Linear(10, 10, bias=False)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.0)
    sparse = rigl(net, optimizer, 0.2, steps=100, every=4, accumulate=3, drop=1.0)
    expected = torch.zeros(10, 10)
    for step in range(5):
        optimizer.zero_grad()
        turn = torch.zeros(10, 10)
        for part in range(2):
            x = torch.randn(4, 10, generator=torch.Generator().manual_seed(10 * step + part))
            y = net(x)
            y.square().sum().backward()
            turn += 2 * y.detach().T @ x
        if step >= 2:
            expected += turn / turn.norm()
        if step == 4:
            found = sparse._dense_gradients.total(None, True)["weight"].view(10, 10)
            torch.testing.assert_close(found, expected)
        if step == 2:
            optimizer.zero_grad()  # a step that is not taken, and taken again, counts once
            for part in range(2):
                x = torch.randn(4, 10, generator=torch.Generator().manual_seed(10 * step + part))
                net(x).square().sum().backward()
        optimizer.step()
    assert sparse.updates == 2


def test_turns_count_alike_whatever_a_scaler_multiplies_them_by() -> None:
    found = []
    for growth in (1000, 1):  # steps from one doubling of the scale to the next
        net = mlp()
        optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
        sparse = rigl(net, optimizer, 0.2, steps=60, every=6, accumulate=4)
        scaler = torch.amp.GradScaler("cpu", init_scale=4.0, growth_interval=growth)
        for step in range(20):
            optimizer.zero_grad()
            x, y = batch(step)
            scaler.scale(nn.functional.cross_entropy(net(x), y)).backward()
            scaler.step(optimizer)
            scaler.update()
        assert sparse.updates == 4 and (scaler.get_scale() > 1e5) == (growth == 1)
        found.append((net, sparse))
    (one, first), (two, second) = found
    for name, mask in first.masks.items():
        assert torch.equal(mask, second.masks[name]), name
    for a, b in zip(one.parameters(), two.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)  # scales are powers of two


@for_each("spec", ["rigl(every=4, accumulate=2)", "sparse_evolution(every=3)", "gradual_pruning(every=3)"])
def test_a_resumed_run_ends_with_the_same_bits(spec) -> None:
    seeds = iter((0, 0, 9))

    def start():
        net = mlp(seed=next(seeds))
        optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
        return net, optimizer, sparsify(net, optimizer, spec, steps=20, seed=5)

    (net, _, sparse), (other, _, again) = resumed(start, lambda parts, steps: run(*parts[:2], steps), 9, 20)
    assert same(net.parameters(), other.parameters())
    assert again.stats() == sparse.stats()


def test_first_masks_depend_on_seed_and_name_alone() -> None:
    def masks(model: int, seed: int):
        net = mlp(model)
        return rigl(net, sgd(net), 0.2, steps=9, seed=seed).masks

    one, other = masks(0, 4), masks(1, 4)
    assert all(torch.equal(mask, other[name]) for name, mask in one.items())
    assert not torch.equal(masks(0, 5)["0.weight"], one["0.weight"])


def test_density_1_is_dense_training() -> None:
    one, other = mlp(), mlp()
    plain, masked = sgd(one), sgd(other)
    sparse = rigl(other, masked, 1.0, steps=10, every=2)
    run(one, plain, range(6))
    run(other, masked, range(6))
    assert same(one.parameters(), other.parameters())
    assert sparse.stats().density == 1.0 and not sparse.masks


def test_a_closure_is_called_once() -> None:
    net, calls = mlp(), []
    optimizer = sgd(net)
    sparse = rigl(net, optimizer, 0.2, steps=10, every=2)

    def closure() -> torch.Tensor:
        calls.append(1)
        optimizer.zero_grad()
        x, y = batch(0)
        loss = nn.functional.cross_entropy(net(x), y)
        loss.backward()
        return loss

    assert all(optimizer.step(closure).item() > 0 for _ in range(4))
    assert len(calls) == 4 and sparse.updates == 2


def test_dense_gradients_that_are_not_finite_leave_the_masks_alone() -> None:
    net = mlp()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.0)
    sparse = rigl(net, optimizer, 0.2, steps=100, every=1)
    before = {name: mask.clone() for name, mask in sparse.masks.items()}
    (net(batch(0)[0]).sum() * float("inf")).backward()
    with pytest.warns(UserWarning, match="turn 0 are not finite"):
        optimizer.step()
    assert all(torch.equal(mask, before[name]) for name, mask in sparse.masks.items())
    assert sparse.updates == 0 and sparse.turn == 1


def test_channels_last_weights_are_masked_in_their_own_order() -> None:
    net = nn.Sequential(nn.Conv2d(4, 6, 3), nn.Conv2d(6, 6, 3)).to(memory_format=torch.channels_last)
    optimizer = torch.optim.SGD(net.parameters(), lr=1e-3, momentum=0.9)
    sparse = rigl(net, optimizer, 0.3, steps=20, every=3)
    for _ in range(8):
        optimizer.zero_grad()
        net(torch.randn(2, 4, 8, 8)).square().mean().backward()
        optimizer.step()
    weight = net[1].weight
    mask = mask_of(weight)
    assert mask is not None and torch.equal(mask.used, sparse.masks["1.weight"])
    in_memory = weight.detach().as_strided((weight.numel(),), (1,))
    assert int((in_memory[mask.positions] != 0).sum()) == int((weight != 0).sum())


def test_remove_and_copies_give_plain_models() -> None:
    net = mlp()
    optimizer = sgd(net)
    sparse = rigl(net, optimizer, 0.2, steps=10)
    twin, state = copy.deepcopy(net), sparse.state_dict()
    run(twin, sgd(twin), range(2))
    assert in_use(twin[2].weight) > 0.5
    sparse.remove()
    sparse.remove()
    refuses(StateError, r"remove\(\) was called", sparse.load_state_dict, state)
    assert all(mask_of(weight) is None for weight in net.parameters())
    run(net, optimizer, range(2))
    assert in_use(net[2].weight) > 0.5
    rigl(net, optimizer, 0.2, steps=10).load_state_dict(state)  # and again


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words, self.out = nn.Embedding(20, 8), nn.Linear(8, 20)
        self.out.weight = self.words.weight
        self.inner = nn.Linear(8, 8)


REFUSED = [
    (mlp, {"density": 0.0}, SpecError, "density must be a number in"),
    (mlp, {"density": 1.5}, SpecError, "density must be a number in"),
    (mlp, {"steps": 0}, SpecError, "steps must be a whole number"),
    (mlp, {"keep": ("3x",)}, AttachError, "no module '3x'"),
    (
        mlp,
        {"keep": ("0", "2", "4")},
        AttachError,
        r"no layer to sparsify: .* 3 .*, but none outside keep=\('0'",
    ),
    (
        lambda: nn.Sequential(nn.LayerNorm(3)),
        {},
        AttachError,
        "no layer to sparsify: this model has no Linear",
    ),
    (frozen, {}, AttachError, "no layer to sparsify: this model has no Linear, .* to train$"),
    (lambda: nn.Linear(3, 3), {"layout": "uniform"}, AttachError, "first of 1 .* no other is left"),
    (Tied, {}, AttachError, "'words' and 'out' share their weight"),
    (lambda: nn.Linear(3, 3, dtype=torch.complex64), {}, AttachError, "need real weights"),
]


@for_each("build, given, kind, said", REFUSED)
def test_what_cannot_be_sparse_is_refused_and_nothing_changes(build, given, kind, said) -> None:
    net = build()
    before = copy.deepcopy(net.state_dict())
    optimizer = torch.optim.SGD(mlp().parameters() if build is frozen else net.parameters(), lr=0.1)
    refuses(kind, said, rigl, net, optimizer, **{"density": 0.1, "steps": 10, **given})
    assert all(torch.equal(value, before[key]) for key, value in net.state_dict().items())
    assert all(mask_of(each) is None and not each._backward_hooks for each in net.parameters())
    assert not optimizer._optimizer_step_pre_hooks


def test_a_wrong_model_optimiser_or_name_is_refused() -> None:
    masked, swatted, net = mlp(), mlp(), mlp()
    rigl(masked, sgd(masked), 0.2, steps=10)
    swat(swatted)
    part = torch.optim.SGD([*net[0].parameters(), *net[4].parameters()], lr=0.1)
    for error, words, make, args in (
        (AttachError, "'0' is masked already", rigl, (masked, sgd(masked), 0.2)),
        (AttachError, "sparse already, by swat", rigl, (swatted, sgd(swatted), 0.2)),
        (AttachError, r"lacks 3 of 3 .* 0\.weight", rigl, (net, sgd(mlp()), 0.2)),
        (AttachError, r"lacks 1 of 3 .* 2\.weight", rigl, (net, part, 0.2)),
        (SpecError, "must be a sparsifier", sparsify, (net, sgd(net), "topk(density=0.1)")),
        (SpecError, "unknown name", sparsify, (net, sgd(net), "rigel()")),
    ):
        refuses(error, words, make, *args, steps=10)
    assert in_use(net[0].weight) == 1.0


def equal(one: dict, other: dict) -> bool:
    """Whether two states are equal, tensors too."""
    plain = [{k: v for k, v in state.items() if k not in ("masks", "scores")} for state in (one, other)]
    parts = [(state["masks"], state["scores"]) for state in (one, other)]
    return plain[0] == plain[1] and all(
        a.keys() == b.keys() and all(torch.equal(a[key], b[key]) for key in a)
        for a, b in zip(*parts, strict=True)
    )


DAMAGES = {
    "no dict": lambda state: None,
    "a mask in floats": lambda state: state | {"masks": first_mask(state, lambda bits: bits.float())},
    "a mask too short": lambda state: state | {"masks": first_mask(state, lambda bits: bits[:-1])},
    "no mask": lambda state: state | {"masks": first_mask(state, lambda bits: None)},
    "a dense mask": lambda state: state | {"masks": first_mask(state, lambda bits: bits | 255)},
    "an empty mask": lambda state: state | {"masks": first_mask(state, torch.zeros_like)},
    "masks in a list": lambda state: state | {"masks": [1]},
    "an unknown score": lambda state: state | {"scores": {"nope": torch.zeros(2)}},
    "a score of another shape": lambda state: state | {"scores": {"0.weight": torch.zeros(2)}},
    "a score of whole numbers": lambda state: state | {"scores": {"0.weight": torch.zeros(30, 12).int()}},
    "a turn in words": lambda state: state | {"turn": "3"},
    "no share": lambda state: state | {"changed": None},
    "another seed": lambda state: state | {"seed": 1},
    "another length": lambda state: state | {"steps": 9},
    "another sparsifier": lambda state: state | {"sparsifier": "rigl()"},
    "no masks": lambda state: state | {"masks": {}},
    "more": lambda state: state | {"more": 1},
}


def first_mask(state: dict, change) -> dict:
    name = next(iter(state["masks"]))
    return state["masks"] | {name: change(state["masks"][name])}


def test_a_wrong_state_is_refused_with_nothing_changed() -> None:
    net = mlp()
    optimizer = sgd(net)
    sparse = rigl(net, optimizer, 0.2, steps=30, every=3, accumulate=2)
    run(net, optimizer, range(3))
    saved = copy.deepcopy(sparse.state_dict())
    run(net, optimizer, range(3, 6))
    before, weights = copy.deepcopy(sparse.state_dict()), [each.detach().clone() for each in net.parameters()]
    for name, damage in DAMAGES.items():
        refuses(StateError, ".", sparse.load_state_dict, damage(copy.deepcopy(saved)))
        assert equal(sparse.state_dict(), before), name
        assert same(net.parameters(), weights), name
    run(net, optimizer, range(6, 10))


def test_masks_of_gradual_pruning_may_have_more_entries_than_at_the_end() -> None:
    net = mlp()
    sparse = sparsify(net, sgd(net), "gradual_pruning(density=0.2, every=3)", steps=30)
    sparse.load_state_dict(sparse.state_dict())
    with pytest.raises(StateError, match="must have 86 to 360 of 360 entries in use, got 0"):
        sparse.load_state_dict(DAMAGES["an empty mask"](sparse.state_dict()))


@pytest.mark.filterwarnings("ignore:Initializing zero-element tensors")
def test_only_weights_have_masks() -> None:
    net = mlp()
    sparse = rigl(net, sgd(net), 0.1, steps=9, layout="uniform")
    assert sparse.densities == pytest.approx({"2.weight": 0.1, "4.weight": 0.1}, abs=0.01)
    assert in_use(net[0].weight) == 1.0, "the uniform layout leaves the first layer dense"
    net = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 0), nn.Linear(0, 5), nn.Linear(5, 4))
    assert rigl(net, sgd(net), 0.5, steps=10).masks.keys() == {"0.weight", "3.weight"}


def test_a_mask_moves_with_its_weight() -> None:
    net = nn.Sequential(nn.Linear(4, 3), nn.Conv2d(2, 3, 3))
    rigl(net, torch.optim.SGD(net.parameters(), lr=0.1), 0.5, steps=10)
    weight = net[1].weight
    before = mask_of(weight)
    assert before is not None and mask_of(weight) is before
    net[1].to(memory_format=torch.channels_last)
    after = mask_of(weight)
    assert after is not None and torch.equal(after.used, before.used)
    in_memory = weight.detach().permute(0, 2, 3, 1).flatten()
    assert torch.equal(after.positions, in_memory.nonzero().flatten())

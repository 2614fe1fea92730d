"""Sparse training in one process: against a numpy twin, with any optimiser, and what is refused."""

from __future__ import annotations

import copy
import io
import math

import numpy as np
import pytest
import torch
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
        out = net(torch.tensor(x)) - torch.tensor(x @ target.T)
        out.square().sum().backward()
        optimizer.step()
        dense = 2 * (x @ w.T - x @ target.T).T @ x
        if step % every == 0 and step <= until * steps:
            count = int(drop / 2 * (1 + math.cos(math.pi * step / (until * steps))) * mask.sum())
            order = np.argsort(np.where(mask, np.abs(w), -1).ravel())[::-1]
            kept = np.zeros(w.size, bool)
            kept[order[: mask.sum() - count]] = True
            grown = np.argsort(np.where(kept, -1, np.abs(dense).ravel()))[::-1][:count]
            new = kept.copy()
            new[grown] = True
            new = new.reshape(w.shape)
            w, v, mask = w * (new & mask), v * (new & mask), new
        else:
            v = mu * v + dense * mask
            w = w - lr * v
        np.testing.assert_array_equal(sparse.masks["weight"].numpy(), mask)
        np.testing.assert_allclose(net.weight.detach().numpy(), w, rtol=1e-10, atol=1e-12)
    assert sparse.updates == 8  # at 0, 4, .. 28; until 0.75 * 40 = 30


@pytest.mark.parametrize("name", OPTIMISERS)
@pytest.mark.parametrize("spec", ["rigl(density=0.2, every=5)", "sparse_evolution(density=0.2, every=5)"])
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
            found = sparse._dense_gradients.summed(None, True)["weight"].view(10, 10)
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


@pytest.mark.parametrize(
    "spec", ["rigl(every=4, accumulate=2)", "sparse_evolution(every=3)", "gradual_pruning(every=3)"]
)
def test_a_resumed_run_ends_with_the_same_bits(spec) -> None:
    whole = mlp()
    optimizer = torch.optim.AdamW(whole.parameters(), lr=1e-2)
    sparse = sparsify(whole, optimizer, spec, steps=30, seed=5)
    run(whole, optimizer, range(15))
    file = io.BytesIO()
    torch.save([whole.state_dict(), optimizer.state_dict(), sparse.state_dict()], file)
    run(whole, optimizer, range(15, 30))
    file.seek(0)
    net = mlp(seed=9)
    other = torch.optim.AdamW(net.parameters(), lr=1e-2)
    again = sparsify(net, other, spec, steps=30, seed=5)
    for part, state in zip((net, other, again), torch.load(file, weights_only=True), strict=True):
        part.load_state_dict(state)
    run(net, other, range(15, 30))
    for one, two in zip(whole.parameters(), net.parameters(), strict=True):
        assert torch.equal(one, two)
    assert again.stats() == sparse.stats()


def test_first_masks_depend_on_seed_and_name_alone() -> None:
    one, other = mlp(0), mlp(1)
    made = [
        rigl(net, torch.optim.SGD(net.parameters(), lr=0.1), 0.2, steps=9, seed=4) for net in (one, other)
    ]
    assert all(torch.equal(mask, made[1].masks[name]) for name, mask in made[0].masks.items())
    net = mlp(0)
    moved = rigl(net, torch.optim.SGD(net.parameters(), lr=0.1), 0.2, steps=9, seed=5)
    assert not torch.equal(moved.masks["0.weight"], made[0].masks["0.weight"])


def test_the_uniform_layout_leaves_the_first_layer_dense() -> None:
    net = mlp()
    sparse = rigl(net, torch.optim.SGD(net.parameters(), lr=0.1), 0.1, steps=9, layout="uniform")
    assert sparse.densities == pytest.approx({"2.weight": 0.1, "4.weight": 0.1}, abs=0.01)
    assert bool((net[0].weight != 0).all())


def test_density_1_is_dense_training() -> None:
    one, other = mlp(), mlp()
    plain, masked = (torch.optim.SGD(net.parameters(), lr=0.1) for net in (one, other))
    sparse = rigl(other, masked, 1.0, steps=10, every=2)
    run(one, plain, range(6))
    run(other, masked, range(6))
    assert all(torch.equal(a, b) for a, b in zip(one.parameters(), other.parameters(), strict=True))
    assert sparse.stats().density == 1.0 and not sparse.masks


def test_a_closure_is_called_once() -> None:
    net = mlp()
    optimizer, calls = torch.optim.SGD(net.parameters(), lr=0.1), []
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


def test_remove_lets_all_weights_train_again() -> None:
    net = mlp()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    sparse = rigl(net, optimizer, 0.2, steps=10)
    sparse.remove()
    sparse.remove()
    run(net, optimizer, range(2))
    assert float((net[2].weight != 0).float().mean()) > 0.5 and mask_of(net[2].weight) is None
    rigl(net, optimizer, 0.1, steps=10)  # and again


def test_a_copy_is_a_plain_model() -> None:
    net = mlp()
    rigl(net, torch.optim.SGD(net.parameters(), lr=0.1), 0.2, steps=10)
    twin = copy.deepcopy(net)
    run(twin, torch.optim.SGD(twin.parameters(), lr=0.1), range(2))
    assert float((twin[2].weight != 0).float().mean()) > 0.5


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words, self.out = nn.Embedding(20, 8), nn.Linear(8, 20)
        self.out.weight = self.words.weight
        self.inner = nn.Linear(8, 8)


def sgd(net: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(net.parameters(), lr=0.1)


def frozen() -> nn.Module:
    return mlp().requires_grad_(False)


REFUSED = [
    (mlp, {"density": 0.0}, SpecError, "density must be a number in"),
    (mlp, {"density": 1.5}, SpecError, "density must be a number in"),
    (mlp, {"steps": 0}, SpecError, "steps must be a whole number"),
    (mlp, {"keep": ("3x",)}, AttachError, "no module '3x'"),
    (mlp, {"keep": ("0", "2", "4")}, AttachError, r"no layer to treat: .* 3 .*, and none outside keep=\('0'"),
    (lambda: nn.Sequential(nn.LayerNorm(3)), {}, AttachError, "no layer to treat: this model has no Linear"),
    (frozen, {}, AttachError, "no layer to treat: this model has no Linear .* to train$"),
    (lambda: nn.Linear(3, 3), {"layout": "uniform"}, AttachError, "first of 1 .* no other: take layout"),
    (Tied, {}, AttachError, "'words' and 'out' share their weight"),
    (lambda: nn.Linear(3, 3, dtype=torch.complex64), {}, AttachError, "for real weights"),
]


@pytest.mark.parametrize("build, given, kind, said", REFUSED)
def test_what_cannot_be_sparse_is_refused_and_nothing_changes(build, given, kind, said) -> None:
    net = build()
    before = copy.deepcopy(net.state_dict())
    optimizer = torch.optim.SGD(mlp().parameters() if build is frozen else net.parameters(), lr=0.1)
    with pytest.raises(kind, match=said):
        rigl(net, optimizer, **{"density": 0.1, "steps": 10, **given})
    assert all(torch.equal(value, before[key]) for key, value in net.state_dict().items())
    assert all(mask_of(each) is None and not each._backward_hooks for each in net.parameters())
    assert not optimizer._optimizer_step_pre_hooks


def test_double_conversion_is_refused() -> None:
    net = mlp()
    rigl(net, sgd(net), 0.2, steps=10)
    with pytest.raises(AttachError, match=r"'0' is masked already"):
        rigl(net, sgd(net), 0.2, steps=10)
    net = mlp()
    swat(net)
    with pytest.raises(AttachError, match=r"sparse already, by swat"):
        rigl(net, sgd(net), 0.2, steps=10)


def test_an_optimiser_without_the_weights_is_refused() -> None:
    net = mlp()
    with pytest.raises(AttachError, match=r"lacks 0\.weight, and 3 of the 3"):
        rigl(net, sgd(mlp()), 0.2, steps=10)
    with pytest.raises(AttachError, match=r"lacks 2\.weight, and 1 of the 3"):
        rigl(net, torch.optim.SGD([*net[0].parameters(), *net[4].parameters()], lr=0.1), 0.2, steps=10)
    assert bool((net[0].weight != 0).all())


@pytest.mark.parametrize(
    "change", [{"seed": 1}, {"steps": 9}, {"sparsifier": "rigl()"}, {"masks": {}}, {"more": 1}]
)
def test_a_state_that_belongs_elsewhere_is_refused(change) -> None:
    net = mlp()
    sparse = rigl(net, sgd(net), 0.2, steps=10)
    before = {name: mask.clone() for name, mask in sparse.masks.items()}
    with pytest.raises(StateError):
        sparse.load_state_dict(sparse.state_dict() | change)
    assert all(torch.equal(mask, before[name]) for name, mask in sparse.masks.items())


def same(one: dict, other: dict) -> bool:
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
}


def first_mask(state: dict, change) -> dict:
    name = next(iter(state["masks"]))
    return state["masks"] | {name: change(state["masks"][name])}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_state_is_refused_with_nothing_changed(damage: str) -> None:
    net = mlp()
    optimizer = sgd(net)
    sparse = rigl(net, optimizer, 0.2, steps=30, every=3, accumulate=2)
    run(net, optimizer, range(3))
    saved = copy.deepcopy(sparse.state_dict())
    run(net, optimizer, range(3, 6))
    before, weights = copy.deepcopy(sparse.state_dict()), [each.detach().clone() for each in net.parameters()]
    with pytest.raises(StateError):
        sparse.load_state_dict(DAMAGES[damage](saved))
    assert same(sparse.state_dict(), before)
    assert all(torch.equal(a, b) for a, b in zip(net.parameters(), weights, strict=True))
    run(net, optimizer, range(6, 10))


def test_masks_of_gradual_pruning_may_have_more_entries_than_at_the_end() -> None:
    net = mlp()
    sparse = sparsify(net, sgd(net), "gradual_pruning(density=0.2, every=3)", steps=30)
    sparse.load_state_dict(sparse.state_dict())
    with pytest.raises(StateError, match="has 0 of 360 entries in use, and this training has 86 to 360"):
        sparse.load_state_dict(DAMAGES["an empty mask"](sparse.state_dict()))


def test_a_state_is_not_loaded_after_remove() -> None:
    net = mlp()
    sparse = rigl(net, sgd(net), 0.2, steps=10)
    state = sparse.state_dict()
    sparse.remove()
    with pytest.raises(StateError, match=r"remove\(\) has ended this training"):
        sparse.load_state_dict(state)
    assert all(mask_of(each) is None for each in net.parameters())
    rigl(net, sgd(net), 0.2, steps=10).load_state_dict(state)


def test_only_a_sparsifier_makes_a_model_sparse() -> None:
    net = mlp()
    with pytest.raises(SpecError, match="takes a sparsifier"):
        sparsify(net, sgd(net), "topk(density=0.1)", steps=10)
    with pytest.raises(SpecError, match="unknown name"):
        sparsify(net, sgd(net), "rigel()", steps=10)


@pytest.mark.filterwarnings("ignore:Initializing zero-element tensors")
def test_a_layer_without_weights_has_no_mask() -> None:
    net = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 0), nn.Linear(0, 5), nn.Linear(5, 4))
    sparse = rigl(net, torch.optim.SGD(net.parameters(), lr=0.1), 0.5, steps=10)
    assert sparse.masks.keys() == {"0.weight", "3.weight"}


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

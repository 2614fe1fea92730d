"""Sparse training in the layout 2:4: of each four neighbours two, from the first step to the export."""

from __future__ import annotations

import numpy as np
import torch
from tests.unit.shared import for_each, refuses, resumed, same
from torch import nn

from laconic.core.errors import AttachError, SpecError, StateError
from laconic.sparsity import export, fours, nbytes, sparsify
from laconic.sparsity.drop_and_grow import drop_and_grow

SPECS = [
    *(
        f"{name}(density=0.5, every=4, layout='2:4')"
        for name in ("rigl", "sparse_evolution", "gradual_pruning")
    ),
    "static_masks(density=0.5, layout='2:4')",
]
STEPS = 32


def build(seed: int = 0) -> nn.Sequential:
    """Rows of 27, 72 and 288 entries: the first are not made of fours."""
    torch.manual_seed(seed)
    return nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 36, 5)
    )


def sgd(net: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9)


def run(net: nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> None:
    for step in steps:
        x = torch.randn(8, 3, 10, 10, generator=torch.Generator().manual_seed(step))
        optimizer.zero_grad()
        nn.functional.cross_entropy(net(x), x.mean((2, 3)).argmax(1)).backward()
        optimizer.step()


@for_each("spec", SPECS)
def test_each_four_has_two_and_the_export_stores_them_so(spec: str) -> None:
    net = build()
    optimizer = sgd(net)
    sparse = sparsify(net, optimizer, spec, steps=STEPS)
    first = {name: mask.clone() for name, mask in sparse.masks.items()}
    assert sorted(first) == ["2.weight", "5.weight"]
    for step in range(STEPS):
        run(net, optimizer, range(step, step + 1))
        counts = torch.cat([mask.reshape(-1, 4).sum(1) for mask in sparse.masks.values()])
        assert bool((counts >= 2).all()) and (spec.startswith("gradual") or bool((counts == 2).all()))
    assert bool((counts == 2).all())
    for name, mask in sparse.masks.items():
        weight = net.get_parameter(name)
        assert float((weight != 0)[mask].float().mean()) > 0.9 and not bool((weight != 0)[~mask].any())
        assert torch.equal(mask, first[name]) == spec.startswith("static")
    small = export(net)
    assert [small[index].weight.form for index in (2, 5)] == ["2:4", "2:4"]
    for index in (2, 5):
        stored, whole = nbytes(small[index].weight), 4 * net[index].weight.numel()
        assert stored == whole * 17 // 32
    x = torch.randn(4, 3, 10, 10)
    assert torch.allclose(small(x), net.eval()(x), atol=1e-5)


@for_each("seed", range(10))
def test_what_drops_makes_room_among_its_own_neighbours(seed: int) -> None:
    rng = np.random.default_rng(seed)
    n = 4 * int(rng.integers(1, 40))
    used = fours.random_mask(n, seed)
    w, score = rng.standard_normal(n) * used.numpy(), np.abs(rng.standard_normal(n))
    count = int(rng.integers(0, n // 2 + 1))
    ours = drop_and_grow(torch.tensor(w).abs(), used, torch.tensor(score), count, seed, "2:4").numpy()
    kept = np.zeros(n, bool)
    kept[np.argsort(-np.abs(w), kind="stable")[: n // 2 - count]] = True
    for begin in range(0, n, 4):
        here = slice(begin, begin + 4)
        free = np.where(kept[here], -1, score[here])
        grown = np.argsort(-free, kind="stable")[: 2 - kept[here].sum()]
        expected = kept[here].copy()
        expected[grown] = True
        assert ours[here].tolist() == expected.tolist()


def test_equal_scores_are_chosen_between_by_the_key_alone() -> None:
    one, same, other = fours.random_mask(4000, 1), fours.random_mask(4000, 1), fours.random_mask(4000, 2)
    assert torch.equal(one, same) and not torch.equal(one, other)
    places = one.view(-1, 4).float().mean(0)
    assert bool(((places - 0.5).abs() < 0.08).all())  # 5 standard deviations of a mean of 1000


@for_each("spec", [SPECS[0], SPECS[2]])
def test_a_resumed_run_ends_with_the_same_bits(spec: str) -> None:
    seeds = iter((0, 0, 3))

    def start():
        net = build(next(seeds))
        optimizer = sgd(net)
        return net, optimizer, sparsify(net, optimizer, spec, steps=STEPS)

    whole, later = resumed(start, lambda parts, steps: run(*parts[:2], steps), 17, STEPS)
    assert same(whole[0].parameters(), later[0].parameters())


def test_what_is_not_two_of_four_is_refused() -> None:
    net = nn.Linear(8, 4)
    for name in ("rigl", "sparse_evolution", "static_masks", "gradual_pruning"):
        words, spec = r"density must be 0\.5 with .*, got 0\.1", f"{name}(layout='2:4')"
        refuses(SpecError, words, sparsify, net, sgd(net), spec, steps=STEPS)
    sparse = sparsify(net, sgd(net), SPECS[0], steps=STEPS)
    before, state = sparse.masks["weight"].clone(), sparse.state_dict()
    state["masks"] = {"weight": torch.tensor([0b1111, 0b110011, 0b110011, 0b110011], dtype=torch.uint8)}
    refuses(StateError, "fewer than two of four", sparse.load_state_dict, state)
    assert torch.equal(sparse.masks["weight"], before)
    net = nn.Sequential(nn.Linear(6, 5), nn.Linear(5, 3))
    words = r"none of 2 layers.*layout='erk'"
    refuses(AttachError, words, sparsify, net, sgd(net), SPECS[0], steps=STEPS)
    assert bool((net[0].weight != 0).all())

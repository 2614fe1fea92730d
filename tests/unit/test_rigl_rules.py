"""How masks are drawn and updated, against a brute force in numpy and the authors' rules."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from tests.unit.resnet import resnet50
from tests.unit.shared import for_each, refuses

from laconic.core.errors import SpecError
from laconic.core.spec import parse
from laconic.sparsity import schedule
from laconic.sparsity.densities import densities, entries
from laconic.sparsity.drop_and_grow import drop_and_grow, largest
from laconic.sparsity.mask_rule import Moment

# pixels of the output's side, by stage of ResNet-50 (He et al. 2015)
SIDES = {"stem": 112, "0": 56, "1": 28, "2": 14, "3": 7}


def by_hand(w: np.ndarray, used: np.ndarray, score: np.ndarray, count: int) -> np.ndarray:
    """The authors' update with scores that have no equal entries: sort, cut, lift, sort, cut."""
    keep = int(used.sum()) - count
    kept = np.zeros(w.size, bool)
    kept[np.argsort(-np.abs(w * used), kind="stable")[:keep]] = True
    lifted = np.where(kept, score.min() - 1, score)
    grown = np.zeros(w.size, bool)
    grown[np.argsort(-lifted, kind="stable")[:count]] = True
    assert not (kept & grown).any()
    return kept | grown


@for_each("seed", range(20))
def test_an_update_is_that_of_brute_force(seed: int) -> None:
    rng = np.random.default_rng(seed)
    n = int(rng.integers(2, 200))
    used = rng.random(n) < 0.4
    used[0] = True
    w, score = rng.standard_normal(n) * used, np.abs(rng.standard_normal(n))
    count = int(rng.integers(0, used.sum() + 1))
    ours = drop_and_grow(
        torch.tensor(w).abs(), torch.tensor(used), torch.tensor(score), count, key=int(rng.integers(1 << 40))
    )
    assert ours.numpy().tolist() == by_hand(w, used, score, count).tolist()
    assert int(ours.sum()) == int(used.sum())


def test_rigl_and_sparse_evolution_drop_the_same_share() -> None:
    w, used = torch.randn(1000), torch.rand(1000) < 0.3
    w = w * used
    score = torch.randn(1000)
    at = Moment(turn=40, steps=100, key=5)
    count = int(0.15 * int(used.sum()))  # half of the cosine at half of 80 turns
    for spec in ("rigl(every=10, until=0.8)", "sparse_evolution(every=10, until=0.8)"):
        made = parse(spec).updated(w, used, score, 0.3, at)
        assert int(made.sum()) == int(used.sum())
        smallest = (w.abs() + 9.0 * ~used).argsort()[:count]
        stay = used.clone()
        stay[smallest] = False
        assert bool(made[stay].all())
        born = made & ~stay
        assert int(born.sum()) == count
    chosen = parse("rigl(every=10, until=0.8)").updated(w, used, score, 0.3, at) & ~stay
    assert float(score.abs()[chosen].min()) >= float(score.abs()[~stay & ~chosen].max())


def test_equal_values_are_chosen_between_by_the_key_alone() -> None:
    x = torch.zeros(1000)
    one, same, other = largest(x, 100, key=1), largest(x, 100, key=1), largest(x, 100, key=2)
    assert torch.equal(one, same) and not torch.equal(one, other)
    assert int(one.sum()) == int(other.sum()) == 100
    assert int(largest(torch.tensor([1.0, 2.0, 2.0]), 2, key=0).sum()) == 2
    assert largest(torch.tensor([1.0, 2.0, 2.0]), 3, key=0).all() and not largest(x, 0, key=0).any()


def test_a_mask_keeps_its_size_where_no_gradient_says_what_grows() -> None:
    w, used = torch.rand(1000), torch.arange(1000) % 3 == 0
    for key in range(5):
        made = drop_and_grow(w, used, torch.zeros(1000), 100, key)
        assert int(made.sum()) == int(used.sum()), f"key {key}"


def authors_erk(shapes: dict[str, tuple[int, ...]], sparsity: float) -> dict[str, float]:
    """The rule of google-research/rigl as their repository states it, layer sizes in whole entries."""
    dense: set[str] = set()
    while True:
        rhs = divisor = 0.0
        raw = {}
        for name, shape in shapes.items():
            n = int(np.prod(shape))
            zeros = math.floor(round(sparsity * n, 6))
            if name in dense:
                rhs -= zeros
            else:
                rhs += n - zeros
                raw[name] = np.sum(shape) / np.prod(shape)
                divisor += raw[name] * n
        eps = rhs / divisor
        if max(raw.values()) * eps <= 1:
            return {name: 1.0 if name in dense else eps * raw[name] for name in shapes}
        dense |= {name for name, each in raw.items() if each == max(raw.values())}


def resnet50_weights() -> dict[str, tuple[int, ...]]:
    return {entry.name: entry.shape for entry in resnet50() if len(entry.shape) > 1}


@for_each("density", [0.2, 0.1, 0.05, 0.01])
def test_erk_of_resnet50_is_the_authors(density: float) -> None:
    shapes = resnet50_weights()
    ours, theirs = densities(shapes, density, "erk"), authors_erk(shapes, 1 - density)
    for name in shapes:
        assert ours[name] == pytest.approx(theirs[name], abs=1e-4), name  # they round layers to entries
    kept = sum(entries(ours[name], math.prod(shape)) for name, shape in shapes.items())
    total = sum(map(math.prod, shapes.values()))
    assert kept / total == pytest.approx(density, abs=len(shapes) / total)


def flops_of_training(shares: dict[str, float], every: int = 100) -> float:
    """Of the dense net's: 3 sparse passes a step, and once in `every` + 1 two sparse ones and a dense one."""
    cost = {}
    for name, shape in resnet50_weights().items():
        stage, _, rest = name.partition(".")
        side = SIDES.get(stage, 1)
        if rest == "0.1.weight" and stage != "0":  # their net halves the image in the 3 x 3 convolution
            side *= 2
        cost[name] = math.prod(shape) * side**2
    dense, sparse = sum(cost.values()), sum(cost[name] * shares[name] for name in cost)
    return (3 * sparse * every + 2 * sparse + dense) / (every + 1) / (3 * dense)


@for_each("sparsity, erk, uniform", [(0.8, "0.42", "0.23"), (0.9, "0.24", "0.13")])
def test_flops_of_resnet50_are_those_that_the_authors_print(sparsity, erk, uniform) -> None:
    """The table of their README: times those of dense training; "uniform" has a dense first layer."""
    shapes, density = resnet50_weights(), 1 - sparsity
    assert f"{flops_of_training(densities(shapes, density, 'erk')):.2f}" == erk
    alike = densities(shapes, density, "uniform") | {"stem.weight": 1.0}
    assert f"{flops_of_training(alike):.2f}" == uniform


def test_the_share_that_drops_falls_as_a_cosine_and_scores_count_the_turns_before() -> None:
    for turn, share in ((0, 0.3), (75, 0.0), (25, 0.225), (50, 0.075)):
        assert schedule.fraction(turn, 100, 0.3, 0.75) == pytest.approx(share)
    spec = parse("rigl(every=10, accumulate=3, until=0.5)")
    assert [turn for turn in range(100) if spec.due(turn, 60)] == [0, 10, 20, 30]
    assert [turn for turn in range(100) if spec.counts(turn, 60)] == [0, 8, 9, 10, 18, 19, 20, 28, 29, 30]


def test_pruning_ends_at_the_density_and_never_grows() -> None:
    spec = parse("gradual_pruning(density=0.1, every=7, begin=0.2, until=0.7)")
    w, used, steps = torch.randn(500), torch.ones(500, dtype=torch.bool), 100
    seen = []
    for turn in range(steps):
        if spec.due(turn, steps):
            after = spec.updated(w * used, used, None, 0.1, Moment(turn, steps, turn))
            assert not (after & ~used).any()
            seen.append(int(after.sum()))
            used = after
    assert seen == sorted(seen, reverse=True) and seen[-1] == 50 and seen[0] <= 500
    assert torch.equal(used, largest(w.abs(), 50, key=0))


def test_what_is_out_of_range_is_refused() -> None:
    for text in [
        "rigl(density=0)",
        "rigl(density=1.5)",
        "rigl(drop=0)",
        "rigl(until=1.1)",
        "rigl(every=0)",
        "rigl(layout='er')",
        "rigl(accumulate=101)",
        "static_masks(density=-1)",
        "sparse_evolution(drop=2)",
        "gradual_pruning(begin=0.8)",
    ]:
        refuses(SpecError, "must be", parse, text)

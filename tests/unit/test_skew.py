"""Skewed shards: every example is on one worker, and alpha says how unevenly."""

from __future__ import annotations

import hashlib

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.unit.shared import refuses, same
from torch import Tensor

from laconic.core.errors import SpecError
from laconic.data.partition.dirichlet import Dirichlet
from laconic.tools.tasks import TASKS, find
from laconic.tools.tasks.skew import SkewedShard

LABELS = torch.arange(4000) * 7 % 10  # 400 of each


def dealt(kinds: Tensor, size: int, alpha: float, seed: int, least: int) -> list[Tensor]:
    return Dirichlet(alpha, least).deal(kinds, size, seed)


def shares(shards: list[Tensor]) -> Tensor:
    """Share of each label on each worker: (workers, 10), columns add up to 1."""
    return torch.stack([torch.bincount(LABELS[own], minlength=10) for own in shards]) / 400


@settings(max_examples=60, deadline=None)
@given(
    kinds=st.lists(st.integers(-3, 9), min_size=1, max_size=60),
    size=st.integers(1, 6),
    alpha=st.sampled_from((1e-300, 1e-3, 0.1, 1.0, 1e9, 1e300)),
    seed=st.integers(0, 9),
    data=st.data(),
)
def test_every_example_is_on_one_worker_and_nobody_is_left_without(kinds, size, alpha, seed, data):  # type: ignore[no-untyped-def]
    size = min(size, len(kinds))
    least = data.draw(st.integers(0, len(kinds) // size))
    shards = dealt(torch.tensor(kinds), size, alpha, seed, least)
    assert torch.cat(shards).sort().values.tolist() == list(range(len(kinds)))
    assert all(len(own) >= least and own.tolist() == sorted(own.tolist()) for own in shards)


def test_a_large_alpha_is_nearly_even_and_a_small_one_is_not() -> None:
    even = shares(dealt(LABELS, 8, 1000.0, seed=0, least=16))
    assert float((even - 1 / 8).abs().max()) < 0.02  # 5 sigma of a Dirichlet(1000) share among 8
    skewed = shares(dealt(LABELS, 8, 0.1, seed=0, least=16))
    assert float(skewed.max(dim=0).values.mean()) > 0.5, "half of a label and more is on one worker"
    assert int((skewed < 0.01).sum()) > 40, "and on most there is hardly any of it"


def test_shares_have_the_variance_of_their_distribution() -> None:
    """a (size - 1) / (size^2 (size a + 1)) for equal a; 200 draws of 10 labels: within a tenth."""
    found = torch.cat([shares(dealt(LABELS, 4, 0.5, seed, least=0)).flatten() for seed in range(200)])
    assert float((found - 1 / 4).square().mean()) == pytest.approx(3 / (16 * 3), rel=0.1)


def test_dealing_is_a_function_of_the_seed_and_the_size() -> None:
    once, again, other = (dealt(LABELS, 5, 0.1, seed, least=16) for seed in (1, 1, 2))
    assert same(once, again)
    assert not all(map(torch.equal, once, other))
    for least in (0, 30, 500):
        sizes = [len(own) for own in dealt(LABELS, 8, 1e-6, seed=0, least=least)]
        assert min(sizes) >= least and sum(sizes) == 4000, "who lacks examples takes them from who has most"
    assert sizes == [500] * 8
    found = hashlib.blake2b(digest_size=8)
    for rank in range(4):
        found.update(SkewedShard.of(LABELS, 32, rank, size=4, alpha=0.2, seed=3).own.numpy().tobytes())
    assert found.hexdigest() == "6e304af67de2371d", "the examples that each worker always had"


def test_a_worker_draws_its_own_examples_for_ever_in_epochs_of_its_own() -> None:
    ranks = [SkewedShard.of(LABELS, 32, rank, size=4, alpha=0.2, seed=3) for rank in range(4)]
    assert torch.cat([shard.own for shard in ranks]).sort().values.tolist() == list(range(4000))
    for shard in ranks:
        length = len(shard.own) // 32
        epochs = [torch.cat([shard.indices(n * length + step) for step in range(length)]) for n in (0, 1)]
        for epoch in epochs:
            assert len(epoch.unique()) == 32 * length
            assert set(epoch.tolist()) <= set(shard.own.tolist())
        assert not torch.equal(*epochs)
        assert torch.equal(shard.indices(5), shard.indices(5))
    draws = {torch.rand(1, generator=shard.rng(step)).item() for shard in ranks for step in range(5)}
    assert len(draws) == 20


def test_too_large_a_batch_is_refused_as_without_skew() -> None:
    refuses(
        SpecError,
        r"batch must be in \[1, 500\] for 4000 examples on 8 workers, got 501",
        SkewedShard.of,
        LABELS,
        501,
        0,
        size=8,
        alpha=0.1,
        seed=0,
    )
    assert len(SkewedShard.of(LABELS, 500, 7, size=8, alpha=0.1, seed=0).own) == 500


def test_kinds_are_labels_and_of_a_text_its_tenths() -> None:
    y = torch.tensor([3, 1, 2], dtype=torch.uint8)
    assert all(torch.equal(task.kinds(y), y) for task in TASKS.values() if task.name != "shakespeare")
    tenths = find("shakespeare").kinds(torch.zeros(95, 64, dtype=torch.uint8))
    assert tenths.tolist() == sorted(tenths.tolist())
    assert set(torch.bincount(tenths).tolist()) == {9, 10} and len(tenths.unique()) == 10
    passages = dealt(tenths, 2, 1e-6, seed=0, least=0)
    assert {len(tenths[own].unique()) for own in passages} != {10}

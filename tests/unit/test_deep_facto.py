"""DeepFacto: non-negative factors by multiplicative updates, between two blocks."""

from __future__ import annotations

import pytest
import torch
from benchmarks.block_admm.weak import RIDGE, readout, with_one
from tests.unit.block_world import ONE_AT_A_TIME, WIDE, adam, data, trained
from tests.unit.shared import refuses
from torch import nn

from laconic.admm import BlockTrainer, DeepFacto
from laconic.comm.loopback import Loopback
from laconic.core.errors import AttachError, SpecError


def planted(rows=200, features=12, rank=3):
    rng = torch.Generator().manual_seed(1)
    return torch.rand(rows, rank, generator=rng) @ torch.rand(rank, features, generator=rng)


def test_the_updates_are_those_of_lee_and_seung():
    """One batch and decay 0: the code's rule ten times, then the parts' once, written out entry by entry."""
    v, facto = planted(rows=6), DeepFacto(12, 3, decay=0.0)
    parts = facto.parts.double()
    s = (v.double().mean(1, keepdim=True) / (parts.mean() * 3)).repeat(1, 3)
    for _ in range(10):
        s = torch.stack(
            [
                torch.stack(
                    [s[i, k] * (v[i].double() @ parts[k]) / (s[i] @ parts @ parts[k]) for k in range(3)]
                )
                for i in range(6)
            ]
        )
    moved = parts * (s.T @ v.double()) / (s.T @ s @ parts)
    found = facto.learn(v)
    torch.testing.assert_close(facto.parts.double(), moved, rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(found.double(), s @ moved, rtol=1e-4, atol=1e-6)


def test_it_finds_planted_factors_and_stays_non_negative():
    x, facto = planted(), DeepFacto(12, 3)
    before = facto.error(x)
    for _ in range(40):
        for part in x.split(50):
            facto.learn(part)
            assert (facto.parts >= 0).all()
    assert facto.error(x) < 0.05 < before
    assert facto.code(x).shape == (200, 3) and (facto.code(x) >= 0).all()
    torch.testing.assert_close(facto(x), facto.code(x) @ facto.parts)


def test_a_plain_forward_pass_learns_nothing():
    facto = DeepFacto(12, 3)
    before = facto.parts.clone()
    facto(planted())
    assert torch.equal(facto.parts, before)


def test_zeros_and_shapes():
    facto = DeepFacto(12, 3)
    x = torch.zeros(2, 3, 4)
    assert facto(x).shape == x.shape and not facto(x).any() and facto.learn(x).isfinite().all()
    assert (facto(-torch.rand(2, 3, 4)) == 0).all()


def test_blocks_learn_through_it():
    between = lambda: (DeepFacto(WIDE, 8), nn.ReLU())  # noqa: E731
    losses, stats, _, model = trained("block_admm(blocks=3, beta=0.1)", 120, between)[2]
    x, y = data()
    assert losses[-1] < 0.6 * losses[0]
    assert (model(x).argmax(1) == y).float().mean() > 0.7
    hidden = model[0](x)
    assert model[1].error(hidden) < 0.35 < DeepFacto(WIDE, 8).error(hidden)
    assert (model[1].parts >= 0).all() and (model[1].code(hidden) >= 0).all()
    assert stats.updates == 120


def test_codes_of_weak_labels_tell_the_classes_that_no_label_names():
    """Four parts; labels only say whether a sample has most of one of the first two."""
    rng = torch.Generator().manual_seed(2)
    y = torch.randint(4, (300,), generator=rng)
    amounts = nn.functional.one_hot(y, 4) + 0.3 * torch.rand(300, 4, generator=rng)
    x = amounts @ torch.rand(4, 16, generator=rng)

    def rank(comm):
        with ONE_AT_A_TIME:
            torch.manual_seed(0)
            model = nn.Sequential(nn.Linear(16, WIDE), nn.ReLU(), DeepFacto(WIDE, 8), nn.Linear(WIDE, 2))
        made = BlockTrainer(model, "block_admm(blocks=2)", example=x[:2], optimizer=adam, comm=comm)
        for step in range(200):
            rows = torch.arange(20) + step % 10 * 20
            made.step(x[rows], y[rows] // 2)
        made.finish()
        return made.gather()

    model = Loopback.run(2, rank)[0]
    code = model[2].code(model[:2](x))
    found = (with_one(code) @ readout(code[:50], y[:50])).argmax(1)
    assert (model(x).argmax(1) == y // 2)[200:].float().mean() > 0.9
    assert (found == y)[200:].float().mean() > 0.8


def test_the_readout_is_ridge_regression_with_a_penalty_per_feature():
    """The same as plain least squares on rows that are appended for the penalty."""
    x, y = torch.rand(30, 5, dtype=torch.float64), torch.arange(30) % 3
    one, classes = with_one(x), nn.functional.one_hot(y).double()
    penalty = torch.diag((RIDGE * one.square().sum(0)).sqrt())
    rows, wanted = torch.cat([one, penalty]), torch.cat([classes, torch.zeros(6, 3, dtype=torch.float64)])
    torch.testing.assert_close(readout(x, y), torch.linalg.lstsq(rows, wanted).solution)


def test_bad_input():
    refuses(SpecError, r"rank must be a whole number in 1\.\.4, got 5", DeepFacto, 4, 5)
    refuses(SpecError, r"decay must be a number in \[0, 1\)", DeepFacto, 4, 2, decay=1.0)
    with pytest.raises(AttachError, match=r"has 4 features, and a sample of \(5,\) has 5"):
        DeepFacto(4, 2)(torch.rand(3, 5))


def test_a_feature_that_comes_late_is_learnt():
    rng = torch.Generator().manual_seed(3)
    facto, late = DeepFacto(6, 3), torch.tensor([3.0, 1, 1, 1, 1, 1])
    first = torch.rand(16, 6, generator=rng)
    first[:, 0] = 0
    facto.learn(first)
    for _ in range(200):
        facto.learn(torch.rand(16, 6, generator=rng) * late)
    assert float(facto.parts[:, 0].max()) > 0.1
    nothing = DeepFacto(6, 3)
    nothing.learn(-torch.ones(4, 6))
    for _ in range(50):
        nothing.learn(torch.ones(4, 6))
    assert nothing.error(torch.ones(4, 6)) < 0.2

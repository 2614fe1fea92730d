"""Models under `laconic.distribute` in real processes over gloo: how they start, meet, resume and end."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn

import laconic
from tests.dist.distribute_world import pair, stop_and_go, trained
from tests.dist.nets import SGD, agree, flat, loss_of, net

SPECS = [
    "dense()",
    "dgc(density=0.05)",
    "local_sgd(every=2)",
    "local_sgd(every=3, compressor=minmax(bits=8))",
]


def finished(spec):
    model, optimizer = trained(spec)
    optimizer.finish()
    same, stats = agree(model), optimizer.stats()
    optimizer.remove()
    return same, stats.steps, stats.payload_sent


@pytest.mark.parametrize("spec", SPECS)
def test_one_string_decides_how_replicas_stay_together(pool, spec):
    for same, steps, sent in pool.run(2, finished, spec):
        assert same
        assert steps == 6
        assert sent > 0


def all_begin_alike():
    model, _ = pair("local_sgd(every=100)")
    return agree(model)


def test_all_ranks_begin_with_the_first_ranks_model(pool):
    assert pool.run(2, all_begin_alike) == [True, True]


def local_and_apart():
    model, optimizer = trained("local_sgd(every=4)", steps=6)
    apart = agree(model)
    own = flat(model)
    with optimizer.averaged() as distance:
        inside = agree(model)
        ranks = [torch.empty_like(own) for _ in range(dist.get_world_size())]
        dist.all_gather(ranks, own)
        mean = torch.stack(ranks).mean(0)
        exact = torch.allclose(flat(model), mean, rtol=1e-6, atol=1e-7)
        spread = torch.stack([(rank - mean).square().sum() for rank in ranks]).mean().sqrt() / mean.norm()
    return apart, inside, exact, torch.equal(flat(model), own), distance, float(spread)


def test_averaged_shows_the_groups_model_and_gives_back_the_own(pool):
    for apart, inside, exact, given_back, distance, spread in pool.run(3, local_and_apart):
        assert not apart
        assert inside
        assert exact
        assert given_back
        assert distance == pytest.approx(spread, rel=1e-4)


@pytest.mark.parametrize("spec", SPECS[1:])
def test_save_and_resume_gives_the_same_bits(pool, spec):
    assert pool.run(2, stop_and_go, spec, 7, 4) == [True, True]


def batch_norms(statistics):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(20, 8), nn.BatchNorm1d(8), nn.Linear(8, 5))
    plain = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer = laconic.distribute(model, plain, "local_sgd()", statistics=statistics)
    for step in range(3):
        loss_of(model, step).backward()
        optimizer.step()
    own = model[1].running_mean.clone()
    optimizer.finish()
    optimizer.remove()
    return own, model[1].running_mean.clone(), agree(model)


def test_running_statistics_are_averaged_or_kept(pool):
    (one, averaged, same), (two, other, _) = pool.run(2, batch_norms, "average")
    assert same
    assert torch.equal(averaged, other)
    torch.testing.assert_close(averaged, (one + two) / 2)
    (one, kept, same), _ = pool.run(2, batch_norms, "keep")
    assert same
    assert torch.equal(kept, one)


def removed():
    model, optimizer = trained("local_sgd(every=2)", 2)
    optimizer.remove()
    again = torch.optim.SGD(model.parameters(), **SGD)
    model, optimizer = laconic.distribute(model, again, "dense()")
    loss_of(model, 0).backward()
    optimizer.step()
    return agree(model)


def test_a_removed_strategy_leaves_an_ordinary_model(pool):
    assert pool.run(2, removed) == [True, True]


def local_twin():
    """Brute force: torch's own optimisers, and an all-reduce of parameters every third step."""
    model, _ = trained("local_sgd(every=3)", 7)
    torch.manual_seed(0)
    twin = net()
    optimizer = torch.optim.SGD(twin.parameters(), **SGD)
    for step in range(7):
        optimizer.zero_grad()
        loss_of(twin, step).backward()
        optimizer.step()
        for parameter in twin.parameters() if step % 3 == 2 else ():
            dist.all_reduce(parameter.data)
            parameter.data /= dist.get_world_size()
    return float((flat(model) - flat(twin)).abs().max())


def test_local_sgd_is_what_its_equation_says(pool):
    """Not bit for bit: the mean is of ways, not of parameters. Tolerance: float32 over 7 steps."""
    assert max(pool.run(3, local_twin)) < 1e-6


def from_the_start(start):
    post, _ = trained(f"local_sgd(every=100, start={start})", 5)
    mean, _ = trained("dense()", 5)
    return float((flat(post) - flat(mean)).abs().max())


def test_averaging_at_every_step_is_training_on_mean_gradients(pool):
    """SGD with momentum is linear in its gradients. Tolerance: float32 over 5 steps."""
    assert max(pool.run(3, from_the_start, 5)) < 1e-6
    assert min(pool.run(3, from_the_start, 3)) > 1e-4

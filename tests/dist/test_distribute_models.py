"""Models under `laconic.distribute` in real processes over gloo: how they start, meet, resume and end."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn

import laconic
from tests.dist.distribute_world import go, pair, stop_and_go, trained
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


class Masked(nn.Module):
    """A model with constants among its float buffers: the lowest float, and one that is expanded."""

    def __init__(self):
        super().__init__()
        self.inner = net()
        self.register_buffer("mask", torch.full((4, 4), torch.finfo(torch.float32).min).triu(1))
        self.register_buffer("third", torch.full((3, 1), 1 / 3).expand(3, 5))
        self.register_buffer("mean", torch.full((2,), float(dist.get_rank())))

    def forward(self, x):
        return self.inner(x)


def constants_after(spec):
    model = Masked()
    mask, third = model.mask.clone(), model.third.clone()
    model, optimizer = laconic.distribute(model, torch.optim.SGD(model.parameters(), lr=0.1), spec)
    model.mean.fill_(dist.get_rank())  # a statistic of each rank's own data
    loss_of(model, 0).backward()
    optimizer.step()
    with optimizer.averaged():
        assert model.mask.isfinite().all()
    optimizer.finish()
    return torch.equal(model.mask, mask), torch.equal(model.third, third), model.mean.tolist()


@pytest.mark.parametrize("spec", ["local_sgd(every=2)", "sgp()"])
def test_constants_among_float_buffers_stay_as_they_are(pool, spec):
    assert pool.run(3, constants_after, spec) == [(True, True, [1.0, 1.0])] * 3


def frozen_later(spec):
    """How far a layer moves that is frozen between two outer steps."""
    model, optimizer = trained(spec, steps=4)
    for each in model[0].parameters():
        each.requires_grad_(False)
        each.grad = None
    before = flat(model[0]).clone()
    go(model, optimizer, range(4, 8))
    return torch.equal(flat(model[0]), before), agree(model)


def test_a_layer_that_is_frozen_later_rests_under_outer_momentum(pool):
    assert pool.run(2, frozen_later, "diloco(every=2)") == [(True, True)] * 2


ROUNDS = "zero_one_adam(freeze_steps=1, kappa=1, double_every=1, longest=4)"


def between_rounds():
    """Replicas inside `averaged`, after it, and after `finish`, in the middle of a round."""
    torch.manual_seed(0)
    model = net()
    model, optimizer = laconic.distribute(model, torch.optim.Adam(model.parameters(), lr=0.01), ROUNDS)
    go(model, optimizer, range(6))
    own = flat(model)
    with optimizer.averaged() as apart:
        inside = agree(model)
    after = torch.equal(flat(model), own)
    before = agree(model)
    optimizer.finish()
    met = agree(model)
    go(model, optimizer, range(6, 9))
    return apart, inside, after, before, met, bool(flat(model).isfinite().all())


def test_a_method_of_rounds_meets_in_finish_and_is_averaged(pool):
    (apart, *rest), (other, *_) = pool.run(2, between_rounds)
    assert 0 < apart == other < 1
    assert rest == [True, True, False, True, True]

"""Models under `laconic.distribute` in real processes over gloo: how they start, meet, resume and end."""

from __future__ import annotations

import copy
import io

import pytest
import torch
import torch.distributed as dist
from torch import nn

import laconic
from tests.dist.nets import SGD, agree, flat, net
from tests.dist.pool import on_ranks
from tests.dist.runs import advance, distributed, everywhere, strategy_resumes, trained

SPECS = [
    "dense()",
    "dgc(density=0.05)",
    "local_sgd(every=2)",
    "local_sgd(every=3, compressor=minmax(bits=8))",
]


@on_ranks(2, SPECS)
def test_one_string_decides_how_replicas_stay_together(spec):
    model, optimizer = trained(spec)
    optimizer.finish()
    same, stats = agree(model), optimizer.stats()
    optimizer.remove()
    assert same and stats.steps == 6 and stats.payload_sent > 0


@on_ranks(2)
def test_all_ranks_begin_with_the_first_ranks_model():
    model, _ = distributed("local_sgd(every=100)")
    assert agree(model)


def size_of(state):
    file = io.BytesIO()
    torch.save(state, file)
    return file.getbuffer().nbytes


@on_ranks(2)
def test_finish_gives_each_parameter_its_own_memory():
    """A layer then saves alone, and training goes on as without it, from what a script wrote meanwhile."""
    pairs = [trained("local_sgd(every=2)") for _ in range(2)]
    plain = size_of(copy.deepcopy(pairs[0][0][-1]).state_dict())
    for model, optimizer in pairs:
        optimizer.finish()
        assert size_of(model[-1].state_dict()) == plain
        with torch.no_grad():
            model[-1].bias.add_(1.0)
    with pairs[1][1].averaged():
        pass
    for model, optimizer in pairs:
        advance(model, optimizer, range(6, 9))
    assert torch.equal(*(flat(model) for model, _ in pairs))


@on_ranks(3)
def test_averaged_shows_the_groups_model_and_gives_back_the_own():
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
    apart, inside, exact, given_back, distance, spread = (
        apart,
        inside,
        exact,
        torch.equal(flat(model), own),
        distance,
        float(spread),
    )
    assert not apart and inside and exact
    assert given_back
    assert distance == pytest.approx(spread, rel=1e-4)


@on_ranks(2, SPECS[1:])
def test_save_and_resume_gives_the_same_bits(spec):
    assert strategy_resumes(spec, 7, 4)


@on_ranks(2, ("average", "keep"))
def test_running_statistics_are_averaged_or_kept(statistics):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(20, 8), nn.BatchNorm1d(8), nn.Linear(8, 5))
    plain = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer = laconic.distribute(model, plain, "local_sgd()", statistics=statistics)
    advance(model, optimizer, 3)
    own = model[1].running_mean.clone()
    optimizer.finish()
    optimizer.remove()
    assert agree(model)
    if statistics == "keep":
        assert torch.equal(model[1].running_mean, own)
        return
    mean, other = everywhere(model[1].running_mean)
    assert torch.equal(mean, other)
    torch.testing.assert_close(mean, sum(everywhere(own)) / 2)


@on_ranks(2)
def test_a_removed_strategy_leaves_an_ordinary_model():
    model, optimizer = trained("local_sgd(every=2)", 2)
    optimizer.remove()
    again = torch.optim.SGD(model.parameters(), **SGD)
    model, optimizer = laconic.distribute(model, again, "dense()")
    advance(model, optimizer, [0])
    assert agree(model)


@on_ranks(3)
def test_local_sgd_is_what_its_equation_says():
    """Torch's own optimisers, and an all-reduce of parameters every third step.

    Not bit for bit: the mean is of ways, not of parameters. Tolerance: float32 over 7 steps.
    """
    model, _ = trained("local_sgd(every=3)", 7)
    twin = net()
    optimizer = torch.optim.SGD(twin.parameters(), **SGD)
    for step in range(7):
        advance(twin, optimizer, [step])
        for parameter in twin.parameters() if step % 3 == 2 else ():
            dist.all_reduce(parameter.data)
            parameter.data /= dist.get_world_size()
    assert (flat(model) - flat(twin)).abs().max() < 1e-6


@on_ranks(3, (3, 5))
def test_averaging_at_every_step_is_training_on_mean_gradients(start):
    """SGD with momentum is linear in its gradients. Tolerance: float32 over 5 steps."""
    post, _ = trained(f"local_sgd(every=100, start={start})", 5)
    mean, _ = trained("dense()", 5)
    apart = float((flat(post) - flat(mean)).abs().max())
    assert apart < 1e-6 if start == 5 else apart > 1e-4


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


@on_ranks(3, ["local_sgd(every=2)", "sgp()"])
def test_constants_among_float_buffers_stay_as_they_are(spec):
    model = Masked()
    mask, third = model.mask.clone(), model.third.clone()
    model, optimizer = laconic.distribute(model, torch.optim.SGD(model.parameters(), lr=0.1), spec)
    model.mean.fill_(dist.get_rank())  # a statistic of each rank's own data
    advance(model, optimizer, [0])
    with optimizer.averaged():
        assert model.mask.isfinite().all()
    optimizer.finish()
    assert torch.equal(model.mask, mask) and torch.equal(model.third, third)
    assert model.mean.tolist() == [1.0, 1.0]


@on_ranks(2)
def test_a_layer_that_is_frozen_later_rests_under_outer_momentum():
    spec = "diloco(every=2)"
    model, optimizer = trained(spec, steps=4)
    for each in model[0].parameters():
        each.requires_grad_(False)
        each.grad = None
    before = flat(model[0]).clone()
    advance(model, optimizer, range(4, 8))
    assert torch.equal(flat(model[0]), before) and agree(model)


ROUNDS = "zero_one_adam(freeze_steps=1, kappa=1, double_every=1, longest=4)"


@on_ranks(2)
def test_a_method_of_rounds_meets_in_finish_and_is_averaged():
    """Replicas inside `averaged`, after it, and after `finish`, in the middle of a round."""
    model = net()
    model, optimizer = laconic.distribute(model, torch.optim.Adam(model.parameters(), lr=0.01), ROUNDS)
    advance(model, optimizer, 6)
    own = flat(model)
    with optimizer.averaged() as apart:
        assert agree(model)
    assert torch.equal(flat(model), own) and not agree(model)
    first, second = everywhere(apart)
    assert 0 < first == second < 1
    optimizer.finish()
    assert agree(model)
    advance(model, optimizer, range(6, 9))
    assert flat(model).isfinite().all()

"""`laconic.distribute` in real processes over gloo: one entry for gradients and parameters."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.optim.lr_scheduler import LambdaLR

import laconic
from laconic.core.errors import AttachError, LaconicError, NonFiniteError, SpecError, StateError
from laconic.strategies.bond import GradientBond
from laconic.strategies.distributed_optimizer import DistributedOptimizer
from tests.dist.nets import SGD, agree, flat, loss_of, net

SPECS = ["dense()", "dgc(density=0.05)", "local_sgd(every=2)", "local_sgd(every=3, update=minmax(bits=8))"]


def pair(spec, **options):
    torch.manual_seed(dist.get_rank())  # replicas differ until distribute makes them alike
    model = net()
    return laconic.distribute(model, torch.optim.SGD(model.parameters(), **SGD), spec, **options)


def trained(spec, steps=6, **options):
    model, optimizer = pair(spec, **options)
    for step in range(steps):
        optimizer.zero_grad()
        loss_of(model, step).backward()
        optimizer.step()
    return model, optimizer


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


def stop_and_go(spec, total, stop):
    whole, _ = trained(spec, total)
    model, optimizer = trained(spec, stop)
    saved, weights = optimizer.state_dict(), {key: value.clone() for key, value in model.state_dict().items()}
    model, optimizer = pair(spec)
    model.load_state_dict(weights)
    optimizer.load_state_dict(saved)
    for step in range(stop, total):
        optimizer.zero_grad()
        loss_of(model, step).backward()
        optimizer.step()
    return torch.equal(flat(whole), flat(model))


@pytest.mark.parametrize("spec", SPECS[1:])
def test_save_and_resume_gives_the_same_bits(pool, spec):
    assert pool.run(2, stop_and_go, spec, 7, 4) == [True, True]


def refused(spec, **options):
    """The errors of a second `distribute`, another's state, a moved model."""
    said = []
    model, optimizer = pair("local_sgd()")
    for attempt in (
        lambda: laconic.distribute(model, torch.optim.SGD(model.parameters(), lr=0.1), "dense()"),
        lambda: laconic.distribute(net(), torch.optim.SGD(net().parameters(), lr=0.1), "local_sgd()"),
        lambda: pair("local_sgd(every=0)"),
        lambda: pair("local_sgd(update=comp_ams())"),
        lambda: pair("local_sgd()", statistics="maximum"),
        lambda: pair("local_sgd()", bucket_cap_mb=1),
        lambda: pair(f"local_sgd(every={2 + dist.get_rank()})"),
        lambda: laconic.distribute(net().bfloat16(), torch.optim.SGD(net().parameters()), "local_sgd()"),
        lambda: optimizer.load_state_dict(torch.optim.SGD(net().parameters(), lr=0.1).state_dict()),
        lambda: optimizer.load_state_dict(trained("local_sgd(every=2)", 1)[1].state_dict()),
        lambda: optimizer.add_param_group({"params": [torch.zeros(1)]}),
        lambda: moved(model, optimizer),
    ):
        try:
            attempt()
        except LaconicError as error:
            said.append((type(error), str(error)))
    return said


def moved(model, optimizer):
    model[0].weight.data = model[0].weight.data.clone()
    loss_of(model, 0).backward()
    optimizer.step()


def test_what_cannot_be_is_refused_on_every_rank(pool):
    expected = [
        (AttachError, "distributed already"),
        (AttachError, "the optimiser holds a parameter"),
        (SpecError, "every must be a whole number of 1 or more"),
        (SpecError, "takes the optimiser's place"),
        (AttachError, "statistics must be one of"),
        (AttachError, "it takes no bucket_cap_mb="),
        (AttachError, "the spec differs"),
        (AttachError, "is torch.bfloat16"),
        (StateError, "the state of a plain optimiser"),
        (StateError, "the saved state is of spec 'local_sgd(every=2)'"),
        (AttachError, "add the group before"),
        (AttachError, "the memory of 0.weight was replaced"),
    ]
    for said in pool.run(2, refused, ""):
        for (kind, text), (wanted, words) in zip(said, expected, strict=True):
            assert kind is wanted, text
            assert words in text


def schedule_and_scaler():
    """A rank whose gradient overflows skips its update and still averages; a schedule goes on."""
    model, optimizer = pair("local_sgd(every=2)")
    schedule, scaler = (
        LambdaLR(optimizer, lambda step: 0.5**step),
        torch.amp.GradScaler("cpu", init_scale=8.0),
    )
    before = flat(model)
    for step in range(2):
        optimizer.zero_grad()
        loss = loss_of(model, step) * (torch.inf if dist.get_rank() == 0 else 1.0)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        if step == 0:
            unmoved = torch.equal(flat(model), before)
        schedule.step()
    return unmoved, agree(model), optimizer.param_groups[0]["lr"], scaler.get_scale()


def test_a_scaler_skips_the_update_of_one_rank_and_no_meeting(pool):
    (unmoved, same, rate, scale), (moved, _, _, other) = pool.run(2, schedule_and_scaler)
    assert unmoved
    assert not moved
    assert same
    assert rate == pytest.approx(SGD["lr"] / 4)
    assert (scale, other) == (2.0, 8.0)


def scaled_and_plain():
    ends = []
    for scaler in (torch.amp.GradScaler("cpu", init_scale=8.0), torch.amp.GradScaler("cpu", enabled=False)):
        model, optimizer = pair("local_sgd(every=2)")
        for step in range(4):
            optimizer.zero_grad()
            scaler.scale(loss_of(model, step)).backward()
            scaler.step(optimizer)
            scaler.update()
        ends.append(flat(model))
    return torch.equal(*ends)


def test_a_scale_leaves_no_trace(pool):
    assert pool.run(2, scaled_and_plain) == [True, True]


def not_finite():
    model, optimizer = pair("local_sgd(every=5)")
    before = flat(model)
    (loss_of(model, 0) * torch.nan).backward()
    try:
        optimizer.step()
    except NonFiniteError as error:
        return str(error), torch.equal(flat(model), before)


def test_a_gradient_that_is_not_finite_changes_nothing(pool):
    for text, unchanged in pool.run(2, not_finite):
        assert "nothing was changed" in text
        assert unchanged


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


class Told(GradientBond):
    """Keeps the losses that it is told."""

    def __init__(self):
        self.losses = []

    def step(self, update, loss):
        self.losses.append(loss)
        update()


def test_a_loss_is_told_by_hand_or_by_a_closure_as_it_is():
    weight, bond = torch.ones((), requires_grad=True), Told()
    optimizer = DistributedOptimizer(torch.optim.SGD([weight], lr=0.5), bond)

    def closure():
        loss = weight * 2
        loss.backward()
        return loss

    optimizer.note_loss(closure())
    optimizer.step()
    optimizer.step(closure)
    optimizer.step()
    assert bond.losses == [2.0, 0.0, None]

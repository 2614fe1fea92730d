"""Scripts that are not like the usual one: frozen layers, memory formats, fused optimisers, odd closures."""

from __future__ import annotations

import contextlib
import math
import warnings

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.join import Join
from torch.nn.parallel import DistributedDataParallel

import laconic
from laconic.core.errors import AttachError
from laconic.core.memory_order import flat as in_memory
from laconic.core.memory_order import shaped
from tests.dist.nets import agree, flat, loss_of, net
from tests.dist.pool import on_ranks
from tests.dist.runs import advance, compressed, everywhere, same, scaled_step

FORMATS = (torch.contiguous_format, torch.channels_last)


class Branches(nn.Module):
    """Three layers, the second of which is used or not."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.last = nn.Linear(20, 20), nn.Linear(20, 20), nn.Linear(20, 5)

    def forward(self, x, used):
        x = self.first(x)
        return self.last(self.second(x) if used else x)


class Convolutions(nn.Module):
    """The same of convolutions."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(3, 6, 3), nn.Conv2d(6, 6, 3, padding=1)

    def forward(self, x, used=True):
        x = self.first(x)
        return self.second(x) if used else x


def test_entries_go_to_their_places_and_back():
    wide = torch.randn(2, 3, 4, 5)
    for each in (wide, wide.to(memory_format=torch.channels_last), wide.mT, torch.tensor(1.0), wide[:1, :1]):
        entries = in_memory(each)
        assert torch.equal(shaped(entries, each), each)
    gaps = wide[:, ::2]
    assert torch.equal(shaped(torch.arange(80), gaps), torch.arange(80).view(2, 2, 4, 5))


@on_ranks(2, ("topk(density=0.1)", "cgx(min_size=100)"))
def test_a_fused_optimiser_skips_a_step_and_goes_on(spec):
    """It skips the step of an Inf by itself."""
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    model, optimizer, _ = compressed(spec, scaler=scaler, sgd={"lr": 0.05, "fused": True})
    for step in range(4):
        optimizer.zero_grad()
        before, bad = flat(model), step == 1 and dist.get_rank() == 0
        scaled_step(scaler, optimizer, loss_of(model, step) * (math.inf if bad else 1))
        assert torch.equal(before, flat(model)) == (step == 1)
    assert scaler.get_scale() == 4.0 and agree(model)


def unused_at(scale, fused, several):
    """How far a layer moves that is used in the first of three steps alone."""
    torch.manual_seed(0)
    model = DistributedDataParallel(Branches(), find_unused_parameters=True)
    first, second, last = (list(part.parameters()) for part in model.module.children())
    parts = [[*first, *last], second] if several else [[*first, *second, *last]]
    optimizers = [torch.optim.SGD(part, lr=0.1, fused=fused) for part in parts]
    scaler = torch.amp.GradScaler("cpu", init_scale=scale)
    laconic.compress(model, optimizers, "topk(density=0.1)", scaler=scaler)
    moved = []
    for step in range(3):
        for each in optimizers:
            each.zero_grad(set_to_none=False)  # a scaler wants gradients of each optimiser
        x = torch.randn(4, 20, generator=torch.Generator().manual_seed(step))
        scaler.scale(model(x, step == 0).square().sum()).backward()
        before = second[0].detach().clone()
        for each in optimizers:
            scaler.step(each)
        scaler.update()
        moved.append(float((second[0].detach() - before).norm()))
    return moved


@on_ranks(2, [(False, False), (True, False), (False, True), (True, True)])
def test_what_was_held_back_is_unscaled_once(fused, several):
    plain, scaled = (unused_at(scale, fused, several) for scale in (1.0, 1024.0))
    assert plain == pytest.approx(scaled, rel=1e-5) and min(plain) > 0


def image_loss(model, seed, *used):
    x = torch.randn(2, 3, 8, 8, generator=torch.Generator().manual_seed(seed + dist.get_rank()))
    return model(x, *used).square().mean()


def convolutions(form):
    torch.manual_seed(0)
    return Convolutions().to(memory_format=form)


def same_places(ends, most):
    """Check that parameters that differ in their order in memory are close."""
    first, *others = (torch.cat([each.detach().contiguous().flatten() for each in end]) for end in ends)
    assert all(float((other - first).abs().max()) < most for other in others)


@on_ranks(2)
def test_what_was_held_back_keeps_its_places():
    """Of a convolution that is used in the first of two steps."""
    found = []
    for form in FORMATS:
        sgd = {"lr": 0.1}
        model, optimizer, _ = compressed(
            "topk(density=0.2)", convolutions(form), sgd=sgd, find_unused_parameters=True
        )
        advance(model, optimizer, 1, lambda model, _: image_loss(model, 0, True))
        before = model.module.second.weight.detach().clone()
        advance(model, optimizer, 1, lambda model, _: image_loss(model, 0, False))
        found.append(before - model.module.second.weight.detach())
    assert bool(found[0].any()) and float((found[0] - found[1]).norm() / found[0].norm()) < 1e-3


@on_ranks(2)
def test_momentum_that_the_optimiser_has_gathered_keeps_its_places():
    """Plain SGD for three steps, then by dgc that sends nearly all: as plain SGD all the way."""
    ends = []
    for form, spec in ((FORMATS[0], None), (FORMATS[0], "dgc"), (FORMATS[1], "dgc")):
        model, optimizer, _ = compressed(None, convolutions(form), sgd={"lr": 0.1, "momentum": 0.9})
        for step in range(6):
            if step == 3 and spec:
                laconic.compress(model, optimizer, f"{spec}(density=1.0, masking=False)")
            advance(model, optimizer, [step], lambda model, step: image_loss(model, 7 * step))
        ends.append([*model.parameters()])
    same_places(ends, 1e-5)


@on_ranks(2)
def test_a_rank_without_inputs_follows_in_any_memory_format():
    """Rank 1 runs out of inputs; each memory format ends alike."""
    ends = []
    for form in FORMATS:
        model = DistributedDataParallel(convolutions(form))
        optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
        handle = laconic.compress(model, optimizer, "onebit_adam(warmup_steps=20)")
        with Join([model, handle]):
            steps = 2 if dist.get_rank() else 6
            advance(model, optimizer, steps, lambda model, step: image_loss(model, 9 * step))
        ends.append([*model.parameters()])
    same_places(ends, 1e-4)


def frozen(spec, momentum):
    """The distance that a layer moves in each of eight steps; it is frozen after three."""
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=momentum)
    first = model[0]
    if "sgp" in spec:
        model, optimizer = laconic.distribute(model, optimizer, spec)
    else:
        model = DistributedDataParallel(model, find_unused_parameters=True)
        laconic.compress(model, optimizer, spec)
    moved = []
    for step in range(8):
        first.requires_grad_(step < 3)
        before = first.weight.detach().clone()
        advance(model, optimizer, [step])
        moved.append(float((first.weight.detach() - before).norm()))
    return moved


@on_ranks(2, (("topk(density=0.05)", 0.0), ("dgc(density=0.05)", 0.9), ("cgx(min_size=100)", 0.0)))
def test_what_is_frozen_stays_where_it_is(spec, momentum):
    moved = frozen(spec, momentum)
    assert min(moved[:3]) > 0 and max(moved[3:]) == 0


@on_ranks(2)
def test_quasi_global_momentum_leaves_what_is_frozen():
    """But for what gossip still has to even out."""
    plain, quasi = (frozen(spec, 0.0) for spec in ("sgp()", "quasi_global(sgp())"))
    assert max(quasi[5:]) <= max(plain[5:]) + 1e-4


@on_ranks(2, ("local_sgd(every=2)", "topk(density=0.1)"))
def test_the_parameters_of_a_later_group_may_be_a_generator(spec):
    model = net()
    optimizer = torch.optim.SGD(model[1:].parameters(), lr=0.05)
    model, optimizer = laconic.distribute(model, optimizer, spec)
    first = getattr(model, "module", model)[0]
    before = first.weight.detach().clone()
    optimizer.add_param_group({"params": first.parameters()})
    advance(model, optimizer, 3)
    assert len(optimizer.param_groups[1]["params"]) == 2 and not torch.equal(before, first.weight)


@on_ranks(2, ("local_sgd(every=2)", "topk(density=0.1)"))
def test_a_closure_may_have_no_result(spec):
    model = net()
    model, optimizer = laconic.distribute(model, torch.optim.SGD(model.parameters(), lr=0.05), spec)
    before = flat(model)

    def closure():
        optimizer.zero_grad()
        loss_of(model, 0).backward()

    assert optimizer.step(closure) is None and not torch.equal(before, flat(model))


def by_machine(joined, shared=False):
    """Moves of a weight whose gradient is 1 on each rank; rank 0 overflows once, or runs out of inputs."""
    model = nn.Linear(1, 1, bias=False)
    nn.init.zeros_(model.weight)
    scaler = torch.amp.GradScaler("cpu", init_scale=4096.0)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    spec = "by_machine(local_sgd(every=1), ranks_per_node=2)"
    model, optimizer = laconic.distribute(model, optimizer, spec, **({"scaler": scaler} if shared else {}))
    first, moved = dist.get_rank() == 0, []
    with Join([optimizer]) if joined else contextlib.nullcontext():
        for step in range(1 if joined and first else 4):
            optimizer.zero_grad()
            loss = model(torch.ones(1, 1)).sum() * (math.inf if step == 1 and first and not joined else 1)
            before = model.weight.item()
            scaled_step(scaler, optimizer, loss)
            moved.append(model.weight.item() - before)
    return moved, model.weight.item()


@on_ranks(2)
def test_gradients_are_shared_as_what_they_are_worth():
    """Each rank has a GradScaler of its own, with another scale after the overflow, or all have one."""
    for shared in (False, True):
        assert by_machine(False, shared) == ([-1.0, 0.0, -1.0, -1.0], -3.0)
    assert by_machine(True) == ([-1.0] if dist.get_rank() == 0 else [-1.0, -0.5, -0.5, -0.5], -2.5)


class Running(nn.Module):
    """A running mean that `forward` puts in the place of the last one."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 2)
        self.register_buffer("mean", torch.zeros(4))

    def forward(self, x):
        self.mean = 0.9 * self.mean + 0.1 * x.detach().mean(0)
        return self.linear(x - self.mean)


@on_ranks(2)
def test_buffers_that_forward_replaces_are_averaged():
    model = Running()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer = laconic.distribute(model, optimizer, "local_sgd(every=2)")

    def loss(model, step):
        rng = torch.Generator().manual_seed(2 * step + dist.get_rank())
        return model(torch.randn(8, 4, generator=rng) + dist.get_rank()).square().sum()

    advance(model, optimizer, 4, loss)
    own = model.mean.clone()
    with optimizer.averaged():
        inside = model.mean.clone()
    assert torch.equal(model.mean, own)
    optimizer.finish()
    assert same(everywhere(inside), everywhere(model.mean)) and torch.equal(*everywhere(inside))


@on_ranks(2)
def test_a_rank_without_inputs_is_not_warned_of_its_steps():
    spec = "dgc(density=0.1)"
    model, optimizer, _ = compressed(spec, sgd={"lr": 0.05, "momentum": 0.9})
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        with Join([model]):
            advance(model, optimizer, range(3 if dist.get_rank() else 6))
    assert [str(each.message) for each in told] == [] and agree(model)


@on_ranks(2, [True, False])
def test_the_given_optimiser_does_not_step_alone(kept):
    spec = "local_sgd(every=2)"
    model = net()
    plain = torch.optim.SGD(model.parameters(), lr=0.05)
    found = laconic.distribute(model, plain, spec)
    if not kept:
        del found
    loss_of(model, 0).backward()
    with pytest.raises(AttachError) as caught:
        plain.step()
    if kept:
        found[1].step()
        found[1].remove()
        plain.step()
    said = str(caught.value)
    assert "step the optimiser that it returned" in said


def test_without_a_group_or_with_a_misspelt_option_the_way_out_is_named():
    model = net()
    plain = torch.optim.SGD(model.parameters(), lr=0.05)
    with pytest.raises(AttachError, match=r"did you mean patience_s=\?"):
        laconic.distribute(model, plain, "sgp()", patience=30)
    with pytest.raises(AttachError, match="init_process_group first"):
        laconic.distribute(model, plain, "sgp()")

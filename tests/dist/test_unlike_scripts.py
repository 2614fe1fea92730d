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


def overflows(spec):
    """A fused optimiser skips the step of an Inf by itself; then training goes on."""
    model = DistributedDataParallel(net())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, fused=True)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    laconic.compress(model, optimizer, spec, scaler=scaler)
    moved = []
    for step in range(4):
        optimizer.zero_grad()
        loss = loss_of(model, step) * (math.inf if step == 1 and dist.get_rank() == 0 else 1)
        scaler.scale(loss).backward()
        before = flat(model)
        scaler.step(optimizer)
        scaler.update()
        moved.append(not torch.equal(before, flat(model)))
    return moved, scaler.get_scale(), agree(model)


@pytest.mark.parametrize("spec", ["topk(density=0.1)", "cgx(min_size=100)"])
def test_a_fused_optimiser_skips_a_step_and_goes_on(pool, spec):
    assert pool.run(2, overflows, spec) == [([True, False, True, True], 4.0, True)] * 2


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


def unused_and_scaled(fused, several):
    plain, scaled = (unused_at(scale, fused, several) for scale in (1.0, 1024.0))
    return plain == pytest.approx(scaled, rel=1e-5) and min(plain) > 0


@pytest.mark.parametrize(("fused", "several"), [(False, False), (True, False), (False, True), (True, True)])
def test_what_was_held_back_is_unscaled_once(pool, fused, several):
    assert pool.run(2, unused_and_scaled, fused, several) == [True, True]


def unused_by_format():
    """How far apart is what an unused convolution gets in two memory formats, and whether it gets any."""
    found = []
    for form in FORMATS:
        torch.manual_seed(0)
        module = Convolutions().to(memory_format=form)
        model = DistributedDataParallel(module, find_unused_parameters=True)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        laconic.compress(model, optimizer, "topk(density=0.2)")
        for used in (True, False):
            optimizer.zero_grad()
            x = torch.randn(2, 3, 8, 8, generator=torch.Generator().manual_seed(dist.get_rank()))
            model(x, used).square().mean().backward()
            before = module.second.weight.detach().clone()
            optimizer.step()
        found.append(before - module.second.weight.detach())
    return float((found[0] - found[1]).norm() / found[0].norm()), bool(found[0].any())


def test_what_was_held_back_keeps_its_places(pool):
    for apart, any_moved in pool.run(2, unused_by_format):
        assert any_moved and apart < 1e-3


def momentum_by_format():
    """Plain SGD for three steps, then by dgc that sends nearly all: how far from plain SGD all the way."""
    ends = []
    for form, spec in ((FORMATS[0], None), (FORMATS[0], "dgc"), (FORMATS[1], "dgc")):
        torch.manual_seed(0)
        model = DistributedDataParallel(Convolutions().to(memory_format=form))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        for step in range(6):
            if step == 3 and spec:
                laconic.compress(model, optimizer, f"{spec}(density=1.0, masking=False)")
            optimizer.zero_grad()
            x = torch.randn(2, 3, 8, 8, generator=torch.Generator().manual_seed(7 * step + dist.get_rank()))
            model(x).square().mean().backward()
            optimizer.step()
        ends.append(torch.cat([each.detach().contiguous().flatten() for each in model.parameters()]))
    return [float((end - ends[0]).abs().max()) for end in ends[1:]]


def test_momentum_that_the_optimiser_has_gathered_keeps_its_places(pool):
    for contiguous, channels_last in pool.run(2, momentum_by_format):
        assert contiguous < 1e-5 and channels_last < 1e-5


def joined_by_format():
    """Rank 1 runs out of inputs; each memory format ends alike."""
    ends = []
    for form in FORMATS:
        torch.manual_seed(0)
        model = DistributedDataParallel(Convolutions().to(memory_format=form))
        optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
        handle = laconic.compress(model, optimizer, "onebit_adam(warmup_steps=20)")
        with Join([model, handle]):
            for step in range(2 if dist.get_rank() else 6):
                optimizer.zero_grad()
                x = torch.randn(
                    2, 3, 8, 8, generator=torch.Generator().manual_seed(9 * step + dist.get_rank())
                )
                model(x).square().mean().backward()
                optimizer.step()
        ends.append(torch.cat([each.detach().contiguous().flatten() for each in model.parameters()]))
    return float((ends[0] - ends[1]).abs().max())


def test_a_rank_without_inputs_follows_in_any_memory_format(pool):
    assert max(pool.run(2, joined_by_format)) < 1e-4


def frozen(spec, momentum):
    """A layer is frozen in the middle: how far it moves in each step after that."""
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
        if step == 3:
            first.requires_grad_(False)
        optimizer.zero_grad()
        before = first.weight.detach().clone()
        loss_of(model, step).backward()
        optimizer.step()
        moved.append(float((first.weight.detach() - before).norm()))
    return moved


@pytest.mark.parametrize(
    ("spec", "momentum"),
    [("topk(density=0.05)", 0.0), ("dgc(density=0.05)", 0.9), ("cgx(min_size=100)", 0.0)],
)
def test_what_is_frozen_stays_where_it_is(pool, spec, momentum):
    for moved in pool.run(2, frozen, spec, momentum):
        assert min(moved[:3]) > 0 and max(moved[3:]) == 0


def test_quasi_global_momentum_leaves_what_is_frozen(pool):
    """But for what gossip still has to even out."""
    plain, quasi = (pool.run(2, frozen, spec, 0.0) for spec in ("sgp()", "quasi_global(sgp())"))
    for one, other in zip(plain, quasi, strict=True):
        assert max(other[5:]) <= max(one[5:]) + 1e-4


def grown(spec):
    """The parameters of a later group come as a generator."""
    model = net()
    optimizer = torch.optim.SGD(model[1:].parameters(), lr=0.05)
    model, optimizer = laconic.distribute(model, optimizer, spec)
    first = getattr(model, "module", model)[0]
    before = first.weight.detach().clone()
    optimizer.add_param_group({"params": first.parameters()})
    for step in range(3):
        optimizer.zero_grad()
        loss_of(model, step).backward()
        optimizer.step()
    return len(optimizer.param_groups[1]["params"]), torch.equal(before, first.weight)


def closed(spec):
    """A closure without a result."""
    model = net()
    model, optimizer = laconic.distribute(model, torch.optim.SGD(model.parameters(), lr=0.05), spec)
    before = flat(model)

    def closure():
        optimizer.zero_grad()
        loss_of(model, 0).backward()

    return optimizer.step(closure), torch.equal(before, flat(model))


@pytest.mark.parametrize("spec", ["local_sgd(every=2)", "topk(density=0.1)"])
def test_generators_and_closures_without_a_result_are_taken(pool, spec):
    assert pool.run(2, grown, spec) == [(2, False)] * 2
    assert pool.run(2, closed, spec) == [(None, False)] * 2


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
            scaler.scale(loss).backward()
            before = model.weight.item()
            scaler.step(optimizer)
            scaler.update()
            moved.append(model.weight.item() - before)
    return moved, model.weight.item()


def test_gradients_are_shared_as_what_they_are_worth(pool):
    """Each rank has a GradScaler of its own, with another scale after the overflow, or all have one."""
    for shared in (False, True):
        assert pool.run(2, by_machine, False, shared) == [([-1.0, 0.0, -1.0, -1.0], -3.0)] * 2
    (first, end), (other, same) = pool.run(2, by_machine, True)
    assert first == [-1.0] and other == [-1.0, -0.5, -0.5, -0.5] and end == same == -2.5


class Running(nn.Module):
    """A running mean that `forward` puts in the place of the last one."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 2)
        self.register_buffer("mean", torch.zeros(4))

    def forward(self, x):
        self.mean = 0.9 * self.mean + 0.1 * x.detach().mean(0)
        return self.linear(x - self.mean)


def reassigned():
    model = Running()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer = laconic.distribute(model, optimizer, "local_sgd(every=2)")
    for step in range(4):
        optimizer.zero_grad()
        rng = torch.Generator().manual_seed(2 * step + dist.get_rank())
        model(torch.randn(8, 4, generator=rng) + dist.get_rank()).square().sum().backward()
        optimizer.step()
    own = model.mean.clone()
    with optimizer.averaged():
        inside = model.mean.clone()
    back = torch.equal(model.mean, own)
    optimizer.finish()
    return inside.tolist(), model.mean.tolist(), back


def test_buffers_that_forward_replaces_are_averaged(pool):
    (shown, end, back), (other, end_of_other, _) = pool.run(2, reassigned)
    assert shown == other == end == end_of_other and back


def told_in_join(spec):
    """What a rank is warned of that has run out of inputs, and the other one."""
    model = DistributedDataParallel(net())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    laconic.compress(model, optimizer, spec)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        with Join([model]):
            for step in range(3 if dist.get_rank() else 6):
                optimizer.zero_grad()
                loss_of(model, step).backward()
                optimizer.step()
    return [str(each.message) for each in told], agree(model)


def test_a_rank_without_inputs_is_not_warned_of_its_steps(pool):
    assert pool.run(2, told_in_join, "dgc(density=0.1)") == [([], True)] * 2


def stepped_alone(spec, kept):
    """The optimiser that was given to `distribute` is stepped, in place of what it returned."""
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
    return str(caught.value)


@pytest.mark.parametrize("kept", [True, False])
def test_the_given_optimiser_does_not_step_alone(pool, kept):
    for said in pool.run(2, stepped_alone, "local_sgd(every=2)", kept):
        assert "step the optimiser that it returned" in said


def test_without_a_group_or_with_a_misspelt_option_the_way_out_is_named():
    model = net()
    plain = torch.optim.SGD(model.parameters(), lr=0.05)
    with pytest.raises(AttachError, match=r"did you mean patience_s=\?"):
        laconic.distribute(model, plain, "sgp()", patience=30)
    with pytest.raises(AttachError, match="init_process_group first"):
        laconic.distribute(model, plain, "sgp()")

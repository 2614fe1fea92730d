"""`laconic.compress` in scripts as people write them."""

from __future__ import annotations

import logging
import warnings

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import laconic
from laconic.core.errors import AttachError
from tests.dist.nets import SGD, agree, flat, loss_of, net
from tests.dist.pool import on_ranks
from tests.dist.runs import advance, same


class Wrapped(nn.Module):
    """A module around another, as Fabric's."""

    def __init__(self, module):
        super().__init__()
        self._forward_module = module

    def forward(self, x):
        return self._forward_module(x)


@on_ranks(2, ["compile", "fabric"])
def test_a_wrapper_around_ddp_is_looked_into(wrap):
    """Ends of a training through a wrapper, and of one without."""
    ends = []
    for wrapper in (wrap, "none"):
        model = DistributedDataParallel(net())
        outer = Wrapped(model) if wrapper == "fabric" else model
        if wrapper == "compile":
            outer = torch.compile(model, backend="aot_eager")
        optimizer = torch.optim.SGD(model.parameters(), **SGD)
        handle = laconic.compress(outer, optimizer, "topk(density=0.1)")
        advance(outer, optimizer, 4)
        ends.append(flat(model))
        assert agree(model) and handle.stats().steps == 4
    assert torch.allclose(*ends, rtol=1e-4, atol=1e-6)


@on_ranks(2)
def test_several_inside_are_named():
    both = nn.ModuleList([DistributedDataParallel(net()), DistributedDataParallel(nn.Linear(2, 2))])
    with pytest.raises(AttachError, match="Sequential, Linear"):
        laconic.compress(both, torch.optim.SGD(both.parameters(), **SGD), "topk(density=0.1)")


def test_a_bare_model_is_told_where_the_wrapped_one_is():
    with pytest.raises(AttachError, match=r"got Linear.*model_wrapped"):
        laconic.compress(nn.Linear(2, 2), None, "topk(density=0.1)")


def trained(spec, build, step=None, steps=8):
    """The end of a training with these optimisers of a model, whether ranks agree and the handle's steps."""
    model = DistributedDataParallel(net(), bucket_cap_mb=0.01)
    optimizers = build(model)
    handle = laconic.compress(model, optimizers if len(optimizers) > 1 else optimizers[0], spec)
    for at in range(steps):
        for each in optimizers:
            each.zero_grad()
        if step is None:
            loss_of(model, at).backward()
        for each in optimizers:
            each.step() if step is None else step(each, model, at)
    return flat(model), agree(model), handle.stats().steps, handle.state_dict()


def halves(model):
    parameters = list(model.parameters())
    return parameters[::2], parameters[1::2]


def one_optimiser(model):
    first, second = halves(model)
    return [torch.optim.SGD([{"params": first}, {"params": second, "lr": 0.02}], **SGD)]


def two_optimisers(model):
    first, second = halves(model)
    return [torch.optim.SGD(first, **SGD), torch.optim.SGD(second, **{**SGD, "lr": 0.02})]


@on_ranks(2, ["dgc(density=0.05, warmup_steps=3)", "topk(density=0.1)", "cgx(min_size=100)"])
def test_two_optimisers_train_as_two_groups_of_one(spec):
    ends = [trained(spec, build) for build in (one_optimiser, two_optimisers)]
    assert all(same and steps == 8 for _, same, steps, _ in ends)
    assert torch.equal(ends[0][0], ends[1][0])


@on_ranks(2)
def test_momentum_methods_take_two_optimisers():
    spec = "onebit_adam(warmup_steps=2)"

    def build(model):
        return [torch.optim.AdamW(part, lr=1e-3, eps=1e-4) for part in halves(model)]

    _, same, steps, state = trained(spec, build)
    model = DistributedDataParallel(net(), bucket_cap_mb=0.01)
    laconic.compress(model, build(model), spec).load_state_dict(state)
    assert same and steps == 8


@on_ranks(2)
def test_a_parameter_belongs_to_one_optimiser():
    model = DistributedDataParallel(net())
    both = [torch.optim.SGD(model.parameters(), **SGD) for _ in range(2)]
    with pytest.raises(AttachError, match="two of the optimisers hold"):
        laconic.compress(model, both, "topk(density=0.1)")


@on_ranks(2, ["topk(density=0.1)", "dgc(density=0.05)"])
def test_a_closure_is_called_before_the_step(spec):
    def by_closure(optimizer, model, at):
        def closure():
            optimizer.zero_grad()
            loss = loss_of(model, at)
            loss.backward()
            return loss

        assert optimizer.step(closure) is not None

    closed = trained(spec, one_optimiser, by_closure)
    assert torch.equal(trained(spec, one_optimiser)[0], closed[0]) and closed[2] == 8


@on_ranks(2)
def test_lbfgs_is_refused():
    model = DistributedDataParallel(net())
    optimizer = torch.optim.LBFGS(model.parameters())
    laconic.compress(model, optimizer, "topk(density=0.1)")
    with pytest.raises(AttachError, match="many times"):
        optimizer.step(lambda: 1.0)


@on_ranks(2, ["topk(density=0.1)", "dgc(density=0.05)"])
def test_parameters_of_others_are_left_to_the_optimiser(spec):
    ends = []
    for extra in (False, True):
        model, other = DistributedDataParallel(net()), DistributedDataParallel(net(1))
        scale = nn.Parameter(torch.ones(()))
        held = [*model.parameters(), *([scale, *other.parameters()] if extra else [])]
        optimizer = torch.optim.SGD(held, **SGD)
        laconic.compress(model, optimizer, spec)
        for step in range(4):
            optimizer.zero_grad()
            (loss_of(model, step) + (scale - 3) ** 2 + loss_of(other, step)).backward()
            optimizer.step()
        ends.append(flat(model))
        moved = not torch.equal(flat(other), flat(net(1))) and float(scale.detach()) != 1
        assert agree(model) and agree(other) and moved == extra
    assert torch.equal(*ends)


@on_ranks(2, ["topk(density=0.1)", "cgx(min_size=100)", "dgc(density=0.05, warmup_steps=2)", "signum()"])
def test_a_group_may_be_added_later(spec):
    ends = []
    for later in (False, True):
        model = DistributedDataParallel(net())
        first, second = halves(model)
        groups = [{"params": first}, {"params": second, "lr": 0.02}]
        optimizer = torch.optim.SGD(groups[:1] if later else groups, **SGD)
        laconic.compress(model, optimizer, spec)
        if later:
            optimizer.add_param_group(groups[1])
        advance(model, optimizer, 4)
        ends.append(flat(model))
        assert agree(model)
    assert torch.equal(*ends)


@on_ranks(2)
def test_a_group_may_be_added_to_any_of_the_optimisers():
    """As `added_later`, to the second of two optimisers, whose weight decay is its own."""
    ends = []
    for later in (False, True):
        model = DistributedDataParallel(net())
        first, second = halves(model)
        kinds = [torch.optim.SGD(first, **SGD), torch.optim.SGD(second[1:], **{**SGD, "weight_decay": 0.1})]
        if not later:
            kinds[1].add_param_group({"params": second[:1]})
        laconic.compress(model, kinds, "dgc(density=0.05)")
        if later:
            kinds[1].add_param_group({"params": second[:1]})
        for step in range(4):
            for each in kinds:
                each.zero_grad()
            loss_of(model, step).backward()
            for each in kinds:
                each.step()
        ends.append(flat(model))
        assert agree(model)
    assert torch.equal(*ends)


@on_ranks(2)
def test_what_no_optimiser_has_is_not_updated():
    told = []
    handler = logging.Handler()
    handler.emit = lambda record: told.append(record.getMessage())
    logging.getLogger("laconic").addHandler(handler)
    model = DistributedDataParallel(net())
    first, second = halves(model)
    before = [each.clone() for each in second]
    optimizer = torch.optim.SGD(first, **SGD)
    laconic.compress(model, optimizer, "dgc(density=0.05)")
    logging.getLogger("laconic").removeHandler(handler)
    advance(model, optimizer, 4)
    assert len(told) == 1 and same(before, second) and agree(model)


@on_ranks(2, ["topk(density=0.1)", "cgx(min_size=100)"])
def test_a_redundancy_free_optimiser_steps_as_a_plain_one(spec):
    """ZeroRedundancyOptimizer steps a rank's share and broadcasts it: as the plain optimiser."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's own, about torch.jit
        from torch.distributed.optim import ZeroRedundancyOptimizer

    def build(model):
        return [ZeroRedundancyOptimizer(model.parameters(), torch.optim.SGD, lr=0.05, momentum=0.9)]

    def plain(model):
        return [torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)]

    sharded, literal = trained(spec, build), spec
    if spec.startswith("topk"):
        literal = f"error_fed({spec}, momentum='optimizer')"  # where the momentum of a wrapped SGD stays
    assert torch.equal(sharded[0], trained(literal, plain)[0]) and (sharded[1])


@on_ranks(2)
def test_the_python_reducer_is_refused_with_the_way_out():
    with torch._dynamo.config.patch(optimize_ddp="python_reducer"):
        model = DistributedDataParallel(net())
    with pytest.raises(AttachError, match="ddp_optimizer"):
        laconic.compress(model, torch.optim.SGD(model.parameters(), **SGD), "topk(density=0.1)")


@on_ranks(2)
def test_a_fused_adam_is_told_its_plain_name():
    model = DistributedDataParallel(net())
    with pytest.raises(AttachError, match="adamw_torch"):
        laconic.compress(model, torch.optim.AdamW(model.parameters(), fused=True), "onebit_adam()")

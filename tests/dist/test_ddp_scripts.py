"""`laconic.compress` in scripts as people write them."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import laconic
from laconic.core.errors import AttachError
from tests.dist.nets import SGD, agree, flat, loss_of, net


def go(model, optimizer, steps=4):
    for step in range(steps):
        optimizer.zero_grad()
        loss_of(model, step).backward()
        optimizer.step()


class Wrapped(nn.Module):
    """A module around another, as Fabric's."""

    def __init__(self, module):
        super().__init__()
        self._forward_module = module

    def forward(self, x):
        return self._forward_module(x)


def around(wrap):
    """Ends of a training through a wrapper, and of one without."""
    ends = []
    for wrapper in (wrap, "none"):
        model = DistributedDataParallel(net())
        outer = Wrapped(model) if wrapper == "fabric" else model
        if wrapper == "compile":
            outer = torch.compile(model, backend="aot_eager")
        optimizer = torch.optim.SGD(model.parameters(), **SGD)
        handle = laconic.compress(outer, optimizer, "topk(density=0.1)")
        go(outer, optimizer)
        ends.append(flat(model))
        assert agree(model) and handle.stats().steps == 4
    return torch.allclose(*ends, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("wrap", ["compile", "fabric"])
def test_a_wrapper_around_ddp_is_looked_into(pool, wrap):
    assert pool.run(2, around, wrap) == [True, True]


def two_inside():
    both = nn.ModuleList([DistributedDataParallel(net()), DistributedDataParallel(nn.Linear(2, 2))])
    with pytest.raises(AttachError) as caught:
        laconic.compress(both, torch.optim.SGD(both.parameters(), **SGD), "topk(density=0.1)")
    return str(caught.value)


def test_several_inside_are_named(pool):
    assert all("Sequential, Linear" in said for said in pool.run(2, two_inside))


def test_a_bare_model_is_told_where_the_wrapped_one_is():
    with pytest.raises(AttachError, match=r"got Linear.*model_wrapped"):
        laconic.compress(nn.Linear(2, 2), None, "topk(density=0.1)")


def fused():
    model = DistributedDataParallel(net())
    with pytest.raises(AttachError) as caught:
        laconic.compress(model, torch.optim.AdamW(model.parameters(), fused=True), "onebit_adam()")
    return str(caught.value)


def test_a_fused_adam_is_told_its_plain_name(pool):
    assert all("adamw_torch" in said for said in pool.run(2, fused))

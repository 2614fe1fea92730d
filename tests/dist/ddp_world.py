"""What a rank does under DDP in the tests of many methods: many buckets, a stop and go, a spike."""

from __future__ import annotations

import io
import math

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import laconic
from tests.dist.nets import SGD, flat, loss_of, net, train

MANY = {"bucket_cap_mb": 0.01}  # about eight buckets, regrouped after the first step


def stop_and_go(spec):
    """Ten steps, and four then six in a new process group's worth of objects."""
    whole = train(spec, steps=10, **MANY)[0]
    model = DistributedDataParallel(net(), **MANY)
    optimizer = torch.optim.SGD(model.parameters(), **SGD)
    handle = laconic.compress(model, optimizer, spec)
    for step in range(4):
        optimizer.zero_grad()
        loss_of(model, step).backward()
        optimizer.step()
    file = io.BytesIO()
    saved = {
        "model": model.module.state_dict(),
        "optimizer": optimizer.state_dict(),
        "laconic": handle.state_dict(),
    }
    torch.save(saved, file)
    file.seek(0)
    saved = torch.load(file, weights_only=True)
    assert all(key.startswith(f"rank{dist.get_rank()}/") for key in saved["laconic"]["tensors"])

    plain = net(seed=99)
    plain.load_state_dict(saved["model"])  # the trained model loads without Laconic
    model = DistributedDataParallel(plain)
    optimizer = torch.optim.SGD(model.parameters(), **SGD)
    optimizer.load_state_dict(saved["optimizer"])
    handle = laconic.compress(model, optimizer, spec)
    handle.load_state_dict(saved["laconic"])
    for step in range(4, 10):
        optimizer.zero_grad()
        loss_of(model, step).backward()
        optimizer.step()
    return whole, flat(model)


def spike(weight: torch.Tensor) -> torch.Tensor:
    """Zero, with a gradient that is Inf in one place."""
    return _Spike.apply(weight)


class _Spike(torch.autograd.Function):
    @staticmethod
    def forward(ctx, weight):  # type: ignore[no-untyped-def]
        ctx.save_for_backward(weight)
        return weight.new_zeros(())

    @staticmethod
    def backward(ctx, grad):  # type: ignore[no-untyped-def]
        (weight,) = ctx.saved_tensors
        out = torch.zeros_like(weight)
        out.view(-1)[7] = math.inf
        return out

"""What a rank does under `laconic.distribute` in the tests of many strategies: begin, train, stop and go."""

from __future__ import annotations

import torch
import torch.distributed as dist

import laconic
from tests.dist.nets import SGD, flat, loss_of, net


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

"""What a rank does under `laconic.distribute` in the tests of many strategies: begin, train, stop and go."""

from __future__ import annotations

import torch
import torch.distributed as dist

import laconic
from tests.dist.nets import SGD, flat, loss_of, momentum_for, net


def pair(spec, **options):
    model, momentum = net(seed=dist.get_rank()), momentum_for(spec)  # distribute makes replicas alike
    sgd = SGD | {"momentum": momentum, "nesterov": momentum > 0}
    return laconic.distribute(model, torch.optim.SGD(model.parameters(), **sgd), spec, **options)


def trained(spec, steps=6, **options):
    model, optimizer = pair(spec, **options)
    go(model, optimizer, range(steps))
    return model, optimizer


def go(model, optimizer, steps):
    for step in steps:
        optimizer.zero_grad()
        loss_of(model, step).backward()
        optimizer.step()


def resumed(make, go, total, stop):
    """A training that never stopped, and one that a new pair took over: each a model and its optimizer."""
    whole, first, second = make(), make(), make()
    go(*whole, range(total))
    go(*first, range(stop))
    saved = first[1].state_dict()
    second[0].load_state_dict({key: value.clone() for key, value in first[0].state_dict().items()})
    second[1].load_state_dict(saved)
    go(*second, range(stop, total))
    return whole, second


def stop_and_go(spec, total, stop):
    (whole, _), (model, _) = resumed(lambda: pair(spec), go, total, stop)
    return torch.equal(flat(whole), flat(model))

"""Bytes of a worker: a method runs on the stored gradient, and every byte is counted.

Each rank has the same gradient and draws its own random bits. The clock starts at step
LATE, after every warm-up; a figure is the mean over STEPS steps, the optimiser's step included.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.optim import SGD

from laconic.comm.loopback import Loopback
from laconic.comm.metered import Metered
from laconic.ddp.handle import Handle
from laconic.exchange.method import Method

STEPS, LATE = 16, 1_000_000  # 16: the longest round of a method that is silent in between


@dataclass(frozen=True)
class Bytes:
    """Of one rank, a step on average.

    Attributes:
        payload: What it hands to collectives, each message counted once.
        sent: What it puts on the wire: every copy of a message, without packet headers.
    """

    payload: float
    sent: float


def traffic(method: Method, gradient: Mapping[str, Tensor], size: int, steps: int = STEPS) -> Bytes:
    """Mean payload of a rank, and what the busiest of `size` ranks sends."""
    ranks = Loopback.run(size, lambda comm: one_rank(method, gradient, comm, steps), timeout_s=600.0)
    return Bytes(sum(each.payload for each in ranks) / size, max(each.sent for each in ranks))


def one_rank(method: Method, gradient: Mapping[str, Tensor], comm: Loopback, steps: int) -> Bytes:
    """The bytes of one rank in these steps, with the whole model in one bucket."""
    names: dict[Tensor, str] = {nn.Parameter(torch.zeros_like(part)): name for name, part in gradient.items()}
    parameters = list(names)
    made = [rule.make(parameters, lr=None, weight_decay=0.0) for rule in method.rules]
    optimizer = next((each for each in made if each is not None), None) or SGD(parameters, lr=0.1)
    if not isinstance(optimizer, SGD):
        for parameter in parameters:
            parameter.grad = torch.ones_like(parameter)
        optimizer.step()  # its state exists then, as after a warm-up
    metered = Metered(comm)
    handle = Handle(method, names, optimizer, metered)
    exchange = handle.exchange
    exchange.step = LATE
    for rule in exchange.rules:
        rule.end_warmup()
    try:
        for _ in range(steps):
            bucket = torch.cat([part.flatten() for part in gradient.values()])
            exchange.begin()
            exchange.mean_(bucket, handle.layout)
            exchange.end()
            for parameter, view in zip(parameters, handle.layout.segments.views(bucket), strict=True):
                parameter.grad = view.view_as(parameter)
            optimizer.step()
        meter = metered.snapshot()
        return Bytes(meter.payload_sent / steps, meter.bare_sent / steps)
    finally:
        handle.remove()

"""Payload of a worker: a method runs on the stored gradient, and every byte is counted.

There are RANKS ranks. Each has the same gradient and draws its own random bits. The clock starts at step
LATE, after every warm-up; the figure is the mean over ranks and STEPS steps, the optimiser's step included.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn
from torch.optim import SGD

from laconic.comm.loopback import Loopback
from laconic.comm.metered import Metered
from laconic.ddp.handle import Handle
from laconic.exchange.method import Method

RANKS, STEPS, LATE = 4, 16, 1_000_000  # 16: the longest round of a method that is silent in between


def payload(method: Method, gradient: Mapping[str, Tensor], steps: int = STEPS) -> float:
    """Bytes of a rank and step."""
    sent = Loopback.run(RANKS, lambda comm: one_rank(method, gradient, comm, steps))
    return sum(sent) / RANKS / steps


def one_rank(method: Method, gradient: Mapping[str, Tensor], comm: Loopback, steps: int) -> int:
    """The bytes that one rank sends in these steps, with the whole model in one bucket, as DDP has them."""
    names: dict[Tensor, str] = {nn.Parameter(torch.zeros_like(part)): name for name, part in gradient.items()}
    parameters = list(names)
    made = [rule.make(parameters, lr=None, weight_decay=0.0) for rule in method.rules]
    optimizer = next((each for each in made if each is not None), None) or SGD(parameters, lr=0.1)
    handle = Handle(method, names, optimizer, Metered(comm))
    exchange = handle.exchange
    exchange.step = LATE
    try:
        for _ in range(steps):
            bucket = torch.cat([part.flatten() for part in gradient.values()])
            exchange.begin()
            exchange.mean_(bucket, handle.layout)
            exchange.end()
            for parameter, view in zip(parameters, handle.layout.segments.views(bucket), strict=True):
                parameter.grad = view.view_as(parameter)
            optimizer.step()
        return handle.stats().payload_sent
    finally:
        handle.remove()

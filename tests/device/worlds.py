"""Ranks as threads that train the model of the laws, on any device."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from laconic.comm.loopback import Loopback
from laconic.comm.metered import Metered
from laconic.ddp.optimiser import Optimisers
from laconic.exchange.attached import Attached
from laconic.exchange.method import lift
from tests.laws.method_ranks import BUCKETS, SEED, optimizer_for
from tests.laws.worlds import MODEL, gradient

CPU, GPU = torch.device("cpu"), torch.device("privateuseone:0")  # named gpu by `install`


class Rank:
    """One rank of a model that trains by a method on a device."""

    def __init__(self, spec: str, comm: Loopback, device: torch.device) -> None:
        self.device = device
        self.comm = Metered(comm.split(0))
        method, rng = lift(spec), torch.Generator().manual_seed(1)
        self.parameters = {
            entry.name: nn.Parameter(torch.randn(entry.shape, generator=rng).to(device)) for entry in MODEL
        }
        self.optimizer = optimizer_for(method, [*self.parameters.values()])
        for group in self.optimizer.param_groups:
            group["foreach"] = False  # whose sums round otherwise, on the CPU too
        names: Mapping[Any, str] = {each: name for name, each in self.parameters.items()}
        self.hooks = Optimisers(self.optimizer, names, method.rules)
        self.exchange = Attached(method, MODEL, self.comm, self.hooks, SEED)

    def step(self, step: int) -> None:
        """One step by this rank's gradient, bucket by bucket."""
        flat = gradient(self.comm.rank, step).to(self.device)
        mean, exchange = torch.zeros_like(flat), self.exchange
        exchange.begin()
        for bucket in BUCKETS:
            at = [(entry, MODEL[entry.name].offset) for entry in bucket]
            part = torch.cat([flat[offset : offset + entry.numel] for entry, offset in at])
            exchange.mean_(part, bucket)
            for entry, offset in at:
                mean[offset : offset + entry.numel] = part[entry.offset : entry.offset + entry.numel]
        exchange.end()
        for name, view in zip(MODEL.names, MODEL.segments.views(mean), strict=True):
            self.parameters[name].grad = view.view(self.parameters[name].shape)
        if exchange.skip_reason is None:
            self.optimizer.step()

    def state(self) -> dict[str, Tensor]:
        """Parameters, and the memory of the method."""
        state = {name: each.detach().clone() for name, each in self.parameters.items()}
        state |= {f"exchange/{key}": value.clone() for key, value in self.exchange.state_dict().items()}
        return state


def trained(spec: str, device: torch.device, size: int = 2, steps: int = 4) -> list[dict[str, Tensor]]:
    """The state of every rank after some steps."""

    def play(comm: Loopback) -> dict[str, Tensor]:
        rank = Rank(spec, comm, device)
        for step in range(steps):
            rank.step(step)
        return rank.state()

    return Loopback.run(size, play)

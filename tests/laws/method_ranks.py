"""A small world for laws of methods: threads as ranks, each with a model, an optimiser and its exchange."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import SGD, Optimizer

from laconic.comm.comm import Comm
from laconic.comm.metered import Metered
from laconic.ddp.optimiser import Optimisers
from laconic.exchange.attached import Attached
from laconic.exchange.method import Method, lift

from .worlds import MODEL, cut, gradient, put, take

BUCKETS = cut(MODEL, 2, 2)  # the last tensors first, as DDP has them
SEED = 5


class Rank:
    """One rank of a model that trains by a method, from step `begin` of a training on."""

    def __init__(self, spec: str, comm: Comm, begin: int = 0) -> None:
        self.comm = Metered(comm.split(0))  # another may be at work in the same group
        self.method = lift(spec)
        rng = torch.Generator().manual_seed(1)
        self.parameters = {
            entry.name: nn.Parameter(
                torch.randn(entry.shape, generator=rng, dtype=torch.float32, device="cpu")
            )
            for entry in MODEL
        }
        self.optimizer = optimizer_for(self.method, [*self.parameters.values()])
        names: Mapping[Any, str] = {each: name for name, each in self.parameters.items()}
        self.hooks = Optimisers(self.optimizer, names, self.method.rules)
        self.exchange = Attached(self.method, MODEL, self.comm, self.hooks, SEED)
        self.exchange.step = begin

    @property
    def flat(self) -> Tensor:
        """A copy of the parameters, flat in the model's order."""
        return torch.cat([each.detach().flatten() for each in self.parameters.values()])

    def gradient(self, step: int) -> Tensor:
        """This rank's gradient of a step, flat."""
        return gradient(self.comm.rank, step)

    def step(self, flat: Tensor) -> bool:
        """One step by this flat gradient, bucket by bucket; False, and no update, if it is skipped."""
        mean, exchange = torch.zeros_like(flat), self.exchange
        exchange.begin()
        for bucket in BUCKETS:
            part = take(flat, MODEL, bucket)
            exchange.mean_(part, bucket)
            put(part, bucket, mean, MODEL)
        exchange.end()
        for name, view in zip(MODEL.names, MODEL.segments.views(mean), strict=True):
            self.parameters[name].grad = view.view(self.parameters[name].shape)
        if exchange.skip_reason is None:
            self.optimizer.step()
        return exchange.skip_reason is None

    def train(self, steps: Iterable[int]) -> None:
        """These steps of a training."""
        for step in steps:
            assert self.step(self.gradient(step))

    def memory(self) -> dict[str, Tensor]:
        """All that the method keeps on this rank, copied."""
        return {key: value.clone() for key, value in self.exchange.state_dict().items()}

    def take_over(self, other: Rank) -> None:
        """Go on where the other is, by what a checkpoint holds."""
        self.exchange.load_state_dict(other.memory(), step=other.exchange.step)
        self.optimizer.load_state_dict(other.optimizer.state_dict())
        with torch.no_grad():
            for name, each in self.parameters.items():
                each.copy_(other.parameters[name])

    def close(self) -> None:
        """As the handle's `remove` does: replicas are equal from here on."""
        self.exchange.rules.close()
        self.hooks.remove()


def optimizer_for(method: Method, parameters: list[Any]) -> Optimizer:
    """The one that a rule of the method is made for, or SGD with momentum."""
    made = (rule.make(parameters, lr=0.01, weight_decay=0.0) for rule in method.rules)
    own = next((each for each in made if each is not None), None)
    return own or SGD(parameters, lr=0.01, momentum=0.9, nesterov=True)

"""A contender at work: a model, an optimiser, and what passes between backward and the step."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD

from laconic.ddp.handle import Handle

LR, MOMENTUM = 1e-4, 0.9


class Steps(Protocol):
    """What a step asks of an optimiser."""

    def zero_grad(self) -> None: ...

    def step(self) -> object: ...


@dataclass(frozen=True)
class Running:
    """`exchange`: called after backward, where gradients are not exchanged behind it."""

    model: nn.Module
    optimizer: Steps
    exchange: Callable[[], None] = lambda: None
    handle: Handle | None = None

    def step(self, loss: Callable[[nn.Module], Tensor]) -> None:
        """Forward, backward, exchange, update."""
        self.optimizer.zero_grad()
        loss(self.model).backward()  # type: ignore[no-untyped-call]
        self.exchange()
        self.optimizer.step()


def sgd(model: nn.Module, momentum: float = MOMENTUM) -> SGD:
    """The optimiser that all have."""
    return SGD(model.parameters(), lr=LR, momentum=momentum)


def ddp(model: nn.Module, bucket_mb: float | None = None) -> DistributedDataParallel:
    """DDP with gradients that lie in its buckets, which spares all who use it a copy.

    Models are equal already, from their seed: nothing needs to cross a slow link.
    """
    return DistributedDataParallel(
        model, bucket_cap_mb=bucket_mb, gradient_as_bucket_view=True, init_sync=False
    )


def matrices(model: nn.Module) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    """Parameters of two dimensions and more, and the others."""
    parameters = list(model.parameters())
    return [p for p in parameters if p.dim() > 1], [p for p in parameters if p.dim() <= 1]


def gradient(parameter: nn.Parameter) -> Tensor:
    """Of the last backward pass."""
    assert parameter.grad is not None
    return torch.flatten(parameter.grad)

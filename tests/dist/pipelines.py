"""A small net cut in stages, its data, and what a rank does with it: for the tests of pipelines."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import laconic

WIDE, LONG, SAMPLES, MICROS = 16, 6, 24, 4
SCHEDULES = ("GPipe", "1F1B", "Interleaved1F1B")
ROOM = {"GPipe": 1, "1F1B": 1, "Interleaved1F1B": 2, "ZBVZeroBubble": 2}  # stages on a rank


def block(index: int) -> nn.Module:
    """One stage: equal wherever it is made."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(100 + index)
        return Residual(nn.Sequential(nn.Linear(WIDE, WIDE), nn.Tanh(), nn.Linear(WIDE, WIDE)))


class Residual(nn.Module):
    """x + inner(x): zero-bubble schedules refuse stages whose output is a view, as a linear layer's."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        return x + self.inner(x)


def data() -> tuple[Tensor, Tensor]:
    """Inputs and targets (samples, long, wide)."""
    rng = torch.Generator().manual_seed(1)
    return torch.randn(SAMPLES, LONG, WIDE, generator=rng), torch.randn(SAMPLES, LONG, WIDE, generator=rng)


def loss_fn(output: Tensor, target: Tensor) -> Tensor:
    return (output - target).square().mean()


def indices_of(kind: str, rank: int, size: int) -> list[int]:
    """This rank's stages."""
    if kind == "ZBVZeroBubble":
        return [rank, 2 * size - 1 - rank]
    return [rank + size * turn for turn in range(ROOM[kind])]


class Pipeline:
    """This rank's part of a pipeline, and its optimiser."""

    def __init__(
        self, kind: str = "GPipe", make: Callable[[int], nn.Module] = block, micros: int = MICROS
    ) -> None:
        from torch.distributed.pipelining import PipelineStage
        from torch.distributed.pipelining.schedules import get_schedule_class

        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        self.count = self.size * ROOM[kind]
        self.indices = indices_of(kind, self.rank, self.size)
        self.modules = [make(index) for index in self.indices]
        device = torch.device("cpu")
        self.stages = [
            PipelineStage(module, index, self.count, device)
            for index, module in zip(self.indices, self.modules, strict=True)
        ]
        given = self.stages if ROOM[kind] > 1 else self.stages[0]
        self.schedule: Any = get_schedule_class(kind)(given, micros, loss_fn=loss_fn)
        self.parameters = [each for module in self.modules for each in module.parameters()]
        self.optimizer = torch.optim.SGD(self.parameters, lr=0.05, momentum=0.9)

    @property
    def first(self) -> bool:
        return 0 in self.indices

    @property
    def last(self) -> bool:
        return self.count - 1 in self.indices

    def train(
        self, ids: Tensor, step: Callable[..., Any] | None = None, x: Tensor | None = None
    ) -> float | None:
        """One optimiser step on these samples; the loss, on the last stage's rank."""
        inputs, targets = data()
        losses: list[Tensor] = []
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)
            (step or self.schedule.step)(
                *([inputs[ids] if x is None else x] if self.first else []),
                **({"target": targets[ids], "losses": losses} if self.last else {}),
            )
        self.optimizer.step()
        self.optimizer.zero_grad()
        return torch.stack(losses).mean().item() if self.last else None

    @property
    def weights(self) -> Tensor:
        return torch.cat([each.detach().flatten() for each in self.parameters])


def order(step: int, batch: int = 8) -> Tensor:
    """The ids of a step: shuffled anew in each epoch."""
    steps = SAMPLES // batch
    rng = torch.Generator().manual_seed(step // steps)
    return torch.randperm(SAMPLES, generator=rng)[step % steps * batch :][:batch]


def trained(kind: str, steps: int, **options: Any) -> tuple[Tensor, list[float | None], Any]:
    """Weights, losses and the handle after some steps; torch's own pipeline without options."""
    pipeline = Pipeline(kind)
    handle = laconic.pipeline.compress(pipeline.schedule, **options) if options else None
    losses = []
    for step in range(steps):
        ids = order(step)
        if handle is not None:
            handle.samples = ids
        losses.append(pipeline.train(ids))
    return pipeline.weights, losses, handle

"""Parameters of an optimiser, and their gradients in flat buffers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

import torch
from torch import Tensor
from torch.optim import Optimizer

from laconic.core.errors import AttachError


def named(optimizer: Optimizer) -> dict[Tensor, str]:
    held = [
        (each, name)
        for group in optimizer.param_groups
        for each, name in zip(group["params"], group.get("param_names", group["params"]), strict=True)
        if each.requires_grad
    ]
    if not held:
        raise AttachError("this optimiser has no parameter with requires_grad: nothing to train")
    names = [name for _, name in held]
    if all(isinstance(name, str) for name in names) and len({*names}) == len(names):
        return {each: str(name) for each, name in held}
    return {each: f"{i}" for i, (each, _) in enumerate(held)}


@dataclass(frozen=True)
class GradientBucket:
    """Gradients of the parameters of one device and dtype, like a DDP bucket.

    `flat` (n,); complex gradients are pairs of reals.
    """

    number: int
    last: bool
    flat: Tensor
    held: Sequence[Tensor]

    def index(self) -> int:
        return self.number

    def is_last(self) -> bool:
        return self.last

    def buffer(self) -> Tensor:
        return self.flat

    def parameters(self) -> list[Tensor]:
        return list(self.held)

    def gradients(self) -> list[Tensor]:
        whole = torch.view_as_complex(self.flat.view(-1, 2)) if self.held[0].is_complex() else self.flat
        parts = torch.split(whole, [each.numel() for each in self.held])
        return [part.view(each.shape) for part, each in zip(parts, self.held, strict=True)]

    def fill(self) -> None:
        for view, each in zip(self.gradients(), self.held, strict=True):
            if each.grad is None:
                view.zero_()
            else:
                view.copy_(dense(each.grad))

    def write_gradients(self) -> None:
        for view, each in zip(self.gradients(), self.held, strict=True):
            if each.grad is None or each.grad.is_sparse:
                each.grad = torch.empty_like(each)
            each.grad.copy_(view)


def dense(grad: Tensor) -> Tensor:
    return grad.detach().to_dense() if grad.is_sparse else grad.detach()


def buckets(parameters: Sequence[Tensor]) -> list[GradientBucket]:
    kinds = [(str(each.device), str(each.dtype)) for each in parameters]
    order = sorted(range(len(parameters)), key=lambda i: kinds.index(kinds[i]))
    found = [[parameters[i] for i in run] for _, run in groupby(order, key=lambda i: kinds[i])]
    made = []
    for number, held in enumerate(found):
        reals = 2 if held[0].is_complex() else 1
        numel = reals * sum(each.numel() for each in held)
        flat = torch.zeros(numel, dtype=held[0].dtype.to_real(), device=held[0].device)
        made.append(GradientBucket(number, number == len(found) - 1, flat, held))
    return made

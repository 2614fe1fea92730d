"""An optimiser's slots: what it keeps for each entry of a parameter, such as momentum."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.optim import Optimizer


def slots(optimizer: Optimizer, parameter: Tensor) -> list[Tensor]:
    """The tensors of the parameter's shape that the optimiser keeps for it: SGD's momentum, Adam's moments.

    >>> weight = torch.nn.Parameter(torch.zeros(2))
    >>> adam = torch.optim.Adam([weight])
    >>> weight.grad = torch.ones(2)
    >>> adam.step()
    >>> [slot.tolist() for slot in slots(adam, weight)]
    [[0.10000000149011612, 0.10000000149011612], [0.0010000000474974513, 0.0010000000474974513]]
    """
    kept = optimizer.state.get(parameter, {}).values()
    return [
        slot for slot in kept if isinstance(slot, Tensor) and slot.shape == parameter.shape and slot.dim()
    ]


@torch.no_grad()
def clear_(optimizer: Optimizer, parameter: Tensor, entries: Tensor) -> None:
    """Set these entries, bool in the parameter's shape, to zero, in the parameter and in all of its slots."""
    for each in (parameter, *slots(optimizer, parameter)):
        each.masked_fill_(entries, 0)

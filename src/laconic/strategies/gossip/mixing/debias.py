"""Check for optimisers that can update the numerator x = w z with the gradient at z."""

from __future__ import annotations

import torch
from torch.optim import Optimizer

from laconic.core.errors import AttachError
from laconic.optim.own_step import steps_as

# their step does not depend on the scale of x; weight decay shrinks x and z by the same factor
ADDITIVE = (
    torch.optim.SGD,
    torch.optim.Adam,
    torch.optim.AdamW,
    torch.optim.Adamax,
    torch.optim.NAdam,
    torch.optim.RAdam,
    torch.optim.RMSprop,
    torch.optim.Adagrad,
    torch.optim.Adadelta,
)


def check_debiased(strategy: object, optimizer: Optimizer) -> None:
    if not steps_as(optimizer, *ADDITIVE):
        known = ", ".join(each.__name__ for each in ADDITIVE)
        raise AttachError(
            f"{strategy!r} applies the optimiser to w times the parameters, but the step of"
            f" {type(optimizer).__name__} may depend on their scale: use {known}, or sgp() on a regular graph"
            " such as exponential(), where w is 1"
        )

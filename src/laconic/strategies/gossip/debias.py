"""Which optimisers can work on the numerator x = w z while the gradient is that at z."""

from __future__ import annotations

import torch
from torch.optim import Optimizer

from laconic.core.errors import AttachError

# Their step is added to x whatever its scale; weight decay shrinks x, and so z, by the same factor.
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
    """Raise `AttachError` for an optimiser whose step may depend on the scale of the parameters."""
    if not isinstance(optimizer, ADDITIVE):
        known = ", ".join(each.__name__ for each in ADDITIVE)
        raise AttachError(
            f"{strategy!r} lets the optimiser work on w times the parameters, and of"
            f" {type(optimizer).__name__} it is not known that its step does not depend on their scale: take"
            f" {known}, or sgp() on a regular graph such as exponential(), where w is 1"
        )

"""The exchange that a rule keeps inside the optimiser's step, and the state of it."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from laconic.core.errors import NonFiniteError
from laconic.strategies.exchange import Exchange


def mean_of(parts: list[Tensor], exchange: Exchange, step: int) -> Tensor:
    """The group's mean of these tensors, one after the other, by an exchange of its own at this step."""
    flat = torch.cat(parts)
    exchange.step = step
    exchange.begin()
    finite = exchange.mean_(flat, exchange.layout)
    exchange.end()
    if not finite:
        raise NonFiniteError(
            f"the momentum of step {step} is not finite ({exchange.void}), though its gradients were: no"
            " parameter was changed; lower the learning rate"
        )
    return flat


def split(
    state: Mapping[str, Tensor], prefix: str, *, keep: bool = False
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """The tensors under a prefix, without it unless `keep`, and the others."""
    cut = 0 if keep else len(prefix)
    under = {key[cut:]: value for key, value in state.items() if key.startswith(prefix)}
    return under, {key: value for key, value in state.items() if not key.startswith(prefix)}

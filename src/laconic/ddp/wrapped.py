"""Optimisers as trainers wrap them: torch's own inside, and the GradScaler that steps it.

Hooks on a wrapper would never run, as it hands `step` on to the optimiser inside. Nothing is imported here:
where a library is not loaded, nothing of it can be given.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from laconic.core import arguments
from laconic.core.errors import AttachError

# Of each wrapper: the package that it is of, and where it has its GradScaler, if there is one.
WRAPPERS = {
    "AcceleratedOptimizer": (("accelerate",), ("scaler",)),
    "LightningOptimizer": (("lightning", "pytorch_lightning"), ("_strategy", "precision_plugin", "scaler")),
    "_FabricOptimizer": (("lightning", "lightning_fabric"), ("_strategy", "precision", "scaler")),
}

Optimizers = Optimizer | Sequence[Optimizer]


def unwrapped(
    optimizer: Optimizers, scaler: torch.amp.GradScaler | None
) -> tuple[Optimizers, torch.amp.GradScaler | None]:
    """The same optimisers without the wrappers of a trainer, and the GradScaler: as given, or theirs.

    Raises `AttachError` if what was given is no optimiser or no scaler, or not the one by which a wrapper
    steps.
    """
    check_is_scaler(scaler)
    opened = [_opened(each) for each in all_of(optimizer)]
    for _, found in opened:
        if found is not None and scaler is not None and found is not scaler:
            raise AttachError(
                "scaler= is not the GradScaler by which this optimiser steps: leave it out, and that of the"
                " trainer is used"
            )
        scaler = scaler or found
    plain = [each for each, _ in opened]
    return (plain[0] if isinstance(optimizer, Optimizer) else plain), scaler


def all_of(given: object) -> list[Optimizer]:
    """One optimiser, or several, as a list. Raises `AttachError` for none, and for anything else."""
    found: list[Optimizer] = []
    for each in given if isinstance(given, Iterable) else [given]:
        if not isinstance(each, Optimizer):
            raise AttachError(
                "optimizer= takes the torch.optim.Optimizer that steps the model's parameters, or a list of"
                f" several, got {type(each).__name__}{_instead_of(each)}"
            )
        found.append(each)
    if not found:
        raise AttachError(
            "there is no optimiser in this list: give the one that steps the model's parameters, or several"
        )
    return found


def _instead_of(given: object) -> str:
    """The way out, where it is known."""
    if isinstance(given, LRScheduler):
        return ": give its optimiser, scheduler.optimizer"
    if isinstance(given, torch.Tensor):
        return ": build one over them, such as torch.optim.SGD(model.parameters(), lr=0.1)"
    return ""


def check_is_scaler(scaler: object) -> None:
    """Raise `AttachError` for what is neither a GradScaler, of torch or of another device, nor None."""
    if scaler is not None and not callable(getattr(scaler, "get_scale", None)):
        raise AttachError(
            f"scaler= takes the GradScaler that the script steps by, got {arguments.shown(scaler)}: give"
            " torch.amp.GradScaler(...), or leave it out where there is none"
        )


def _opened(optimizer: Optimizer) -> tuple[Optimizer, torch.amp.GradScaler | None]:
    """The optimiser inside, and the scaler of the wrapper around it; one that is not wrapped is itself."""
    for kind in type(optimizer).__mro__:
        packages, path = WRAPPERS.get(kind.__name__, ((), ()))
        if kind.__module__.split(".")[0] in packages:
            scaler: Any = optimizer
            for name in path:
                scaler = getattr(scaler, name, None)
            inner: Any = optimizer
            inside, deeper = _opened(inner.optimizer)
            return inside, deeper or scaler
    return optimizer, None

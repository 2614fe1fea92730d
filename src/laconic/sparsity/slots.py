"""Slots of an optimiser: state tensors shaped like a parameter."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.optim import Adagrad, Optimizer, Rprop

from laconic.core.errors import AttachError

MAX_DEPTH = 5


def slots(optimizer: Optimizer, parameter: Tensor) -> list[Tensor]:
    """Return the optimiser's slots of a parameter.

    >>> weight = torch.nn.Parameter(torch.zeros(2))
    >>> adam = torch.optim.Adam([weight])
    >>> weight.grad = torch.ones(2)
    >>> adam.step()
    >>> [slot.tolist() for slot in slots(adam, weight)]
    [[0.10000000149011612, 0.10000000149011612], [0.0010000000474974513, 0.0010000000474974513]]
    """
    return [slot for _, slot in _named(optimizer, parameter)]


@torch.no_grad()
def clear_(optimizer: Optimizer, parameter: Tensor, entries: Tensor) -> None:
    """Reset these entries (bool, shaped like the parameter): zero weight, initial slots.

    Initial slots are 0, except Rprop's step sizes (learning rate) and Adagrad's sums
    (`initial_accumulator_value`). Raises `AttachError` for integer slots, whose zero is unknown.
    """
    named = list(_named(optimizer, parameter))
    for name, slot in named:
        if not (slot.is_floating_point() or slot.is_complex() or slot.dtype == torch.bool):
            raise AttachError(
                f"{type(optimizer).__name__} has {name} of a weight as {slot.dtype}, which sparse training"
                " cannot clear entry by entry: use an optimiser with floating-point state"
            )
    parameter.masked_fill_(entries, 0)
    for name, slot in named:
        slot.masked_fill_(entries, _first_value(optimizer, parameter, name))


def _named(optimizer: Optimizer, parameter: Tensor) -> Iterator[tuple[str, Tensor]]:
    kept = optimizer.state.get(parameter, {})
    yield from (pair for pair in _tensors(kept) if pair[1].shape == parameter.shape and pair[1].dim())


def _tensors(value: Any, name: str = "", depth: int = 0) -> Iterator[tuple[str, Tensor]]:
    if depth > MAX_DEPTH:
        return
    if isinstance(value, Tensor):
        yield name, value
    elif isinstance(value, Mapping):
        for key, each in value.items():
            yield from _tensors(each, name or str(key), depth + 1)
    elif isinstance(value, (list, tuple)):
        for each in value:
            yield from _tensors(each, name, depth + 1)
    elif hasattr(value, "__dict__") and not callable(value):
        yield from _tensors(vars(value), name, depth + 1)


def _first_value(optimizer: Optimizer, parameter: Tensor, slot: str) -> float:
    setting = {(Rprop, "step_size"): "lr", (Adagrad, "sum"): "initial_accumulator_value"}
    for (kind, name), key in setting.items():
        if isinstance(optimizer, kind) and name == slot:
            for group in optimizer.param_groups:
                if any(each is parameter for each in group["params"]):
                    return float(group[key])
    return 0.0

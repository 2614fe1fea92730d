"""Validation of a state of `admm`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from laconic.core.errors import StateError


def read_state(
    state: Any, own: Mapping[str, Any], weights: Mapping[str, Tensor]
) -> tuple[tuple[int, int, float], dict[str, Tensor]]:
    """Return (steps, updates, gamma), and copies of the tensors on the weights' devices.

    Raises `StateError` unless the untrusted `state` is valid and has the items `own`.
    """
    if not isinstance(state, Mapping):
        raise StateError(f"a state of admm must be a dict, got {type(state).__name__}")
    for key, value in own.items():
        if state.get(key) != value:
            raise StateError(
                f"saved with different {key}: {state.get(key)!r}, not {value!r}; use the same arguments"
            )
    steps, updates, gamma = (state.get(key) for key in ("steps", "updates", "gamma"))
    if type(steps) is not int or type(updates) is not int or not isinstance(gamma, (int, float)):
        raise StateError(
            f"steps, updates and gamma must be numbers, got {steps!r}, {updates!r} and {gamma!r}: {DAMAGED}"
        )
    tensors = state.get("tensors")
    if not isinstance(tensors, Mapping):
        raise StateError(f"the state lacks its tensors: {DAMAGED}")
    read = {}
    for name, weight in weights.items() if tensors else ():
        shape = tuple(weight.shape)
        scales = (shape[0], 1), (1, 1)
        read[f"alpha/{name}"] = _read(tensors, f"alpha/{name}", torch.float32, scales, weight.device)
        read[f"q/{name}"] = _read(tensors, f"q/{name}", torch.int8, (shape,), weight.device)
        read[f"lambda/{name}"] = _read(tensors, f"lambda/{name}", torch.float32, (shape,), weight.device)
    return (steps, updates, float(gamma)), read


DAMAGED = "it is damaged, load another checkpoint"


def _read(
    tensors: Mapping[str, Any],
    name: str,
    dtype: torch.dtype,
    shapes: tuple[tuple[int, ...], ...],
    device: torch.device,
) -> Tensor:
    found = tensors.get(name)
    if not isinstance(found, Tensor):
        raise StateError(f"the state lacks {name!r}: {DAMAGED}")
    if found.dtype is not dtype or tuple(found.shape) not in shapes:
        raise StateError(
            f"{name!r} must be {dtype} {shapes[0]}, got {found.dtype} {tuple(found.shape)}: {DAMAGED}"
        )
    return found.detach().to(device, copy=True)

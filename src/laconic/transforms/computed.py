"""Weights that torch.nn.utils computes by hooks, or by parametrizations, which change a layer's class."""

from __future__ import annotations

import copy
from typing import Any, TypeVar

from torch import Tensor, nn
from torch.nn.utils import parametrize

from laconic.core.errors import AttachError

Model = TypeVar("Model", bound=nn.Module)
FIX = "remove weight_norm, spectral_norm or pruning of torch.nn.utils first"


def plain_type(layer: nn.Module) -> type:
    """Return the class of a layer without parametrizations.

    >>> plain_type(nn.utils.parametrizations.weight_norm(nn.Linear(2, 2)))
    <class 'torch.nn.modules.linear.Linear'>
    """
    return parametrize.type_before_parametrizations(layer)


def refuse_parametrised(name: str, layer: nn.Module) -> None:
    if parametrize.is_parametrized(layer):
        raise AttachError(
            f"{name!r} has parametrizations, so its weights are computed: torch.nn.utils.parametrize."
            f"remove_parametrizations() first, or keep the layer with keep=({name!r},)"
        )


def refuse_computed(name: str, layer: nn.Module) -> None:
    for key, part in vars(layer).items():
        if isinstance(part, Tensor) and key.startswith(("weight", "bias")):
            raise AttachError(
                f"{_of(name, key)} is computed by a hook: {FIX}, or keep its layer with keep=({name!r},)"
            )


def copy_model(model: Model, memo: dict[int, Any] | None = None) -> Model:
    """Return a deep copy. Raises `AttachError` if a module stores a tensor computed from parameters."""
    for name, module in model.named_modules():
        for key, part in vars(module).items():
            if isinstance(part, Tensor) and not part.is_leaf:
                raise AttachError(
                    f"{_of(name, key)} is computed from parameters, and such a tensor cannot be copied:"
                    f" {FIX}; or set a result stored by your own module to None"
                )
    return copy.deepcopy(model, memo)


def _of(name: str, key: str) -> str:
    return repr(f"{name}.{key}" if name else key)

"""`convert`: copy a float32 model with low-bit layers."""

from __future__ import annotations

from collections.abc import Callable, Collection
from itertools import chain
from typing import Any

import torch
from torch import nn

from laconic.core.errors import AttachError
from laconic.lowbit.add import Add, QuantAdd
from laconic.lowbit.evonorm import EvoNormS0, RangeEvoNorm
from laconic.lowbit.grid import Precision, Rounding
from laconic.lowbit.layers import QuantConv2d, QuantLinear
from laconic.lowbit.range_norm import RangeGroupNorm, RangeNorm
from laconic.transforms.computed import copy_model
from laconic.transforms.fast_path import FastPathOff
from laconic.transforms.keep import check_keep
from laconic.transforms.selection import named_modules, refuse_hooks

LAYERS: dict[type, Callable[[Any, Precision], nn.Module]] = {
    nn.Conv2d: QuantConv2d.of,
    nn.Linear: QuantLinear.of,
    nn.BatchNorm2d: RangeNorm.of,
    nn.GroupNorm: RangeGroupNorm.of,
    EvoNormS0: RangeEvoNorm.of,
    Add: QuantAdd.of,
}


def convert(
    model: nn.Module,
    bits: int = 8,
    *,
    seed: int = 0,
    rounding: Rounding = "nearest",
    keep: Collection[str] = (),
) -> nn.Module:
    """Copy a model with low-bit layers for Conv2d, Linear, BatchNorm2d, GroupNorm, EvoNormS0 and Add.

    Build the optimiser from the copy's float32 parameters. Write the sums of residual blocks as `lowbit.Add`,
    or they stay float32; layers without parameters do not change. The copy saves neither time nor memory. To
    resume with the same bits, use the same seed and load the model's `state_dict`.

    Args:
        model: Float32; not changed.
        bits: Bits of activations, weights and gradients, 2 to 8.
        seed: Seed of rounding, different on each rank.
        rounding: Of activations: "nearest" or "stochastic". Activation checkpointing draws the
            same bits again for a layer's last 512 calls.
        keep: Modules that stay float32, with children.

    Raises:
        AttachError: A module with parameters has no low-bit form, has hooks, or is not float32; a hook
            computes a weight; `keep` names no module.

    >>> net = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(32, 10))
    >>> [type(layer).__name__ for layer in convert(net)]
    ['QuantConv2d', 'RangeNorm', 'ReLU', 'Flatten', 'QuantLinear']
    """
    precision = Precision(bits, rounding, seed)
    check_keep(named_modules(model), keep)
    with _device_of(model):  # for layers without parameters, such as Add
        made = _convert(copy_model(model), "", precision, keep, {})
    FastPathOff(made, [module for module in made.modules() if isinstance(module, (QuantConv2d, QuantLinear))])
    return made


def _device_of(model: nn.Module) -> torch.device:
    tensors = chain(model.parameters(), model.buffers())
    return next((each.device for each in tensors), torch.device("cpu"))


def _convert(
    module: nn.Module,
    name: str,
    precision: Precision,
    keep: Collection[str],
    done: dict[nn.Module, nn.Module],
) -> nn.Module:
    if name in keep:
        return module
    if module not in done:
        make = LAYERS.get(type(module))
        done[module] = module if make is None else _convert_layer(make, module, name, precision)
        if make is None:
            _check_no_parameters(module, name, precision.bits)
            for key, child in module._modules.items():  # named_children() lists a shared child once
                if child is not None:
                    inside = f"{name}.{key}" if name else key
                    setattr(module, key, _convert(child, inside, precision, keep, done))
    return done[module]


def _convert_layer(
    make: Callable[[Any, Precision], nn.Module], module: nn.Module, name: str, precision: Precision
) -> nn.Module:
    refuse_hooks(name, module, "low-bit form", "after convert()")
    tensors = [*chain(module.parameters(), module.buffers())]
    for each in module.parameters():
        if each.dtype is not torch.float32:
            raise AttachError(
                f"{name!r} is {each.dtype}, but low-bit layers need float32: call model.float() first"
            )
    try:
        made = make(module, precision.at(name))
    except AttachError as error:
        raise AttachError(f"{name!r}: {error}") from None
    return (made.to(tensors[0].device) if tensors else made).train(module.training)


def _check_no_parameters(module: nn.Module, name: str, bits: int) -> None:
    own = next(module.named_parameters(recurse=False), None)
    if own is None:
        return
    known = ", ".join(kind.__name__ for kind in LAYERS)
    hint = f"keep it in float32 with keep=({name!r},)" if name else "convert its parts first"
    raise AttachError(
        f"{repr(name) if name else 'this model'} is a {type(module).__name__} with a parameter {own[0]!r},"
        f" but only {known} have a {bits}-bit form: {hint}"
    )

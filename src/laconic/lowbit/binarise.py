"""`binarise` and `quantise`: a model that trains with few bits in its products.

Courbariaux et al. 2016, arXiv:1602.02830 (signs) and Hubara et al. 2016, arXiv:1609.07061
(more bits), checked against the authors' code: signs with sign(0) = 1, float32 master weights clipped to
[-1, 1] after each step, the gradient of a hard tanh. The equations are in `few_bit_layers` and `levels`;
what is ours is said there.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from typing import Any, Literal, get_args

import torch
from torch import nn

from laconic.core import arguments
from laconic.core.errors import AttachError
from laconic.lowbit.few_bit_handle import FewBitHandle
from laconic.lowbit.few_bit_layers import KINDS
from laconic.lowbit.few_bits import FewBits, Rounding, Scale
from laconic.lowbit.shift_norm import ShiftBatchNorm
from laconic.transforms.keep import is_kept
from laconic.transforms.selection import Layers, named_modules

First = Literal["real", "weights", "binary"]
Last = Literal["real", "binary"]
Norm = Literal["float", "shift"]
KIND_NAMES = "Linear, Conv2d, LSTMCell and GRUCell"
FIRSTS, LASTS, NORMS = get_args(First), get_args(Last), get_args(Norm)


def binarise(
    model: nn.Module,
    first: First = "real",
    last: Last = "real",
    stochastic: bool = False,
    *,
    norm: Norm = "float",
    keep: Collection[str] = (),
    seed: int = 0,
) -> FewBitHandle:
    """Train a model with the signs of its weights and of the inputs of its layers, from now on.

    The model changes in place. Its parameters are the same objects, float32 and under the same names:
    optimisers, DistributedDataParallel, `laconic.compress` and `state_dict` work as before. Each step of an
    optimiser clips the treated layers' weights to [-1, 1]. Sign what has both signs: end a block by a
    BatchNorm, without a ReLU before the next layer, for a ReLU's results all have the sign 1. `pack` makes
    the model for use of what was trained.

    The arithmetic is that of float32: training takes no less time or memory than before.

    Args:
        model: Its Linear, Conv2d, LSTMCell and GRUCell layers are replaced.
        first: The first of these layers, in the model's own order: "real" (default) leaves it as it is,
            "weights" takes the signs of its weights alone, "binary" treats it as the others.
        last: "real" (default) leaves the last one as it is, "binary" treats it as the others.
        stochastic: Draw the signs of inputs in training, P(1) = clip((x + 1) / 2, 0, 1); default: no.
            Activation checkpointing repeats the draws of a layer's last 512 calls.
        norm: "shift" replaces BatchNorm by `ShiftBatchNorm`; default: "float", as it is.
        keep: Names of modules that do not change, with everything inside; default: none.
        seed: Of what is drawn; give each rank its own. Default: 0.

    Returns:
        The handle, which counts flips of signs, saves the state of what is drawn, and takes it all back.

    Raises:
        SpecError: An argument is out of range.
        AttachError: The model has no such layers, or is one itself, or is treated already; a layer is not
            float32, shares a weight, has hooks, or pads otherwise than with a number of zeros; `keep` names
            no module. Nothing has changed then.

    >>> net = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 8), nn.Linear(8, 2))
    >>> handle = binarise(net)
    >>> [type(layer).__name__ for layer in net]
    ['Linear', 'BatchNorm1d', 'FewBitLinear', 'Linear']
    """
    bits = FewBits(stochastic=stochastic, seed=seed)
    return _attach(model, bits, first, last, norm, keep)


def quantise(
    model: nn.Module,
    weights: int = 1,
    activations: int | None = 2,
    gradients: int | None = 6,
    *,
    scale: Scale = "linear",
    first: First = "real",
    last: Last = "real",
    stochastic: bool = False,
    norm: Norm = "float",
    keep: Collection[str] = (),
    seed: int = 0,
) -> FewBitHandle:
    """Train a model with few bits in the weights, the inputs and the gradients of its layers, from now on.

    As `binarise`, which is one bit in weights and inputs and float32 gradients.

    Args:
        model: Its Linear, Conv2d, LSTMCell and GRUCell layers are replaced.
        weights: Bits of weights, 1 to 8; default: 1.
        activations: Bits of inputs, 1 to 8, or None for float32; default: 2.
        gradients: Bits of the gradients of results, 3 to 8, or None for float32: powers of two, rounded at
            random. Default: 6.
        scale: "linear" (default), evenly spaced levels from -1 to 1, or "log", powers of two. Only linear
            models can be packed.
        first: As for `binarise`: "binary" treats the layer as the others.
        last: As for `binarise`.
        stochastic: Round inputs at random in training; default: no. Activation checkpointing repeats the
            bits of a layer's last 512 calls.
        norm: As for `binarise`.
        keep: Names of modules that do not change, with everything inside; default: none.
        seed: Of all random rounding; give each rank its own. Default: 0.

    Returns:
        The handle, as of `binarise`.

    Raises:
        SpecError: As of `binarise`.
        AttachError: As of `binarise`.
    """
    bits = FewBits(weights, activations, gradients, scale, stochastic, seed)
    return _attach(model, bits, first, last, norm, keep)


def _attach(
    model: nn.Module, bits: FewBits, first: First, last: Last, norm: Norm, keep: Collection[str]
) -> FewBitHandle:
    arguments.choice("first", first, FIRSTS)
    arguments.choice("last", last, LASTS)
    arguments.choice("norm", norm, NORMS)
    layers = Layers.of(named_modules(model), KINDS, keep, replaced=True)
    found = [*layers.found]
    if not layers.outside_keep(found):
        raise AttachError(f"no layer to treat: the model has no {KIND_NAMES} outside of keep=")
    inner = found[1 if first == "real" else 0 : len(found) - 1 if last == "real" else None]
    selected = layers.outside_keep(inner)
    if not selected:
        raise AttachError(
            f"no layer to treat: of {len(found)} layers, first={first!r}, last={last!r} and keep="
            f"{tuple(keep)!r} leave none; give the model another one, or first='binary'"
        )
    layers.refuse_parametrised(selected)
    layers.refuse_unreplaceable(selected, "form in few bits")
    for name, layer in selected.items():
        _refuse_parameters(name, layer)
    layers.refuse_shared(selected, "it cannot have few bits in one and 32 in the other")
    pairs: dict[str, tuple[nn.Module, Any]] = {}
    for name, layer in selected.items():
        weights_alone = name == found[0] and first == "weights"
        own = replace(bits, activations=None, stochastic=False) if weights_alone else bits
        try:
            pairs[name] = (layer, KINDS[type(layer)].of(layer, Rounding(own.at(name))))
        except AttachError as error:
            raise AttachError(f"{name!r}: {error}") from None
    for name, module in layers.modules.items() if norm == "shift" else ():
        if isinstance(module, (nn.BatchNorm1d, nn.BatchNorm2d)) and not is_kept(name, keep):
            pairs[name] = (module, ShiftBatchNorm.of(module))
    return FewBitHandle(model, pairs)


def _refuse_parameters(name: str, layer: nn.Module) -> None:
    """Raise `AttachError` unless the layer's parameters have values in float32."""
    for key, part in layer.named_parameters(recurse=False):
        if part.is_meta:
            raise AttachError(
                f"{name}.{key} is on meta, without values: model.to_empty(device=...) and load them first"
            )
        if part.dtype is not torch.float32:
            raise AttachError(
                f"{name}.{key} is {part.dtype}, but master weights are float32: model.float(), under"
                " torch.autocast if the rest is to compute in 16 bits"
            )

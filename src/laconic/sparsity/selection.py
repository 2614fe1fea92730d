"""Selection of the weights that masks sparsify."""

from __future__ import annotations

from collections.abc import Collection

from torch import nn

from laconic.core.errors import AttachError
from laconic.sparsity import fours
from laconic.sparsity.densities import DensityLayout
from laconic.transforms.selection import Layers, named_modules

LAYERS = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)


def masked_weights(model: nn.Module, keep: Collection[str], layout: DensityLayout) -> dict[str, nn.Parameter]:
    """Return the weights to mask, by parameter name, in the order of the model.

    Args:
        model: A plain module.
        keep: Names of modules that stay dense, with their children.
        layout: "uniform" leaves the first of these layers dense, "2:4" those with a row length that is no
            multiple of four.

    Raises:
        AttachError: No weight is left; one is transformed already, shared with another module, or sharded.
    """
    modules = {name.replace("_orig_mod.", ""): module for name, module in named_modules(model).items()}
    layers = Layers.of(modules, LAYERS, keep)
    layers.refuse_parametrised(layers.found)
    found = [
        name
        for name, module in layers.found.items()
        if type(module) in LAYERS
        and (weight := module._parameters.get("weight")) is not None
        and weight.requires_grad
        and weight.numel()
    ]
    fit = {
        name: module
        for name, module in layers.outside_keep(found[1:] if layout == "uniform" else found).items()
        if layout != "2:4" or fours.divisible(module.weight)
    }
    if not fit:
        raise AttachError(f"no layer to sparsify: {_why_none(len(found), keep, layout)}")
    for name, module in fit.items():
        kind = type(module.weight.data).__name__
        if module.weight.is_complex() or kind == "DTensor":
            raise AttachError(
                f"the weight of {name!r} is {module.weight.dtype}, {kind}: masks need real weights that are"
                " not sharded, in a plain model or under DistributedDataParallel"
            )
    layers.refuse_shared(fit, "one mask cannot serve both", keys=("weight",))
    return {f"{name}.weight" if name else "weight": module.weight for name, module in fit.items()}


def _why_none(found: int, keep: Collection[str], layout: DensityLayout) -> str:
    """Return the reason why none of the found layers is left."""
    if not found:
        return "this model has no Linear or convolution layer with a weight to train"
    left = f" outside keep={tuple(keep)!r}" if keep else ""
    if layout == "erk":
        return f"this model has {found} Linear and convolution layers to train, but none{left}"
    if layout == "2:4":
        return (
            f"none of {found} Linear and convolution layers has a row length that is a multiple of four, as"
            f" layout='2:4' needs{left}: use layout='erk'"
        )
    return (
        f"layout='uniform' leaves the first of {found} Linear and convolution layers dense, and no other is"
        f" left{left}: use layout='erk'"
    )

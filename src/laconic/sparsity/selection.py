"""Selection of the weights that masks sparsify."""

from __future__ import annotations

from collections.abc import Collection

from torch import nn

from laconic.core.errors import AttachError
from laconic.sparsity import fours
from laconic.sparsity.densities import Layout
from laconic.transforms.selection import Layers, named_modules

LAYERS = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)


def masked_weights(model: nn.Module, keep: Collection[str], layout: Layout) -> dict[str, nn.Parameter]:
    """Return the weights to mask, by the name of the parameter, in the model's own order.

    Args:
        model: A plain module.
        keep: Names of modules that stay dense with everything inside.
        layout: "uniform" leaves the first of these layers dense, "2:4" those whose rows are no fours.

    Raises:
        AttachError: There is none; one is transformed already, shared with another module, or sharded.
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
        raise AttachError(f"no layer to treat: {_why_none(len(found), keep, layout)}")
    for name, module in fit.items():
        kind = type(module.weight.data).__name__
        if module.weight.is_complex() or kind == "DTensor":
            raise AttachError(
                f"the weight of {name!r} is {module.weight.dtype}, {kind}: masks are for real weights that"
                " every rank has whole, alone or under DistributedDataParallel"
            )
    layers.refuse_shared(fit, "one mask cannot serve both", keys=("weight",))
    return {f"{name}.weight" if name else "weight": module.weight for name, module in fit.items()}


def _why_none(found: int, keep: Collection[str], layout: Layout) -> str:
    """Return why none of so many layers is left."""
    if not found:
        return "this model has no Linear or convolution layer with a weight to train"
    left = f" outside keep={tuple(keep)!r}" if keep else ""
    if layout == "erk":
        return f"this model has {found} Linear and convolution layers to train, and none{left}"
    if layout == "2:4":
        return (
            f"layout='2:4' leaves layers dense whose rows are no multiple of four, and of {found} Linear and"
            f" convolution layers none has other rows{left}: take layout='erk'"
        )
    return (
        f"layout='uniform' leaves the first of {found} Linear and convolution layers dense, and there is no"
        f" other{left}: take layout='erk'"
    )

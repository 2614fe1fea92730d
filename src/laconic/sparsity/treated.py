"""Which layers of a model are made sparse, and what speaks against it."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from torch import Tensor, nn

from laconic.core.errors import AttachError
from laconic.lowbit.computed import plain_type, refuse_parametrised
from laconic.lowbit.kept import check_kept, is_kept
from laconic.lowbit.taken import refuse_taken
from laconic.sparsity import fours
from laconic.sparsity.densities import Layout
from laconic.sparsity.layers import SwatConv2d, SwatLinear

LAYERS = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)


def masked_weights(model: nn.Module, keep: Collection[str], layout: Layout) -> dict[str, nn.Parameter]:
    """The weights to mask, by the name of the parameter, in the model's own order.

    Args:
        model: A plain module.
        keep: Names of modules that stay dense with everything inside.
        layout: "uniform" leaves the first of these layers out, "2:4" those whose rows are not made of fours.

    Raises:
        AttachError: There is none; one is masked already, shared with another module, or sharded.
    """
    names = {each.replace("_orig_mod.", ""): module for each, module in named(model).items()}
    check_kept(names, keep)
    refuse_taken(names, keep)
    for name, module in names.items():
        if isinstance(module, (SwatConv2d, SwatLinear)):
            raise AttachError(f"{name!r} is sparse already, by swat(): call its handle's remove() first")
    refuse_parametrised_among(names, LAYERS, keep)
    found = {
        name: module
        for name, module in names.items()
        if type(module) in LAYERS
        and (weight := module._parameters.get("weight")) is not None
        and weight.requires_grad
        and weight.numel()
    }
    treated = {
        name: module
        for index, (name, module) in enumerate(found.items())
        if not is_kept(name, keep)
        and (index > 0 or layout != "uniform")
        and (layout != "2:4" or _in_fours(module))
    }
    if not treated:
        raise AttachError(f"no layer to treat: {_why_none(len(found), keep, layout)}")
    weights: dict[str, nn.Parameter] = {}
    for name, module in treated.items():
        weight = module._parameters["weight"]
        assert weight is not None
        weights[f"{name}.weight" if name else "weight"] = weight
        kind = type(weight.data).__name__
        if weight.is_complex() or kind == "DTensor":
            raise AttachError(
                f"the weight of {name!r} is {weight.dtype}, {kind}: masks are for real weights that every"
                " rank has whole, alone or under DistributedDataParallel"
            )
    refuse_tied(names, treated, ("weight",))
    return weights


def refuse_parametrised_among(
    names: Mapping[str, nn.Module], kinds: Collection[type], keep: Collection[str]
) -> None:
    """Raise `AttachError` if a layer of these kinds, but for those that are kept, has parametrizations."""
    for name, module in names.items():
        if plain_type(module) in kinds and not is_kept(name, keep):
            refuse_parametrised(name, module)


def _in_fours(module: nn.Module) -> bool:
    weight = module._parameters["weight"]
    return weight is not None and fours.divisible(weight)


def _why_none(found: int, keep: Collection[str], layout: Layout) -> str:
    """Why none of so many layers is left."""
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


def named(model: nn.Module) -> dict[str, nn.Module]:
    """All modules by name; one that has several names is there under each."""
    return dict(model.named_modules(remove_duplicate=False))


def refuse_tied(
    names: Mapping[str, nn.Module], treated: Collection[str], keys: Collection[str] | None = None
) -> None:
    """Raise `AttachError` if a treated layer shares a parameter with another; `keys`: only these of it."""
    owners: dict[int, tuple[str, Tensor]] = {}
    for name, module in names.items():
        for key, parameter in module._parameters.items():
            if parameter is None:
                continue
            owner, _ = owners.setdefault(id(parameter), (name, parameter))
            matters = (name in treated and (keys is None or key in keys)) or owner in treated
            if owner != name and matters:
                raise AttachError(
                    f"{owner!r} and {name!r} share their {key}, and one mask or threshold cannot serve both:"
                    f" keep both dense with keep=({owner!r}, {name!r})"
                )

"""Which layers of a model get few bits: all of a kind, but the first, the last and what is to be kept."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import torch
from torch import nn

from laconic.core.errors import AttachError
from laconic.lowbit.called import refuse_read
from laconic.lowbit.computed import plain_type, refuse_parametrised
from laconic.lowbit.few_bit_layers import FewBitConv2d, FewBitGRUCell, FewBitLinear, FewBitLSTMCell
from laconic.lowbit.hooked import has_hooks
from laconic.lowbit.kept import check_kept, is_kept
from laconic.lowbit.taken import refuse_taken

KINDS: dict[type, Any] = {
    nn.Linear: FewBitLinear,
    nn.Conv2d: FewBitConv2d,
    nn.LSTMCell: FewBitLSTMCell,
    nn.GRUCell: FewBitGRUCell,
}
NAMES = "Linear, Conv2d, LSTMCell and GRUCell"


def known(model: nn.Module, keep: Collection[str]) -> dict[str, nn.Module]:
    """All modules by name. Raises `AttachError` if `keep` names none of them."""
    names = dict(model.named_modules(remove_duplicate=False))
    check_kept(names, keep)
    return names


def candidates(names: dict[str, nn.Module], keep: Collection[str]) -> list[str]:
    """Names of the layers that can have few bits, in the model's own order; those to keep are among them.

    Raises `AttachError` if one is treated already, if the model is a layer itself, or if there is none but
    those to keep.
    """
    refuse_taken(names, keep)
    found = [name for name, module in names.items() if plain_type(module) in KINDS]
    if "" in found:
        raise AttachError(
            "the model is a single layer, which cannot be replaced in place: wrap it in nn.Sequential"
        )
    if all(is_kept(name, keep) for name in found):
        raise AttachError(f"no layer to treat: the model has no {NAMES} outside of keep=")
    return found


def refuse_unfit(names: dict[str, nn.Module], treated: Collection[str]) -> None:
    """Raise `AttachError` if a layer to treat is only read or has hooks, or if its weights are not float32,
    are computed, have no values or are shared.
    """
    refuse_read(names, treated)
    for name in treated:
        refuse_parametrised(name, names[name])
        for key, part in names[name].named_parameters(recurse=False):
            if part.is_meta:
                raise AttachError(
                    f"{name}.{key} is on meta, without values: model.to_empty(device=...) and load them first"
                )
            if part.dtype is not torch.float32:
                raise AttachError(
                    f"{name}.{key} is {part.dtype}, but master weights are float32: model.float(), under"
                    " torch.autocast if the rest is to compute in 16 bits"
                )
    owners: dict[int, str] = {}
    for name, module in names.items():
        if name in treated and has_hooks(module):
            raise AttachError(
                f"{name!r} has hooks, which its form in few bits would lose: add them afterwards"
            )
        for key, parameter in module._parameters.items():
            if parameter is None:
                continue
            owner = owners.setdefault(id(parameter), name)
            if owner != name and (name in treated or owner in treated):
                raise AttachError(
                    f"{owner!r} and {name!r} share their {key}, which cannot have few bits in one and 32 in"
                    f" the other: keep both with keep=({owner!r}, {name!r})"
                )


def place(model: nn.Module, layers: dict[str, Any]) -> None:
    """Put these layers in the places of these names, in the mode that those in the places are in."""
    for name, layer in layers.items():
        parent, _, key = name.rpartition(".")
        layer.train(model.get_submodule(name).training)
        setattr(model.get_submodule(parent), key, layer)

"""Selection of the weights to quantise, and their projection with shared scales."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Literal

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from laconic.core.errors import AttachError, NonFiniteError
from laconic.lowbit.tables.projection import project
from laconic.lowbit.tables.tables import Table
from laconic.transforms.computed import refuse_computed
from laconic.transforms.fast_path import refuse_uncalled
from laconic.transforms.selection import Layers, named_modules

LAYERS = (nn.Embedding, nn.LSTM, nn.GRU, nn.Linear)
KINDS = ", ".join(kind.__name__ for kind in LAYERS)
Tie = Literal["model", "layer", "row"]
Quantised = dict[str, tuple[Tensor, Tensor]]  # alpha float32 (rows or 1, 1), q int8 (rows, columns), by name


def layer_weights(layer: nn.Module) -> list[str]:
    return [name for name, each in layer.named_parameters(recurse=False) if each.dim() == 2]


def select_layers(model: nn.Module, keep: Collection[str] = ()) -> dict[str, nn.Module]:
    """Return the layers to quantise. Raise `AttachError` for none or an unsupported one."""
    layers = Layers.of(named_modules(model), LAYERS, keep)
    found = layers.outside_keep(layers.found)
    if not found:
        left = "" if not keep else f" outside keep={tuple(keep)!r}"
        raise AttachError(f"no layer to quantise: this model has no {KINDS}{left}")
    refuse_uncalled(layers.modules, found)
    layers.refuse_parametrised(found)
    _refuse_unfit(found)
    layers.refuse_shared(found, "packed layers cannot share weights")
    return found


def select_weights(layers: Mapping[str, nn.Module]) -> dict[str, nn.Parameter]:
    return {
        f"{name}.{key}" if name else key: layer.get_parameter(key)
        for name, layer in layers.items()
        for key in layer_weights(layer)
    }


def check_optimizer(optimizer: Optimizer, weights: Mapping[str, nn.Parameter]) -> None:
    held = {each for group in optimizer.param_groups for each in group["params"]}
    missing = [name for name, each in weights.items() if each not in held or not each.requires_grad]
    if len(missing) == len(weights):
        raise AttachError(
            f"this {type(optimizer).__name__} trains no weight that would be quantised: build it from the"
            " parameters() of this model"
        )
    if missing:
        layer = missing[0].rpartition(".")[0]
        raise AttachError(
            f"{missing[0]!r} is not trained by this {type(optimizer).__name__}: pass it to the optimiser, or"
            f" keep its layer in float32 with keep=({layer!r},)"
        )


@torch.no_grad()
def project_all(values: Mapping[str, Tensor], table: Table, tie: Tie, rounds: int) -> Quantised:
    for name, value in values.items():
        if not value.isfinite().all():
            raise NonFiniteError(f"{name} is not finite: training has diverged; lower the learning rate")
    if tie == "row":
        return {name: project(value, table, rounds) for name, value in values.items()}
    if tie == "layer":
        return {name: _flat(value, table, rounds) for name, value in values.items()}
    alpha, q = project(torch.cat([each.flatten() for each in values.values()])[None], table, rounds)
    parts = torch.split(q[0], [each.numel() for each in values.values()])
    pairs = zip(values.items(), parts, strict=True)
    return {name: (alpha.clone(), part.view(value.shape)) for (name, value), part in pairs}


def refuse_moved_padding(layers: Mapping[str, nn.Module], table: Table, tie: Tie) -> None:
    """Raise `AttachError` if an Embedding's padding row would become nonzero."""
    for name, layer in layers.items():
        padded = isinstance(layer, nn.Embedding) and layer.padding_idx is not None
        if padded and tie != "row" and 0 not in table.values:
            raise AttachError(
                f"{name!r} is an Embedding with padding_idx, whose row is zero, but this table has no zero:"
                f" use tie='row', a table with zero such as 'ternary', or keep=({name!r},)"
            )


def _flat(value: Tensor, table: Table, rounds: int) -> tuple[Tensor, Tensor]:
    alpha, q = project(value.reshape(1, -1), table, rounds)
    return alpha, q.view(value.shape)


def _refuse_unfit(layers: Mapping[str, nn.Module]) -> None:
    for name, layer in layers.items():
        refuse_computed(name, layer)
        if isinstance(layer, nn.Embedding) and (layer.sparse or layer.max_norm is not None):
            raise AttachError(
                f"{name!r} is an Embedding with sparse gradients or max_norm, which are not supported: use"
                f" neither, or keep it in float32 with keep=({name!r},)"
            )
        if isinstance(layer, nn.LSTM) and layer.proj_size:
            raise AttachError(
                f"{name!r} is an LSTM with proj_size, whose packed form would not be exact: set proj_size=0,"
                f" or keep it in float32 with keep=({name!r},)"
            )
        for key in layer_weights(layer):
            weight = layer.get_parameter(key)
            if weight.dtype != torch.float32:
                raise AttachError(
                    f"{name}.{key} is {weight.dtype}, but only float32 weights can be quantised to a table:"
                    " call model.float()"
                )


def dense(found: Quantised) -> dict[str, Tensor]:
    return {name: alpha * q for name, (alpha, q) in found.items()}

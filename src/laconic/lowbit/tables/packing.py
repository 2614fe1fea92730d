"""Copies of a model with matrices packed to a table."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from laconic.core.errors import StateError, WireError
from laconic.lowbit.tables.layers import PACKED, PackedMatrix
from laconic.lowbit.tables.tables import Table, table_with
from laconic.lowbit.tables.weights import Quantised, layer_weights
from laconic.transforms.computed import copy_model
from laconic.transforms.fast_path import FastPathOff

PARTS = ("codes", "alpha", "values")


@dataclass(frozen=True)
class Size:
    """Bytes of the `state_dict` of a packed model.

    Attributes:
        codes: Packed entries, with padding.
        scales: Alphas and table values.
        rest: Biases, norms, layers in `keep`.
        dense: The whole model in float32.
        weights: Number of quantised weights.
    """

    codes: int
    scales: int
    rest: int
    dense: int
    weights: int

    @property
    def packed(self) -> int:
        return self.codes + self.scales + self.rest

    @property
    def smaller(self) -> float:
        return self.dense / self.packed

    @property
    def bits(self) -> float:
        """Bits per quantised weight, with scales."""
        return 8 * (self.codes + self.scales) / self.weights


def packed_copy(model: nn.Module, found: Quantised, table: Table) -> nn.Module:
    matrices: dict[str, dict[str, PackedMatrix]] = {}
    for name, (alpha, q) in found.items():
        layer, _, key = name.rpartition(".")
        matrices.setdefault(layer, {})[key] = PackedMatrix.of(alpha, q, table)
    return _replace_layers(copy_model(model), matrices)


def size_of(packed: nn.Module, model: nn.Module) -> Size:
    parts = [each for each in packed.modules() if isinstance(each, PackedMatrix)]
    codes = sum(map(nbytes, (each.codes for each in parts)))
    scales = sum(nbytes(each.alpha) + nbytes(each.values) for each in parts)
    whole = sum(map(nbytes, packed.state_dict().values()))
    dense = sum(map(nbytes, model.state_dict().values()))
    return Size(codes, scales, whole - codes - scales, dense, sum(len(p.codes) * p.columns for p in parts))


def nbytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def load_tables(model: nn.Module, state: Mapping[str, Tensor]) -> nn.Module:
    """Return a packed model from its `state_dict`.

    Args:
        model: Float32, built like the original; not changed.
        state: `torch.load(path, weights_only=True)`.

    Raises:
        StateError: The state is of another model, or damaged.

    >>> from laconic.lowbit import admm, load_tables
    >>> net = nn.Sequential(nn.Embedding(10, 8), nn.Linear(8, 10))
    >>> packed = admm(net, torch.optim.SGD(net.parameters(), lr=0.1)).pack()
    >>> again = load_tables(nn.Sequential(nn.Embedding(10, 8), nn.Linear(8, 10)), packed.state_dict())
    >>> bool((again(torch.arange(10)) == packed(torch.arange(10))).all())
    True
    """
    matrices: dict[str, dict[str, PackedMatrix]] = {}
    layers = dict(model.named_modules())
    for key in state:
        weight, _, part = key.rpartition(".")
        layer, _, name = weight.rpartition(".")
        if part != "codes" or type(layers.get(layer)) not in PACKED:
            continue
        if name not in layer_weights(layers[layer]):
            raise StateError(f"{key}: the layer {layer!r} of this model has no matrix {name!r}")
        shape = tuple(layers[layer].get_parameter(name).shape)
        matrices.setdefault(layer, {})[name] = _read_matrix(weight, shape, state)
    for layer, found in matrices.items():
        missing = [name for name in layer_weights(layers[layer]) if name not in found]
        if missing:
            raise StateError(f"{layer}.{missing[0]}.codes is missing: the file is damaged")
    if not matrices:
        raise StateError("this state has no packed layer of this model: load it with load_state_dict()")
    packed = _replace_layers(copy_model(model), matrices)
    try:
        packed.load_state_dict(dict(state))
    except RuntimeError as error:
        raise StateError(f"the state is of another model: {error}") from error
    return packed


def _replace_layers(model: nn.Module, matrices: Mapping[str, dict[str, PackedMatrix]]) -> nn.Module:
    made = []
    for name, found in matrices.items():
        layer: Any = model.get_submodule(name)
        packed = PACKED[type(layer)](layer, found).train(layer.training)
        if not name:
            return packed
        parent, _, key = name.rpartition(".")
        setattr(model.get_submodule(parent), key, packed)
        made.append(packed)
    FastPathOff(model, made)
    return model


def _read_matrix(name: str, shape: tuple[int, ...], state: Mapping[str, Tensor]) -> PackedMatrix:
    try:
        codes, alpha, values = (state[f"{name}.{part}"] for part in PARTS)
    except KeyError as error:
        raise StateError(f"{error} is missing: the file is damaged") from None
    rows, columns = shape
    if not all(isinstance(part, Tensor) for part in (codes, alpha, values)):
        raise StateError(f"{name}: parts must be tensors, got {type(codes).__name__}: the file is damaged")
    if (codes.dtype, alpha.dtype, values.dtype) != (torch.uint8, torch.float32, torch.int8):
        raise StateError(
            f"{name}: parts must be uint8, float32 and int8, got {codes.dtype}, {alpha.dtype}"
            f" and {values.dtype}"
        )
    table = table_with(tuple(values.tolist()))
    wanted = (rows, table.row_nbytes(columns))
    if tuple(codes.shape) != wanted or tuple(alpha.shape) not in ((rows, 1), (1, 1)):
        raise StateError(
            f"{name} {shape} must have codes {wanted} and scales ({rows}, 1) or (1, 1), got"
            f" {tuple(codes.shape)} and {tuple(alpha.shape)}: the state is of another model"
        )
    try:
        table.unpack(codes, columns)
    except WireError as error:
        raise StateError(f"{name}: {error}; the file is damaged") from error
    return PackedMatrix(codes, alpha, values, columns)

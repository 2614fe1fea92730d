"""`pack`: inference with packed weights, and files of packed models."""

from __future__ import annotations

import io
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from laconic.core.errors import AttachError, SpecError, StateError
from laconic.lowbit.few_bit_kinds import KINDS
from laconic.lowbit.few_bit_layers import FewBitConv2d, FewBitLinear
from laconic.lowbit.few_bit_recurrent import FewBitGRU, FewBitGRUCell, FewBitLSTM, FewBitLSTMCell
from laconic.lowbit.few_bits import FewBits
from laconic.lowbit.packed_layers import Packed, PackedConv2d, PackedLinear
from laconic.lowbit.packed_recurrent import PackedGRU, PackedGRUCell, PackedLSTM, PackedLSTMCell
from laconic.lowbit.shift_norm import ShiftBatchNorm
from laconic.transforms.computed import copy_model
from laconic.transforms.fast_path import FastPathOff
from laconic.transforms.selection import refuse_hooks, replace_layers

FORMAT = "laconic packed model 2"
PREVIOUS_FORMAT = "laconic packed model 1"  # without names of norms
FORMS: dict[type, type[Any]] = {
    FewBitLinear: PackedLinear,
    FewBitConv2d: PackedConv2d,
    FewBitLSTM: PackedLSTM,
    FewBitGRU: PackedGRU,
    FewBitLSTMCell: PackedLSTMCell,
    FewBitGRUCell: PackedGRUCell,
}
FORMS_BY_LAYER = {plain: FORMS[few] for plain, few in KINDS.items()} | FORMS


def pack(model: nn.Module) -> nn.Module:
    """Return an inference copy of a model trained by `binarise` or `quantise`, with packed weights.

    For finite inputs the outputs equal the model's in evaluation bit for bit. A weight has `weights` bits,
    with rows padded to whole bytes. Other layers and biases stay float32. Kernels use one thread per product.
    Training, tracing or differentiating the copy raises `StateError`.

    Raises:
        AttachError: The model has no few-bit layers, or one that is logarithmic, not float32, not finite, has
            hooks or has products beyond 2^24; a hook computes another weight.

    >>> from laconic.lowbit import binarise
    >>> net = nn.Sequential(nn.Linear(4, 64), nn.Linear(64, 64), nn.Linear(64, 2)).eval()
    >>> handle, x = binarise(net), torch.randn(3, 4)
    >>> packed = pack(net)
    >>> packed[1].bits.nbytes, bool((packed(x) == net(x)).all())
    (512, True)
    """
    named = {name: module for name, module in model.named_modules() if type(module) in FORMS}
    if not named:
        raise AttachError("no layer to pack: call binarise() or quantise() first, and pack before remove()")
    made = {}
    for name, layer in named.items():
        refuse_hooks(name, layer, "packed form")
        for key, part in layer.named_parameters():
            if not bool(part.isfinite().all()):
                raise AttachError(
                    f"{name}.{key} has NaN or Inf: training has diverged; pack an earlier checkpoint"
                )
        other = {str(part.dtype) for part in layer.parameters()} - {"torch.float32"}
        if other:
            raise AttachError(
                f"{name!r} is {min(other)}, but packed layers need float32: call model.float() before pack()"
            )
        try:
            made[name] = FORMS[type(layer)].of(layer)
        except AttachError as error:
            raise AttachError(f"{name!r}: {error}") from None
    return _freeze(copy_model(model, {id(layer): made[name] for name, layer in named.items()}))


def packed_layers(model: nn.Module) -> dict[str, Packed]:
    return {name: module for name, module in model.named_modules() if isinstance(module, Packed)}


def save_packed(packed: nn.Module, path: str | Path) -> None:
    """Write a packed model to a file. Raises `AttachError` without packed layers."""
    layers = packed_layers(packed)
    if not layers:
        raise AttachError("this model is not packed: save the result of pack()")
    bits = {name: asdict(layer.levels) for name, layer in layers.items()}
    found = {"layers": bits, "norms": _shift_norms(packed), "state": packed.state_dict()}
    torch.save({"format": FORMAT, **found}, path)


def load_packed(path: str | Path, model: nn.Module) -> nn.Module:
    """Return the packed model of a file written by `save_packed`.

    Args:
        path: Untrusted: read with `weights_only=True`.
        model: The plain model, as before `binarise` or `quantise`; not changed.

    Raises:
        StateError: The file is damaged, or of another model.

    >>> import tempfile
    >>> from laconic.lowbit import binarise
    >>> def build(): return nn.Sequential(nn.Linear(4, 64), nn.Linear(64, 64), nn.Linear(64, 2)).eval()
    >>> net, x = build(), torch.randn(3, 4)
    >>> handle = binarise(net)
    >>> with tempfile.NamedTemporaryFile() as file:
    ...     save_packed(pack(net), file.name)
    ...     again = load_packed(file.name, build())
    >>> bool((again(x) == net(x)).all())
    True
    """
    content = io.BytesIO(Path(path).read_bytes())
    try:
        found = torch.load(content, map_location="cpu", weights_only=True)
    except Exception as error:
        raise StateError(f"{path} is not a packed model, or is damaged: {type(error).__name__}") from None
    layers, norms, state = _read_parts(found)
    made = copy_model(model)
    replace_layers(made, {name: _empty_layer(made, name, bits) for name, bits in layers.items()})
    if norms is not None:
        replace_layers(made, {name: _shift_norm(made, name) for name in norms})
        if _shift_norms(made) != sorted(norms):
            raise StateError("this model has a ShiftBatchNorm that the file lacks: build the same model")
    FastPathOff(made, packed_layers(made).values())
    _fill(made, state)
    return _freeze(made)


def _freeze(model: nn.Module) -> nn.Module:
    return model.requires_grad_(False).eval()


def _shift_norms(model: nn.Module) -> list[str]:
    names = model.named_modules(remove_duplicate=False)
    return sorted(name for name, module in names if isinstance(module, ShiftBatchNorm))


def _read_parts(found: Any) -> tuple[dict[str, FewBits], list[str] | None, dict[str, Tensor]]:
    parts = {"format", "layers", "state"}
    kinds = {FORMAT: parts | {"norms"}, PREVIOUS_FORMAT: parts}
    if not isinstance(found, dict) or not any(
        found.get("format") == name and found.keys() == each for name, each in kinds.items()
    ):
        raise StateError("not a packed model of this version: pack and save the model again")
    layers, norms, state = found["layers"], found.get("norms"), found["state"]
    if not isinstance(layers, dict) or not isinstance(state, dict) or not layers:
        raise StateError("the packed model's file lacks its layers or tensors: it is damaged")
    if "norms" in found and not (isinstance(norms, list) and all(isinstance(each, str) for each in norms)):
        raise StateError("the packed model's file lacks the names of its norms: it is damaged")
    read = {}
    for name, bits in layers.items():
        try:
            read[name] = FewBits(**bits)
        except (TypeError, SpecError) as error:
            raise StateError(f"{name!r} has invalid bits: {error}") from None
    return read, norms, state


def _empty_layer(model: nn.Module, name: Any, bits: FewBits) -> Packed:
    here = dict(model.named_modules()).get(name) if name else None
    form = FORMS_BY_LAYER.get(type(here))
    if here is None or form is None:
        raise StateError(f"saved with a packed layer {name!r}, which this model lacks: build the same model")
    try:
        made: Packed = form(here, bits)
    except AttachError as error:
        raise StateError(f"{name!r}: {error}") from None
    return made


def _shift_norm(model: nn.Module, name: str) -> ShiftBatchNorm:
    here = dict(model.named_modules()).get(name) if name else None
    if isinstance(here, ShiftBatchNorm):
        return here
    if not isinstance(here, (nn.BatchNorm1d, nn.BatchNorm2d)):
        raise StateError(
            f"saved with a ShiftBatchNorm {name!r}, but this model has no BatchNorm there: build the same"
            " model"
        )
    try:
        return ShiftBatchNorm.of(here)
    except AttachError as error:
        raise StateError(f"{name!r}: {error}") from None


def _fill(model: nn.Module, state: dict[str, Any]) -> None:
    expected = model.state_dict()
    if state.keys() != expected.keys():
        other = sorted(map(str, set(state) ^ set(expected)))
        raise StateError(f"saved for another model ({', '.join(other[:3])} differ): build the same model")
    for name, own in expected.items():
        given = state[name]
        if not isinstance(given, Tensor) or given.dtype is not own.dtype or given.shape != own.shape:
            kind = (
                f"{given.dtype} {tuple(given.shape)}" if isinstance(given, Tensor) else type(given).__name__
            )
            raise StateError(
                f"{name} must be {own.dtype} {tuple(own.shape)}, got {kind}: build the same model"
            )
        if given.layout is not torch.strided or given.device.type != "cpu":
            raise StateError(f"{name} must be a dense tensor, got {given.layout} on {given.device}")
    expected.update(state)  # keep the model's metadata: the file is untrusted
    model.load_state_dict(expected)
    for name, layer in packed_layers(model).items():
        try:
            layer.check()
        except StateError as error:
            raise StateError(f"{name}.{error}") from None

"""`pack`: a model in few bits as it is used, its weights a bit each; and its file."""

from __future__ import annotations

import io
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from laconic.core.errors import AttachError, SpecError, StateError
from laconic.lowbit.few_bit_layers import KINDS
from laconic.lowbit.few_bits import FewBits
from laconic.lowbit.packed_layers import FORMS, Packed
from laconic.lowbit.shift_norm import ShiftBatchNorm
from laconic.transforms.computed import copied
from laconic.transforms.fast_path import FastPathOff
from laconic.transforms.selection import refuse_hooks, replace_layers

FORMAT = "laconic packed model 2"
BEFORE = "laconic packed model 1"  # which does not say what norms there are
EMPTY = {plain: FORMS[few] for plain, few in KINDS.items()} | FORMS


def pack(model: nn.Module) -> nn.Module:
    """A copy for use of a model that `binarise` or `quantise` trained: weights 32 times smaller, by XNOR
    kernels.

    Its results are bit for bit those of the model in evaluation, for finite inputs. A layer's weights take
    `weights` bits each, in memory and in a file; rows are filled up to whole bytes. All other layers and the
    biases stay float32, so leave few parameters outside. The copy cannot be trained or traced, and passes no
    gradient on: it raises `StateError`. One thread computes each product.

    Raises:
        AttachError: The model has no layers in few bits, or logarithmic ones, or ones that are not float32,
            not finite or have hooks, or has products beyond 2^24; another layer's weights are computed by a
            hook.

    >>> from laconic.lowbit import binarise
    >>> net = nn.Sequential(nn.Linear(4, 64), nn.Linear(64, 64), nn.Linear(64, 2)).eval()
    >>> handle, x = binarise(net), torch.randn(3, 4)
    >>> packed = pack(net)
    >>> packed[1].bits.nbytes, bool((packed(x) == net(x)).all())
    (512, True)
    """
    named = {name: module for name, module in model.named_modules() if type(module) in FORMS}
    if not named:
        raise AttachError(
            "no layer to pack: call binarise() or quantise() first, and pack before its remove()"
        )
    made = {}
    for name, layer in named.items():
        refuse_hooks(name, layer, "packed form")
        for key, part in layer.named_parameters():
            if not bool(part.isfinite().all()):
                raise AttachError(
                    f"{name}.{key} holds NaN or Inf: this training has diverged; pack an earlier model"
                )
        other = {str(part.dtype) for part in layer.parameters()} - {"torch.float32"}
        if other:
            raise AttachError(
                f"{name!r} is {min(other)}, and packed layers compute in float32: model.float() before pack()"
            )
        try:
            made[name] = FORMS[type(layer)].of(layer)
        except AttachError as error:
            raise AttachError(f"{name!r}: {error}") from None
    return _for_use(copied(model, {id(layer): made[name] for name, layer in named.items()}))


def packed_layers(model: nn.Module) -> dict[str, Packed]:
    """The packed layers of a model, by name."""
    return {name: module for name, module in model.named_modules() if isinstance(module, Packed)}


def save_packed(packed: nn.Module, path: str | Path) -> None:
    """Write a packed model's tensors, the bits of each layer and which norms have shifts, in a file that
    `load_packed` and `torch.load` read.

    Raises `AttachError` for a model without packed layers.
    """
    layers = packed_layers(packed)
    if not layers:
        raise AttachError("this model is not packed: save what pack() returns")
    bits = {name: asdict(layer.levels) for name, layer in layers.items()}
    found = {"layers": bits, "norms": _shift_norms(packed), "state": packed.state_dict()}
    torch.save({"format": FORMAT, **found}, path)


def load_packed(path: str | Path, model: nn.Module) -> nn.Module:
    """The packed model of a file that `save_packed` wrote, in the shape of `model`, which does not change.

    Args:
        path: The file. It is read with `weights_only=True`, and is not trusted.
        model: The plain model, as it was built before `binarise` or `quantise`; its weights do not matter.

    Raises:
        StateError: The file is damaged, or belongs to another model.

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
    except Exception as error:  # torch's reader meets damage with errors of many kinds
        raise StateError(f"{path} is not a packed model, or is damaged: {type(error).__name__}") from None
    layers, norms, state = _parts(found)
    made = copied(model)
    replace_layers(made, {name: _empty(made, name, bits) for name, bits in layers.items()})
    if norms is not None:
        replace_layers(made, {name: _shifted(made, name) for name in norms})
        if _shift_norms(made) != sorted(norms):
            raise StateError("saved without some ShiftBatchNorm that this model has: build it alike")
    FastPathOff(made, packed_layers(made).values())
    _fill(made, state)
    return _for_use(made)


def _for_use(model: nn.Module) -> nn.Module:
    return model.requires_grad_(False).eval()


def _shift_norms(model: nn.Module) -> list[str]:
    names = model.named_modules(remove_duplicate=False)
    return sorted(name for name, module in names if isinstance(module, ShiftBatchNorm))


def _parts(found: Any) -> tuple[dict[str, FewBits], list[str] | None, dict[str, Tensor]]:
    """Bits of layers, names of norms with shifts (None: an older file does not say), and tensors."""
    parts = {"format", "layers", "state"}
    kinds = {FORMAT: parts | {"norms"}, BEFORE: parts}
    if not isinstance(found, dict) or not any(
        found.get("format") == name and found.keys() == each for name, each in kinds.items()
    ):
        raise StateError("not a packed model of this version: pack and save the model again")
    layers, norms, state = found["layers"], found.get("norms"), found["state"]
    if not isinstance(layers, dict) or not isinstance(state, dict) or not layers:
        raise StateError("a packed model's file lacks its layers or its tensors: it is damaged")
    if "norms" in found and not (isinstance(norms, list) and all(isinstance(each, str) for each in norms)):
        raise StateError("a packed model's file lacks the names of its norms: it is damaged")
    read = {}
    for name, bits in layers.items():
        try:
            read[name] = FewBits(**bits)
        except (TypeError, SpecError) as error:
            raise StateError(f"{name!r} has no bits that a layer can have: {error}") from None
    return read, norms, state


def _empty(model: nn.Module, name: Any, bits: FewBits) -> Packed:
    """The packed layer without its bits, of the shape of the plain layer of this name."""
    here = dict(model.named_modules()).get(name) if name else None
    form = EMPTY.get(type(here))
    if here is None or form is None:
        raise StateError(
            f"saved with a packed layer {name!r}, which this model does not have: build it alike"
        )
    try:
        made: Packed = form(here, bits)
    except AttachError as error:
        raise StateError(f"{name!r}: {error}") from None
    return made


def _shifted(model: nn.Module, name: str) -> ShiftBatchNorm:
    """The norm with shifts, in the place of the BatchNorm of this name."""
    here = dict(model.named_modules()).get(name) if name else None
    if isinstance(here, ShiftBatchNorm):
        return here
    if not isinstance(here, (nn.BatchNorm1d, nn.BatchNorm2d)):
        raise StateError(
            f"saved with a ShiftBatchNorm {name!r}, and this model has no BatchNorm there: build it alike"
        )
    try:
        return ShiftBatchNorm.of(here)
    except AttachError as error:
        raise StateError(f"{name!r}: {error}") from None


def _fill(model: nn.Module, state: dict[str, Any]) -> None:
    expected = model.state_dict()
    if state.keys() != expected.keys():
        other = sorted(map(str, set(state) ^ set(expected)))
        raise StateError(f"saved for another model ({', '.join(other[:3])} differ): build it alike")
    for name, own in expected.items():
        given = state[name]
        if not isinstance(given, Tensor) or given.dtype is not own.dtype or given.shape != own.shape:
            kind = (
                f"{given.dtype} {tuple(given.shape)}" if isinstance(given, Tensor) else type(given).__name__
            )
            raise StateError(
                f"{name} must be {own.dtype} {tuple(own.shape)}, got {kind}: build the model alike"
            )
        if given.layout is not torch.strided or given.device.type != "cpu":
            raise StateError(f"{name} must be a dense tensor, got {given.layout} on {given.device}")
    expected.update(state)  # with the model's own metadata: the file's may be damaged
    model.load_state_dict(expected)
    for name, layer in packed_layers(model).items():
        try:
            layer.check()
        except StateError as error:
            raise StateError(f"{name}.{error}") from None

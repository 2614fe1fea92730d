"""Base of `binarise` and `quantise`."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Collection
from dataclasses import dataclass, replace
from typing import Any, Literal, get_args

import torch
from torch import nn
from torch.optim import Optimizer

from laconic.core import arguments
from laconic.core.errors import AttachError
from laconic.lowbit.few_bit_handle import FewBitHandle
from laconic.lowbit.few_bit_kinds import KIND_NAMES, KINDS
from laconic.lowbit.few_bits import FewBits, Rounding
from laconic.lowbit.shift_norm import ShiftBatchNorm
from laconic.lowbit.training import LowBitTraining
from laconic.transforms.keep import is_kept
from laconic.transforms.selection import Layers, named_modules
from laconic.transforms.transform import DEFAULT_RUN, Run

First = Literal["real", "weights", "binary"]
Last = Literal["real", "binary"]
Norm = Literal["float", "shift"]


@dataclass(frozen=True, repr=False)
class FewBitTraining(LowBitTraining):
    """Configuration with the arguments of `binarise`."""

    first: First = "real"
    last: Last = "real"
    stochastic: bool = False
    norm: Norm = "float"
    keep: tuple[str, ...] = ()
    seed: int = 0

    @property
    @abstractmethod
    def bits(self) -> FewBits:
        """Bits of the layers."""

    def __post_init__(self) -> None:
        arguments.names("keep", self.keep, "head")
        arguments.choice("first", self.first, get_args(First))
        arguments.choice("last", self.last, get_args(Last))
        arguments.choice("norm", self.norm, get_args(Norm))
        _ = self.bits  # checks its own arguments

    def attach(
        self, model: nn.Module, optimizer: Optimizer | None = None, run: Run = DEFAULT_RUN
    ) -> FewBitHandle:
        return self.attach_layers(model, self.keep)

    def attach_layers(self, model: nn.Module, keep: Collection[str]) -> FewBitHandle:
        layers = Layers.of(named_modules(model), KINDS, keep, replaced=True)
        found = [*layers.found]
        if not layers.outside_keep(found):
            raise AttachError(f"no layer to convert: the model has no {KIND_NAMES} outside keep=")
        inner = found[1 if self.first == "real" else 0 : len(found) - 1 if self.last == "real" else None]
        selected = layers.outside_keep(inner)
        if not selected:
            raise AttachError(
                f"no layer to convert: of {len(found)} layers, first={self.first!r}, last={self.last!r} and"
                f" keep={tuple(keep)!r} leave none; use first='binary' or more layers"
            )
        layers.refuse_parametrised(selected)
        layers.refuse_unreplaceable(selected, "form in few bits")
        for name, layer in selected.items():
            _check_parameters(name, layer)
        layers.refuse_shared(selected, "both layers would need the same number of bits")
        pairs: dict[str, tuple[nn.Module, Any]] = {}
        for name, layer in selected.items():
            weights_alone = name == found[0] and self.first == "weights"
            own = replace(self.bits, activations=None, stochastic=False) if weights_alone else self.bits
            try:
                pairs[name] = (layer, KINDS[type(layer)].of(layer, Rounding(own.at(name))))
            except AttachError as error:
                raise AttachError(f"{name!r}: {error}") from None
        for name, module in layers.modules.items() if self.norm == "shift" else ():
            if isinstance(module, (nn.BatchNorm1d, nn.BatchNorm2d)) and not is_kept(name, keep):
                pairs[name] = (module, ShiftBatchNorm.of(module))
        return FewBitHandle(model, pairs)


def _check_parameters(name: str, layer: nn.Module) -> None:
    for key, part in layer.named_parameters(recurse=False):
        if part.is_meta:
            raise AttachError(
                f"{name}.{key} is on meta, without values: call model.to_empty(device=...) and load them"
            )
        if part.dtype is not torch.float32:
            raise AttachError(
                f"{name}.{key} is {part.dtype}, but master weights must be float32: call model.float(), and"
                " use torch.autocast for 16-bit arithmetic"
            )

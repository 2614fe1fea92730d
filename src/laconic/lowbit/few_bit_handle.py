"""Handle of `binarise` and `quantise`."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from laconic import kernels
from laconic.core.errors import StateError
from laconic.core.inference import outside_inference_mode
from laconic.lowbit import clipping
from laconic.lowbit.few_bit_kinds import FEW_BIT_LAYERS
from laconic.lowbit.pack import pack, save_packed
from laconic.lowbit.training import LowBitHandle
from laconic.transforms.fast_path import FastPathOff
from laconic.transforms.selection import replace_layers

ONES = torch.tensor([byte.bit_count() for byte in range(256)], dtype=torch.int64, device="cpu")


@outside_inference_mode("state_dict", "load_state_dict", "remove")
class FewBitHandle(LowBitHandle):
    """Few-bit training of one model. `layers`: its few-bit layers by name."""

    def __init__(self, model: nn.Module, pairs: dict[str, tuple[nn.Module, Any]]) -> None:
        self.model = model
        self._before = {name: before for name, (before, _) in pairs.items()}
        self.layers: dict[str, Any] = {
            name: new for name, (_, new) in pairs.items() if isinstance(new, FEW_BIT_LAYERS)
        }
        replace_layers(model, {name: new for name, (_, new) in pairs.items()})
        self._fast_path = FastPathOff(model, self.layers.values())
        for layer in self.layers.values():
            clipping.watch(layer)
        self._signs = self._packed()

    @property
    def weights(self) -> tuple[str, ...]:
        parts = {id(part): name for name, part in self.model.named_parameters()}
        return tuple(parts[id(part)] for layer in self.layers.values() for part in layer.masters())

    def flips(self) -> float:
        """Return the share of few-bit weights whose sign changed since the last call."""
        before, self._signs = self._signs, self._packed()
        changed = sum(int(ONES[(a ^ b).long()].sum()) for a, b in zip(before, self._signs, strict=True))
        total = sum(part.numel() for layer in self.layers.values() for part in layer.masters())
        return changed / total if total else 0.0

    def figures(self) -> dict[str, Any]:
        return super().figures() | {"flips": self.flips()}

    def residual(self) -> float:
        return 0.0

    def quantised(self) -> AbstractContextManager[None]:
        return nullcontext()

    def pack(self) -> nn.Module:
        return pack(self.model)

    def _write_packed(self, packed: nn.Module, path: Path) -> None:
        save_packed(packed, path)

    def state_dict(self) -> dict[str, dict[str, Any]]:
        """Return this rank's state of random rounding, by layer. Save model and optimiser as well."""
        return {name: layer.rounding.state_dict() for name, layer in self.layers.items()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a state. Load the model first: flips count from its signs.

        Raises `StateError`, unchanged, for different layers or bits.
        """
        if not isinstance(state, Mapping) or state.keys() != self.layers.keys():
            other = sorted(map(str, set(state) ^ self.layers.keys())) if isinstance(state, Mapping) else []
            raise StateError(
                f"saved for different few-bit layers ({', '.join(other[:3])} differ): use the same arguments"
            )
        for name, layer in self.layers.items():
            layer.rounding.check(state[name])
        for name, layer in self.layers.items():
            layer.rounding.load_state_dict(state[name])
        self._signs = self._packed()

    def remove(self) -> None:
        """Restore the original layers, with current master weights. A second call does nothing."""
        for layer in self.layers.values():
            clipping.unwatch(layer)
        self._fast_path.remove()
        for name, before in self._before.items():
            now = self.model.get_submodule(name)  # `to` and `load_state_dict(assign=True)` replace these
            before._buffers.update(now._buffers)
            before._parameters.update(now._parameters)
        replace_layers(self.model, self._before)
        self.layers, self._before, self._signs = {}, {}, []

    @torch.no_grad()
    def _packed(self) -> list[Tensor]:
        return [
            kernels.xnor_pack(part.detach().float().reshape(1, -1).contiguous()).cpu()
            for layer in self.layers.values()
            for part in layer.masters()
        ]

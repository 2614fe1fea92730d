"""The handle of `binarise` and `quantise`: the layers in few bits, their flips, and the way back."""

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
from laconic.lowbit.few_bit_layers import FEW
from laconic.lowbit.pack import pack, save_packed
from laconic.lowbit.training import LowBitHandle
from laconic.transforms.fast_path import FastPathOff
from laconic.transforms.selection import replace_layers

ONES = torch.tensor(
    [byte.bit_count() for byte in range(256)], dtype=torch.int64, device="cpu"
)  # bits that are set in a byte


@outside_inference_mode("state_dict", "load_state_dict", "remove")
class FewBitHandle(LowBitHandle):
    """Few bits at work on one model. `layers`: the layers in few bits, by name."""

    def __init__(self, model: nn.Module, pairs: dict[str, tuple[nn.Module, Any]]) -> None:
        self.model = model
        self._before = {name: before for name, (before, _) in pairs.items()}
        self.layers: dict[str, Any] = {name: new for name, (_, new) in pairs.items() if isinstance(new, FEW)}
        replace_layers(model, {name: new for name, (_, new) in pairs.items()})
        self._fast_path = FastPathOff(model, self.layers.values())
        for layer in self.layers.values():
            clipping.watch(layer)
        self._signs = self._packed()

    @property
    def weights(self) -> tuple[str, ...]:
        """Names of the weights in few bits, as in `model.named_parameters()`."""
        parts = {id(part): name for name, part in self.model.named_parameters()}
        return tuple(parts[id(part)] for layer in self.layers.values() for part in layer.masters())

    def flips(self) -> float:
        """Share of the weights in few bits whose sign is another one than at the last call; at first, at the
        start.

        It keeps a bit a weight for that.
        """
        before, self._signs = self._signs, self._packed()
        changed = sum(int(ONES[(a ^ b).long()].sum()) for a, b in zip(before, self._signs, strict=True))
        total = sum(part.numel() for layer in self.layers.values() for part in layer.masters())
        return changed / total if total else 0.0

    def figures(self) -> dict[str, Any]:
        """Return the residual, and the flips since the last call."""
        return super().figures() | {"flips": self.flips()}

    def residual(self) -> float:
        """Return 0: the model always computes with its few bits."""
        return 0.0

    def quantised(self) -> AbstractContextManager[None]:
        """Return a block in which the model has its few bits, as always."""
        return nullcontext()

    def pack(self) -> nn.Module:
        """Return the result of `laconic.lowbit.pack`."""
        return pack(self.model)

    def _write_packed(self, packed: nn.Module, path: Path) -> None:
        save_packed(packed, path)

    def state_dict(self) -> dict[str, dict[str, Any]]:
        """What random rounding depends on, by layer: this rank's own, beside the model's and the optimiser's
        state.
        """
        return {name: layer.rounding.state_dict() for name, layer in self.layers.items()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a saved state, with the same bits; flips count from the signs that the model has now, so
        load it first.

        Raises `StateError`, unchanged, for a state of other layers, or of other bits.
        """
        if not isinstance(state, Mapping) or state.keys() != self.layers.keys():
            other = sorted(map(str, set(state) ^ self.layers.keys())) if isinstance(state, Mapping) else []
            raise StateError(
                f"saved for other layers in few bits ({', '.join(other[:3])} differ): convert alike"
            )
        for name, layer in self.layers.items():
            layer.rounding.check(state[name])
        for name, layer in self.layers.items():
            layer.rounding.load_state_dict(state[name])
        self._signs = self._packed()

    def remove(self) -> None:
        """Put the layers back as they were, with the master weights that they have now. A second call does
        nothing.
        """
        for layer in self.layers.values():
            clipping.leave(layer)
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

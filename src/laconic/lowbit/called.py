"""Layers that a model calls, and does not merely read: torch's transformers read the weights of theirs.

In evaluation without gradients `nn.TransformerEncoderLayer` hands the weights of its layers to one kernel,
its fast path, and never calls the layers; `nn.TransformerEncoder` packs what padding leaves into a nested
tensor for that kernel. A layer that computes otherwise than `nn.Linear` would be passed by there, or lacks
the weight that is read. `nn.MultiheadAttention` always reads its `out_proj`, and never calls it.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from torch import nn
from torch.utils.hooks import RemovableHandle

from laconic.core.errors import AttachError


class Called:
    """The encoders around these layers of a model, which call them from now on.

    A hook on an encoder layer turns its fast path off, in torch's own code; so do copies of the model. The
    results are the same up to the order of sums, but for padded positions, which nested tensors set to zero.
    """

    def __init__(self, model: nn.Module, layers: Collection[nn.Module]) -> None:
        given = set(layers)
        around = [module for module in model.modules() if not given.isdisjoint(module.modules())]
        self._hooks: list[RemovableHandle] = [
            module.register_forward_pre_hook(_nothing)
            for module in around
            if isinstance(module, nn.TransformerEncoderLayer)
        ]
        self._nesting = [
            module
            for module in around
            if isinstance(module, nn.TransformerEncoder) and vars(module).get("use_nested_tensor", False)
        ]
        for module in self._nesting:
            module.use_nested_tensor = False

    def remove(self) -> None:
        """Let the encoders take the fast path again. A second call does nothing."""
        for hook in self._hooks:
            hook.remove()
        for module in self._nesting:
            module.use_nested_tensor = True
        self._hooks, self._nesting = [], []


def read(names: Mapping[str, nn.Module]) -> set[nn.Module]:
    """The layers among these modules that are always read, and never called."""
    return {module.out_proj for module in names.values() if isinstance(module, nn.MultiheadAttention)}


def refuse_read(names: Mapping[str, nn.Module], treated: Collection[str]) -> None:
    """Raise `AttachError` if a layer to treat is always read, and never called."""
    passed = read(names)
    for name in treated:
        if names[name] in passed:
            raise AttachError(
                f"{name!r} is the out_proj of an nn.MultiheadAttention, which reads its weight and never"
                f" calls it: keep it with keep=({name!r},)"
            )


def _nothing(module: nn.Module, args: Any) -> None:
    """A hook that is there to be seen."""

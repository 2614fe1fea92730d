"""Fast path of torch's transformers, which reads the weights of layers instead of calling them.

In evaluation without gradients `nn.TransformerEncoderLayer` passes its layers' weights to one kernel, and
`nn.TransformerEncoder` nested tensors; a replaced layer would be ignored. `nn.MultiheadAttention` always
reads its `out_proj`.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from torch import nn
from torch.utils.hooks import RemovableHandle

from laconic.core.errors import AttachError


class FastPathOff:
    """Switch that makes encoders call these layers of a model, until `remove`.

    A hook on an encoder layer turns its fast path off. Results are equal up to the order of sums, except at
    padded positions, which nested tensors set to zero.
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
        for hook in self._hooks:
            hook.remove()
        for module in self._nesting:
            module.use_nested_tensor = True
        self._hooks, self._nesting = [], []


def uncalled(modules: Mapping[str, nn.Module]) -> set[nn.Module]:
    return {module.out_proj for module in modules.values() if isinstance(module, nn.MultiheadAttention)}


def refuse_uncalled(modules: Mapping[str, nn.Module], selected: Collection[str]) -> None:
    never = uncalled(modules)
    for name in selected:
        if modules[name] in never:
            raise AttachError(
                f"{name!r} is the out_proj of an nn.MultiheadAttention, which reads its weight and never"
                f" calls it: keep it with keep=({name!r},)"
            )


def _nothing(module: nn.Module, args: Any) -> None:
    """Do nothing: the hook's presence is enough."""

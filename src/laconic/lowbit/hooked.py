"""Hooks on a layer, which another form in its place would lose."""

from __future__ import annotations

from torch import nn


def has_hooks(layer: nn.Module) -> bool:
    """Whether a call of the layer, or its backward, has hooks."""
    return bool(layer._forward_hooks or layer._forward_pre_hooks or layer._backward_hooks)

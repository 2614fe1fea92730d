"""Statistics of the gradient of a layer's output."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from laconic.activations.layer import terms
from laconic.activations.torch_call import Call

Recorder = Callable[[Tensor], None]


def statistics(call: Call) -> Callable[[Tensor], Recorder]:
    """Return a function that maps the call's output to a recorder of its gradient's statistics."""
    layer, x = call.layer, call.input
    assert layer is not None
    if call.products:
        shape, options = _batched(x.shape, layer.weight), call.geometry(layer.weight)
        support = layer.support

        def products(out: Tensor) -> Recorder:
            count = terms(shape, _batched(out.shape, layer.weight), layer.weight.shape, options)
            return lambda grad: layer.record_products(grad, count, shape[0], support)

        return products
    dims = [d for d in range(x.dim()) if d != 1]
    variance = x.detach().float().var(dims, unbiased=False) + call.given.get("eps", 1e-5)
    inverse = float((1 / variance).mean().sqrt())
    return lambda out: lambda grad: layer.record_norm(grad, inverse)


def _batched(shape: torch.Size, weight: Tensor) -> torch.Size:
    """Return the shape of a layer's input or output, with a batch dimension of 1 if it has none."""
    return torch.Size([1] * (weight.dim() - len(shape))) + shape

"""Torch function that saves a tensor, and the tensor's role."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from laconic.activations.layer import Geometry, Layer, terms

CONVOLUTIONS = ("conv1d", "conv2d", "conv3d")
CONVOLUTION = ("input", "weight", "bias", "stride", "padding", "dilation", "groups")
NORM = ("input", "running_mean", "running_var", "weight", "bias", "training", "momentum", "eps")
POOL = ("input", "kernel_size", "stride", "padding", "dilation", "ceil_mode", "return_indices")
ARGUMENTS: Mapping[str, tuple[str, ...]] = {
    **dict.fromkeys(CONVOLUTIONS, CONVOLUTION),
    "linear": ("input", "weight", "bias"),
    "batch_norm": NORM,
    "max_pool2d": POOL,
    "relu": ("input", "inplace"),
    "relu_": ("input",),
    "dropout": ("input", "p", "training", "inplace"),
}
Recorder = Callable[[Tensor], None]
FLOATS = (torch.float32, torch.bfloat16, torch.float16)


@dataclass
class Call:
    """Call of a function whose saved tensors have known roles. `done`: its input has been saved."""

    op: str
    given: dict[str, Any]
    layer: Layer | None = None
    done: bool = False

    @classmethod
    def of(cls, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Call | None:
        op = getattr(func, "__name__", "")
        names = ARGUMENTS.get(op)
        other_order = op == "batch_norm" and func is not F.batch_norm
        if names is None or other_order:
            return None
        given = {**dict(zip(names, args, strict=False)), **kwargs}
        return cls(op, given) if isinstance(given.get("input"), Tensor) else None

    @property
    def input(self) -> Tensor:
        found: Tensor = self.given["input"]
        return found

    @property
    def products(self) -> bool:
        return self.op in CONVOLUTIONS or self.op == "linear"

    def geometry(self, weight: Tensor) -> Geometry | None:
        if self.op == "linear":
            return None
        each = (self.each(name, weight.dim() - 2) for name in ("stride", "padding", "dilation"))
        return tuple(zip(*each, strict=True))

    def each(self, name: str, dims: int) -> tuple[int, ...]:
        value = self.given.get(name, 0 if name == "padding" else 1)
        if value == "valid":
            return (0,) * dims
        if value == "same":
            sizes = self.given["weight"].shape[2:]
            dilation = self.each("dilation", dims)
            return tuple(d * (k - 1) // 2 for d, k in zip(dilation, sizes, strict=True))
        return (value,) * dims if isinstance(value, int) else tuple(value) * (dims // len(value))

    def role(self, saved: Tensor) -> str:
        """Return a saved tensor's role, or "" if it must stay exact."""
        float_like = saved.dtype in FLOATS
        if self.op in ("relu", "relu_"):
            return "relu" if float_like else ""
        if self.op == "dropout":
            return "mask" if saved.dtype is torch.bool or (float_like and not saved.requires_grad) else ""
        if self.op == "max_pool2d":
            if saved.dtype is torch.int64:
                return "places"
            return "shape" if saved.shape == self.input.shape else ""
        if self.layer is None or self.done or not float_like or saved.numel() != self.input.numel():
            return ""
        if self.products and self._is_cast_weight(saved):
            return ""
        self.done = True  # autocast's cast of the weight may follow, as large
        return "input" if self.products else "norm"

    def _is_cast_weight(self, saved: Tensor) -> bool:
        """Return whether this is autocast's cast of the weight."""
        weight: Tensor = self.given["weight"].detach()
        if weight.numel() != saved.numel() or weight.dtype == saved.dtype or saved.dim() != weight.dim():
            return False
        cast = weight.to(saved.dtype)
        return torch.equal(cast, saved) or (cast.dim() == 2 and torch.equal(cast.T, saved))


def statistics(call: Call) -> Callable[[Tensor], Recorder]:
    """Return a function from the call's output to a recorder of statistics."""
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
    return torch.Size([1] * (weight.dim() - len(shape))) + shape

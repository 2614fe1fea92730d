"""Which call of torch saves a tensor: its name and arguments, and what the tensor is to it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from laconic.activations.layer import Geometry, Layer

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
FLOATS = (torch.float32, torch.bfloat16, torch.float16)


@dataclass
class Call:
    """One call whose saved tensors we know; `done` once its input was seen."""

    op: str
    given: dict[str, Any]
    layer: Layer | None = None
    done: bool = field(default=False)

    @classmethod
    def of(cls, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Call | None:
        """The call, or None of any other function."""
        op = getattr(func, "__name__", "")
        names = ARGUMENTS.get(op)
        if names is None or (
            op == "batch_norm" and func is not F.batch_norm
        ):  # torch's own has another order
            return None
        given = {**dict(zip(names, args, strict=False)), **kwargs}
        return cls(op, given) if isinstance(given.get("input"), Tensor) else None

    @property
    def input(self) -> Tensor:
        """The tensor that it works on."""
        found: Tensor = self.given["input"]
        return found

    @property
    def products(self) -> bool:
        """Whether its weight's gradient, and it alone, reads the input."""
        return self.op in CONVOLUTIONS or self.op == "linear"

    def geometry(self, weight: Tensor) -> Geometry | None:
        """Stride, padding and dilation of a convolution in each dimension; None for a linear layer."""
        if self.op == "linear":
            return None
        each = (self.each(name, weight.dim() - 2) for name in ("stride", "padding", "dilation"))
        return tuple(zip(*each, strict=True))

    def each(self, name: str, dims: int) -> tuple[int, ...]:
        """An argument of a convolution, for each dimension."""
        value = self.given.get(name, 0 if name == "padding" else 1)
        if value == "valid":
            return (0,) * dims
        if value == "same":
            sizes = self.given["weight"].shape[2:]
            dilation = self.each("dilation", dims)
            return tuple(d * (k - 1) // 2 for d, k in zip(dilation, sizes, strict=True))
        return (value,) * dims if isinstance(value, int) else tuple(value) * (dims // len(value))

    def role(self, saved: Tensor) -> str:
        """What a saved tensor, no parameter, is to this call: its word, or "" where it must stay exact."""
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
        self.done = True  # a weight cast by autocast may follow, with as many elements
        return "input" if self.products else "norm"

    def _is_cast_weight(self, saved: Tensor) -> bool:
        """Whether this is the weight, as autocast has cast it: a product may save that before its input."""
        weight: Tensor = self.given["weight"].detach()
        if weight.numel() != saved.numel() or weight.dtype == saved.dtype or saved.dim() != weight.dim():
            return False
        cast = weight.to(saved.dtype)
        return torch.equal(cast, saved) or (cast.dim() == 2 and torch.equal(cast.T, saved))

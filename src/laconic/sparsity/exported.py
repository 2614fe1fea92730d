"""`export`: sparse layers with weights in a sparse format (`sparse_weight`).

A convolution multiplies its weight, (outputs, inputs * kernel), by the image's patches (im2col).
"""

from __future__ import annotations

import math
from typing import Literal, TypeGuard, get_args

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from laconic.core import arguments
from laconic.core.errors import AttachError
from laconic.sparsity.sparse_weight import SparseWeight, is_two_of_four, smaller_form
from laconic.transforms.computed import copy_model
from laconic.transforms.fast_path import FastPathOff, uncalled
from laconic.transforms.selection import named_modules, replace_layers

Form = Literal["csr", "2:4", "auto"]
MAX_DENSITY = 0.5  # above it CSR is larger than dense


class SparseLinear(nn.Module):
    """y = x W^T + b, x (..., inputs), with a sparse W."""

    bias: Tensor | None

    def __init__(self, layer: nn.Linear, form: str) -> None:
        super().__init__()
        self.weight = SparseWeight(layer.weight.detach(), form)
        self.register_buffer("bias", None if layer.bias is None else layer.bias.detach().clone())

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast(x.device.type, enabled=False):
            x = x.to(self.weight.values.dtype)
            y = (self.weight.matrix() @ (x.flatten(0, -2).T if x.dim() > 1 else x[:, None])).T
            y = y.reshape(*x.shape[:-1], y.shape[-1])
            return y if self.bias is None else y + self.bias


class SparseConv2d(nn.Module):
    """Convolution of x (n, c, h, w) or (c, h, w) with one group and a sparse weight."""

    bias: Tensor | None

    def __init__(self, layer: nn.Conv2d, form: str) -> None:
        super().__init__()
        self.kernel, self.stride = layer.kernel_size, layer.stride
        self.padding, self.dilation = layer.padding, layer.dilation
        self.weight = SparseWeight(layer.weight.detach().flatten(1), form)
        self.register_buffer("bias", None if layer.bias is None else layer.bias.detach().clone())

    def forward(self, x: Tensor) -> Tensor:
        if x.dim() == 3:
            one: Tensor = self.forward(x[None])
            return one[0]
        assert not isinstance(self.padding, str)
        sides = zip(x.shape[2:], self.kernel, self.stride, self.padding, self.dilation, strict=True)
        shape = [(n + 2 * p - d * (k - 1) - 1) // s + 1 for n, k, s, p, d in sides]
        with torch.autocast(x.device.type, enabled=False):
            x, weight = x.to(self.weight.values.dtype), self.weight.matrix()
            y = x.new_empty(len(x), weight.shape[0], math.prod(shape))
            for i in range(len(x)):  # so that patches stay in cache
                patches = F.unfold(x[i : i + 1], self.kernel, self.dilation, self.padding, self.stride)
                y[i] = weight @ patches[0]
            y = y.view(*y.shape[:2], *shape)
            return y if self.bias is None else y + self.bias.view(-1, 1, 1)


def export(model: nn.Module, form: Form = "auto") -> nn.Module:
    """Return an inference copy of the model with sparse layers in a sparse format.

    Linear and Conv2d layers (one group, zero padding) with at most half nonzero weights become `SparseLinear`
    and `SparseConv2d`, which compute in their weight's dtype. Layers with hooks and subclasses do not change.
    Outputs are equal up to the order of additions. The `state_dict()` loads into an export of the same
    architecture.

    Args:
        model: Not changed.
        form: "csr"; "2:4", at most two nonzeros in every four weights of a row; "auto": the smaller possible
            form for each weight.

    Raises:
        SpecError: `form` is invalid.
        AttachError: No layer is sparse; a hook computes a weight; a weight does not fit "2:4", or is 16-bit
            CSR, which torch cannot multiply.

    >>> net = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 8))
    >>> _ = net[0].weight.data.masked_fill_(torch.rand(64, 64) > 0.1, 0)
    >>> [type(layer).__name__ for layer in export(net)]
    ['SparseLinear', 'ReLU', 'Linear']
    """
    arguments.choice("form", form, get_args(Form))
    made = copy_model(model)
    names = named_modules(made)
    left, stored = uncalled(names), dict[nn.Module, SparseLinear | SparseConv2d]()
    for name, layer in names.items():
        if layer not in stored and layer not in left and _is_sparse(layer):
            stored[layer] = _sparse_layer(name, layer, form)
    found = {name: stored[layer] for name, layer in names.items() if layer in stored}
    if not found:
        raise AttachError(
            "no layer of this model is sparse: each Linear and Conv2d layer has more than half nonzero"
            " weights; train it with laconic.sparsity.rigl(model, optimizer, ...)"
        )
    if "" in found:
        return found[""].eval()
    replace_layers(made, found)
    FastPathOff(made, found.values())
    return made.eval()


def nbytes(model: nn.Module) -> int:
    """Return the bytes of a model's parameters and buffers.

    >>> nbytes(nn.Linear(3, 2))
    32
    """
    return sum(each.numel() * each.element_size() for each in (*model.parameters(), *model.buffers()))


def _is_sparse(layer: nn.Module) -> TypeGuard[nn.Linear | nn.Conv2d]:
    if type(layer) not in (nn.Linear, nn.Conv2d) or layer._forward_hooks or layer._forward_pre_hooks:
        return False
    if isinstance(layer, nn.Conv2d) and (
        layer.groups > 1 or layer.padding_mode != "zeros" or isinstance(layer.padding, str)
    ):
        return False
    assert isinstance(layer, (nn.Linear, nn.Conv2d))
    return int((layer.weight != 0).sum()) <= MAX_DENSITY * layer.weight.numel()


def _sparse_layer(name: str, layer: nn.Linear | nn.Conv2d, form: Form) -> SparseLinear | SparseConv2d:
    weight = layer.weight.detach().flatten(1)
    chosen = smaller_form(weight) if form == "auto" else form
    if chosen == "2:4" and not is_two_of_four(weight):
        raise AttachError(f"{name!r} has more than two nonzeros in four consecutive weights: use form='csr'")
    if chosen == "csr" and weight.dtype not in (torch.float32, torch.float64):
        raise AttachError(
            f"{name!r} is {weight.dtype}, which torch cannot multiply as CSR: call model.float()"
        )
    return SparseLinear(layer, chosen) if isinstance(layer, nn.Linear) else SparseConv2d(layer, chosen)

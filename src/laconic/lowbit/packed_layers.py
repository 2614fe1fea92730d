"""Inference layers with packed weights: bit for bit the few-bit layers' results.

    u(x) = sum_i 2^i u_i,  u_i in {0, 1};  L Q(x) = sum_i 2^i s_i,  s_i = 2 u_i - 1
    (L Q(w)) (L Q(x)) = sum_i sum_j 2^(i + j) (signs w_i) (signs x_j)

Products of signs are XNORs and popcounts (`kernels.xnor`), in integers below 2^24, exact in float32.
BatchNorm stays float32: folded into a threshold it would round differently.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from laconic import kernels
from laconic.core.errors import AttachError, StateError
from laconic.kernels.xnor.shape import LONGEST
from laconic.lowbit.few_bit_layers import FewBitConv2d, FewBitLinear
from laconic.lowbit.few_bits import FewBits, Rounding
from laconic.lowbit.levels import level_indices

EXACT = 1 << 24  # float32 has all integers up to this one


class Packed(nn.Module):
    levels: FewBits
    packs: dict[str, int]  # weights per row, by buffer

    def __init__(self, levels: FewBits, entries: int) -> None:
        super().__init__()
        if levels.scale != "linear":
            raise AttachError("logarithmic levels cannot be packed: train with scale='linear'")
        if levels.activations is not None and levels.divisor * entries > EXACT:
            raise AttachError(
                f"{entries} products of {levels.weights} by {levels.activations} bits exceed 2^24, beyond"
                " which float32 is not exact: name the layer in keep="
            )
        if levels.activations is not None and entries > LONGEST:
            raise AttachError(
                f"a product has {entries} signs, but XNOR kernels take at most {LONGEST}: name the layer in"
                " keep="
            )
        self.levels = levels
        self.packs = {}

    def add_bits_buffer(self, name: str, shape: tuple[int, ...], weight: Tensor, row: int) -> None:
        self.packs[name] = row
        whole = (self.levels.weights, *shape, (row + 7) // 8)
        self.register_buffer(name, torch.zeros(whole, dtype=torch.uint8, device=weight.device))

    def add_bias_buffer(self, name: str, bias: Tensor | None) -> None:
        self.register_buffer(name, None if bias is None else bias.detach().clone().float())

    @torch.no_grad()
    def pack_weight(self, name: str, weight: Tensor) -> None:
        at = level_indices(weight.detach().float(), self.levels.weights).to(torch.int32)
        for plane, bits in enumerate(getattr(self, name)):
            signs = ((at >> plane & 1).float() - 0.5).reshape(-1, weight.shape[-1]).contiguous()
            bits.copy_(kernels.xnor_pack(signs).view(bits.shape))

    def check(self) -> None:
        for name, row in self.packs.items():
            if row % 8 and bool((getattr(self, name)[..., -1] >> row % 8).any()):
                raise StateError(f"{name} has bits set after the {row} weights of a row: damaged file")

    def _check_use(self, x: Tensor) -> None:
        if torch.is_grad_enabled() and x.requires_grad:
            raise StateError(
                "a packed layer has no gradient, but its input requires one: run it under torch.no_grad(), or"
                " use the unpacked model"
            )
        tracing = torch.jit.is_tracing()  # type: ignore[attr-defined, no-untyped-call]
        if tracing or torch.compiler.is_exporting():
            raise StateError(
                "torch.jit.trace and torch.export cannot record the kernels of packed layers: use the"
                " unpacked model or torch.compile"
            )

    def signs(self, x: Tensor) -> list[Tensor]:
        count = self.levels.activations
        if count == 1:
            return [x]
        at = level_indices(x, count or 1).to(torch.int32)
        return [(at >> plane & 1).float() - 0.5 for plane in range(count or 1)]

    def product(self, name: str, x: Tensor, multiply: Any, real: Any) -> Tensor:
        self._check_use(x)
        planes = getattr(self, name)
        if self.levels.activations is None:
            weight = sum(2**i * self._plane(name, bits) for i, bits in enumerate(planes))
            with torch.autocast(x.device.type, enabled=False):
                total = real(x, weight)
        else:
            signs = self.signs(x)
            total = None
            for j, of_x in enumerate(signs):
                of_x = of_x.contiguous()
                for i, bits in enumerate(planes):
                    one = multiply(of_x, bits)
                    one = one if i + j == 0 else one.mul_(2 ** (i + j))
                    total = one if total is None else total.add_(one)
        out: Tensor = total
        return out if self.levels.divisor == 1 else out * (1 / self.levels.divisor)

    def _plane(self, name: str, bits: Tensor) -> Tensor:
        row = self.packs[name]
        return kernels.xnor_unpack(bits.reshape(-1, bits.shape[-1]).contiguous(), row).view(
            *bits.shape[:-1], row
        )

    def extra_repr(self) -> str:
        return str(Rounding(self.levels))


class PackedLinear(Packed):
    """A `FewBitLinear`: x (..., c) to (..., o). `bits` uint8 (planes, o, ceil(c / 8))."""

    def __init__(self, layer: nn.Linear, levels: FewBits) -> None:
        super().__init__(levels, layer.in_features)
        self.add_bits_buffer("bits", (layer.out_features,), layer.weight, layer.in_features)
        self.add_bias_buffer("bias", layer.bias)

    @classmethod
    def of(cls, layer: FewBitLinear) -> PackedLinear:
        made = cls(layer, layer.rounding.bits)
        made.pack_weight("bits", layer.weight)
        return made

    def forward(self, x: Tensor) -> Tensor:
        y = linear(self, "bits", x.float())
        return y if self.bias is None else y + self.bias  # type: ignore[operator]


class PackedConv2d(Packed):
    """A `FewBitConv2d`: x (n, c, h, w). `bits` uint8 (planes, o, kh, kw, ceil(c / groups / 8))."""

    def __init__(self, layer: nn.Conv2d, levels: FewBits) -> None:
        channels = layer.in_channels // layer.groups
        super().__init__(levels, channels * layer.kernel_size[0] * layer.kernel_size[1])
        self.shape: Any = {"stride": layer.stride, "padding": layer.padding, "dilation": layer.dilation}
        self.groups = layer.groups
        self.add_bits_buffer("bits", (layer.out_channels, *layer.kernel_size), layer.weight, channels)
        self.add_bias_buffer("bias", layer.bias)

    @classmethod
    def of(cls, layer: FewBitConv2d) -> PackedConv2d:
        made = cls(layer, layer.rounding.bits)
        made.pack_weight("bits", layer.weight.permute(0, 2, 3, 1))
        return made

    def forward(self, x: Tensor) -> Tensor:
        if x.dim() == 3:
            return self.forward(x[None])[0]
        y = self.product("bits", x.float(), self._multiply, self._real)
        return y if self.bias is None else y + self.bias.view(-1, 1, 1)  # type: ignore[operator]

    def _multiply(self, signs: Tensor, bits: Tensor) -> Tensor:
        if self.groups == 1:
            return kernels.xnor_conv2d(signs, bits, **self.shape)
        parts = zip(signs.chunk(self.groups, 1), bits.chunk(self.groups), strict=True)
        return torch.cat([kernels.xnor_conv2d(x.contiguous(), own, **self.shape) for x, own in parts], 1)

    def _real(self, x: Tensor, weight: Tensor) -> Tensor:
        return F.conv2d(x, weight.permute(0, 3, 1, 2).contiguous(), None, groups=self.groups, **self.shape)


def linear(layer: Packed, name: str, x: Tensor) -> Tensor:
    flat = x.reshape(math.prod(x.shape[:-1]), x.shape[-1])
    y = layer.product(name, flat, kernels.xnor_matmul, F.linear)
    return y.view(*x.shape[:-1], y.shape[-1])

"""Layers with simulated low-bit activations, weights and gradients.

    y = conv(Q(x), Q(w)) + Q(b);  dx from Q(dy) rounded at random, dw from dy itself

Banner et al. 2018, arXiv:1805.11046. Activations are rounded between running ends, weights and biases between
their own (see `grid`).
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from laconic.core.errors import AttachError
from laconic.lowbit import biprecision
from laconic.lowbit.activation import Activation
from laconic.lowbit.grid import Precision, fitted

EIGHT = Precision()


class QuantConv2d(nn.Conv2d):
    """Low-bit convolution of x (n, c, h, w) or (c, h, w) float32, padded with zeros.

    Arguments as in `torch.nn.Conv2d`; `padding` is a number.

    >>> layer = QuantConv2d(3, 8, 3, padding=1, precision=Precision(bits=8))
    >>> layer(torch.randn(4, 3, 16, 16)).shape
    torch.Size([4, 8, 16, 16])
    """

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: int | tuple[int, int],
        stride: int | tuple[int, int] = 1,
        padding: int | tuple[int, int] = 0,
        dilation: int | tuple[int, int] = 1,
        groups: int = 1,
        bias: bool = True,
        *,
        precision: Precision = EIGHT,
        device: torch.device | None = None,
    ) -> None:
        shape = (in_channels, out_channels, kernel_size, stride, padding, dilation, groups, bias)
        super().__init__(*shape, device=device, dtype=torch.float32)
        self.precision = precision
        self.inputs = Activation(precision, device)

    @classmethod
    def of(cls, layer: nn.Conv2d, precision: Precision) -> QuantConv2d:
        if layer.padding_mode != "zeros" or isinstance(layer.padding, str):
            raise AttachError(
                f"padding of a low-bit convolution must be a number of zeros, got padding={layer.padding!r},"
                f" padding_mode={layer.padding_mode!r}: pad in a layer before it, such as nn.ReflectionPad2d"
            )
        shape = (layer.kernel_size, layer.stride, layer.padding, layer.dilation)
        made = cls(
            layer.in_channels,
            layer.out_channels,
            *shape,  # type: ignore[arg-type]  # torch types a pair as any tuple
            layer.groups,
            layer.bias is not None,
            precision=precision,
            device=layer.weight.device,
        )
        made.weight, made.bias = layer.weight, layer.bias
        return made

    def forward(self, x: Tensor) -> Tensor:
        if x.dim() == 3:
            return self.forward(x[None])[0]
        bits = self.precision.bits
        return biprecision.conv2d(
            self.inputs(x),
            fitted(self.weight, bits),
            None if self.bias is None else fitted(self.bias, bits),
            stride=self.stride,  # type: ignore[arg-type]  # as above
            padding=self.padding,  # type: ignore[arg-type]  # `of` takes no string
            dilation=self.dilation,  # type: ignore[arg-type]
            groups=self.groups,
            bits=bits,
            key=self.inputs.key("gradient"),
        )


class QuantLinear(nn.Linear):
    """Low-bit dense layer of x (n, ..., c) float32. Arguments as in `torch.nn.Linear`.

    >>> QuantLinear(16, 4)(torch.randn(2, 16)).shape
    torch.Size([2, 4])
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        *,
        precision: Precision = EIGHT,
        device: torch.device | None = None,
    ) -> None:
        super().__init__(in_features, out_features, bias, device=device, dtype=torch.float32)
        self.precision = precision
        self.inputs = Activation(precision, device)

    @classmethod
    def of(cls, layer: nn.Linear, precision: Precision) -> QuantLinear:
        shape = (layer.in_features, layer.out_features, layer.bias is not None)
        made = cls(*shape, precision=precision, device=layer.weight.device)
        made.weight, made.bias = layer.weight, layer.bias
        return made

    def forward(self, x: Tensor) -> Tensor:
        bits = self.precision.bits
        bias = None if self.bias is None else fitted(self.bias, bits)
        x, weight = self.inputs(x), fitted(self.weight, bits)
        return biprecision.linear(x, weight, bias, bits=bits, key=self.inputs.key("gradient"))

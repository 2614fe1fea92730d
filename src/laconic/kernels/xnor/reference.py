"""Products of signs in plain torch."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from laconic.kernels.xnor.shape import ConvShape


def pack(x: Tensor) -> Tensor:
    padded = F.pad((x >= 0).to(torch.uint8), (0, -x.shape[1] % 8))
    places = torch.arange(8, device=x.device, dtype=torch.uint8)
    return (padded.view(len(x), padded.shape[1] // 8, 8) << places).sum(2, dtype=torch.uint8)


def unpack(bits: Tensor, n: int) -> Tensor:
    places = torch.arange(8, device=bits.device, dtype=torch.uint8)
    ones = (bits[:, :, None] >> places & 1).flatten(1)[:, :n]
    return ones.float().mul_(2).sub_(1)


def signs(x: Tensor) -> Tensor:
    return (x >= 0).float().mul_(2).sub_(1)


def matmul(x: Tensor, bits: Tensor) -> Tensor:
    return signs(x) @ unpack(bits, x.shape[1]).T


def conv2d(x: Tensor, bits: Tensor, shape: ConvShape) -> Tensor:
    weight = unpack(bits.reshape(-1, bits.shape[3]), shape.channels)
    weight = weight.view(shape.outputs, shape.taps_y, shape.taps_x, shape.channels).permute(0, 3, 1, 2)
    return F.conv2d(
        signs(x),
        weight.contiguous(),
        stride=(shape.stride_y, shape.stride_x),
        padding=(shape.padding_y, shape.padding_x),
        dilation=(shape.dilation_y, shape.dilation_x),
    )

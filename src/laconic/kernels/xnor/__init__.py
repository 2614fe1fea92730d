"""Products of signs, one bit each: x (m, n) times weights (o, n) as n - 2 popcount(x xor w).

The sign of x >= 0, hence of -0.0, is 1; that of NaN is -1. Results equal a float32 product of 1 and -1.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from laconic.kernels import dispatch
from laconic.kernels.xnor import reference
from laconic.kernels.xnor.shape import LONGEST as LONGEST
from laconic.kernels.xnor.shape import ConvShape as ConvShape
from laconic.kernels.xnor.shape import Pair

_popcount = True


@contextmanager
def without_popcount() -> Iterator[None]:
    """Leave VPOPCNTDQ unused; for tests and benchmarks."""
    global _popcount
    before, _popcount = _popcount, False
    try:
        yield
    finally:
        _popcount = before


def xnor_pack(x: Tensor) -> Tensor:
    """Pack signs of float32 x (r, n) to uint8 (r, ceil(n / 8)).

    Bit j of byte i is set where x[:, 8 i + j] >= 0; padding is 0.

    >>> xnor_pack(torch.tensor([[1.0, -2.0, 0.0], [-1.0, -1.0, 3.0]])).tolist()
    [[5], [4]]
    """
    _check("x", x, 2)
    if (native := dispatch.native(x)) is not None:
        bits = torch.empty(len(x), (x.shape[1] + 7) // 8, dtype=torch.uint8, device="cpu")
        native.xnor_pack(x, x.shape[1], bits)
        return bits
    return reference.pack(x)


def xnor_unpack(bits: Tensor, n: int) -> Tensor:
    """Unpack `xnor_pack` to 1 and -1, float32 (r, n).

    >>> xnor_unpack(torch.tensor([[5]], dtype=torch.uint8), 3).tolist()
    [[1.0, -1.0, 1.0]]
    """
    _check_bits(bits, (bits.shape[0], (n + 7) // 8), 2)
    return reference.unpack(bits, n)


def xnor_matmul(x: Tensor, bits: Tensor) -> Tensor:
    """Return the product of the signs of float32 x (m, n) with packed signs (o, n): float32 (m, o).

    `bits`: uint8 (o, ceil(n / 8)) of `xnor_pack`, whose padding is ignored. n is at most 2^22.

    >>> xnor_matmul(torch.tensor([[0.5, -3.0, 1.0]]), torch.tensor([[0b101], [0b010]], dtype=torch.uint8))
    tensor([[ 3., -3.]])
    """
    _check("x", x, 2)
    m, n = x.shape
    if n > LONGEST:
        raise ValueError(f"a product has at most {LONGEST} entries, got {n}")
    _check_bits(bits, (bits.shape[0], (n + 7) // 8), 2)
    if (native := dispatch.native(x, bits)) is not None:
        out = torch.empty(m, len(bits), dtype=torch.float32, device="cpu")
        native.xnor_matmul(x, m, n, bits, len(bits), out, _popcount)
        return out
    return reference.matmul(x, bits)


def xnor_conv2d(
    x: Tensor, bits: Tensor, *, stride: Pair = (1, 1), padding: Pair = (0, 0), dilation: Pair = (1, 1)
) -> Tensor:
    """Convolve the signs of float32 x (b, c, h, w), padded with zeros: float32 (b, o, oh, ow).

    `bits`: uint8 (o, kh, kw, ceil(c / 8)), the weights' signs (o, kh, kw, c) packed along the channels. A
    padded entry counts as 0. A result has at most 2^22 products.

    >>> bits = torch.tensor([[[[1], [1], [1]]]], dtype=torch.uint8)  # three ones in a row
    >>> xnor_conv2d(torch.tensor([[[[1.0, 2.0, -3.0, -4.0]]]]), bits, padding=(0, 1)).tolist()
    [[[[2.0, 1.0, -1.0, -2.0]]]]
    """
    _check("x", x, 4)
    if bits.dim() != 4:
        raise ValueError(f"bits must have shape (o, kh, kw, ceil(c / 8)), got {tuple(bits.shape)}")
    images, channels, height, width = x.shape
    outputs, taps_y, taps_x, _ = bits.shape
    shape = ConvShape(
        *(images, channels, height, width, outputs, taps_y, taps_x),
        *(stride[0], stride[1], padding[0], padding[1], dilation[0], dilation[1]),
    )
    _check_bits(bits, (outputs, taps_y, taps_x, (channels + 7) // 8), 4)
    if (native := dispatch.native(x, bits)) is not None:
        out = torch.empty(
            images, outputs, shape.out_height, shape.out_width, dtype=torch.float32, device="cpu"
        )
        native.xnor_conv2d(x, shape, bits, out, _popcount)
        return out
    return reference.conv2d(x, bits, shape)


def _check(name: str, x: Tensor, dims: int) -> None:
    if x.dtype is not torch.float32 or x.dim() != dims or not x.is_contiguous():
        kind = "contiguous" if x.is_contiguous() else "strided"
        raise ValueError(
            f"{name} must be a contiguous float32 tensor of {dims} dimensions,"
            f" got {kind} {x.dtype} {tuple(x.shape)}"
        )


def _check_bits(bits: Tensor, shape: tuple[int, ...], dims: int) -> None:
    if bits.dtype is not torch.uint8 or tuple(bits.shape) != shape or not bits.is_contiguous():
        raise ValueError(
            f"bits must be a contiguous uint8 tensor {shape}, got {bits.dtype} {tuple(bits.shape)}:"
            " pack them with xnor_pack"
        )

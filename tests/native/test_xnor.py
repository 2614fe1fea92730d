"""Products of signs: those of float32 on 1 and -1, bit for bit, at every level of dispatch."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from laconic import kernels
from tests.cases import over

WIDEST = kernels.runnable()[-1]
LEVELS = [*kernels.runnable(), "without popcount"]
SIZES = (1, 7, 31, 32, 33, 64, 100, 1000)
FEW = (1, 3, 4, 5, 31, 64, 67)


@contextmanager
def at(level: str) -> Iterator[None]:
    with ExitStack() as stack:
        if level == "without popcount":
            stack.enter_context(kernels.without_popcount())
            level = WIDEST
        stack.enter_context(kernels.using(level))
        yield


def draw(*shape: int) -> Tensor:
    """Numbers of both signs, with zeros of both signs among them."""
    x = torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)))
    x[x.abs() < 0.05] = 0.0
    x[x.abs() > 2] = -0.0
    return x


def sign(x: Tensor) -> Tensor:
    return torch.where(x >= 0, 1.0, -1.0)


def packed(weight: Tensor) -> Tensor:
    """Bits of weights (o, c, kh, kw), along the channels."""
    o, c, kh, kw = weight.shape
    return kernels.xnor_pack(weight.permute(0, 2, 3, 1).reshape(-1, c).contiguous()).view(o, kh, kw, -1)


@over(level=LEVELS, n=(0, 1, 7, 8, 31, 63, 64, 65, 130, 1000))
def test_bits_are_signs_in_their_order(level: str, n: int) -> None:
    x = draw(3, n)
    with at(level):
        bits = kernels.xnor_pack(x)
    expected = [sum(1 << i for i, value in enumerate(row) if value >= 0) for row in x.tolist()]
    assert [int.from_bytes(bytes(row), "little") for row in bits.tolist()] == expected
    assert bits.shape == (3, (n + 7) // 8)
    assert torch.equal(kernels.xnor_unpack(bits, n), sign(x))


@over(level=LEVELS, n=SIZES)
def test_a_product_is_that_of_floats(level: str, n: int) -> None:
    for m, outputs in itertools.product(FEW, FEW):
        x, weight = draw(m, n), draw(outputs, n)
        with at(level):
            out = kernels.xnor_matmul(x, kernels.xnor_pack(weight))
        assert torch.equal(out, sign(x) @ sign(weight).T), (m, outputs)


@over(level=LEVELS)
def test_long_and_wide_products_are_those_of_floats(level: str) -> None:
    for m, outputs, n in ((2, 3, 70_001), (130, 200, 1000), (5, 1000, 129), (3, 2, 1 << 22)):
        x, weight = draw(m, n), draw(outputs, n)
        with at(level):
            assert torch.equal(kernels.xnor_matmul(x, kernels.xnor_pack(weight)), sign(x) @ sign(weight).T)


@over(level=LEVELS)
def test_empty_sides_give_empty_or_zero_products(level: str) -> None:
    with at(level):
        for m, outputs, n in ((0, 3, 5), (3, 0, 5), (2, 3, 0)):
            out = kernels.xnor_matmul(torch.ones(m, n), kernels.xnor_pack(torch.ones(outputs, n)))
            assert out.shape == (m, outputs) and not out.any()


CONVS = [  # channels, outputs, height, width, kernel, stride, padding, dilation
    (1, 1, 1, 1, (1, 1), (1, 1), (0, 0), (1, 1)),
    (3, 5, 8, 10, (3, 3), (1, 1), (1, 1), (1, 1)),
    (64, 64, 16, 16, (3, 3), (1, 1), (1, 1), (1, 1)),
    (33, 7, 9, 11, (3, 3), (2, 2), (1, 1), (1, 1)),
    (8, 4, 17, 13, (5, 3), (2, 3), (3, 2), (2, 1)),
    (70, 9, 4, 4, (1, 1), (1, 1), (0, 0), (1, 1)),
    (16, 16, 5, 5, (3, 3), (1, 1), (4, 4), (1, 1)),  # corners whose taps all lie outside
    (1, 2, 2, 2, (2, 2), (3, 3), (2, 2), (1, 1)),
    (31, 3, 3, 3, (3, 3), (1, 1), (0, 0), (1, 1)),
    (100, 10, 7, 6, (2, 4), (1, 2), (0, 3), (3, 1)),
    (32, 6, 4, 4, (3, 3), (1, 1), (5, 0), (4, 1)),  # taps far apart
]


@over(level=LEVELS, shape=CONVS)
def test_a_convolution_is_that_of_floats_with_zeros_around(level: str, shape: tuple) -> None:
    channels, outputs, height, width, kernel, stride, padding, dilation = shape
    x, weight = draw(3, channels, height, width), draw(outputs, channels, *kernel)
    how = {"stride": stride, "padding": padding, "dilation": dilation}
    with at(level):
        out = kernels.xnor_conv2d(x, packed(weight), **how)
    assert torch.equal(out, F.conv2d(sign(x), sign(weight), **how))


@over(level=LEVELS)
def test_many_random_convolutions_are_those_of_floats(level: str) -> None:
    rng = torch.Generator().manual_seed(1)
    done = 0
    for _ in range(150):
        c, o, h, w, kh, kw, s, t, p, q, d, e, b = (
            int(torch.randint(1, most, (1,), generator=rng))
            for most in (70, 20, 13, 13, 5, 5, 4, 4, 5, 5, 4, 4, 3)
        )
        if h + 2 * p < d * (kh - 1) + 1 or w + 2 * q < e * (kw - 1) + 1:
            continue
        x, weight = draw(b, c, h, w), draw(o, c, kh, kw)
        how = {"stride": (s, t), "padding": (p, q), "dilation": (d, e)}
        with at(level):
            out = kernels.xnor_conv2d(x, packed(weight), **how)
        assert torch.equal(out, F.conv2d(sign(x), sign(weight), **how)), (c, o, h, w, kh, kw, how)
        done += 1
    assert done > 80


@over(level=LEVELS)
def test_bits_behind_the_last_weight_count_for_nothing(level: str) -> None:
    x, weight = draw(5, 13), draw(3, 13)
    image, taps = draw(2, 5, 4, 4), draw(3, 5, 3, 3)
    with at(level):
        bits = kernels.xnor_pack(weight)
        bits[:, -1] |= 0b11100000
        assert torch.equal(kernels.xnor_matmul(x, bits), sign(x) @ sign(weight).T)
        out = kernels.xnor_conv2d(image, packed(taps) | 0b11100000, padding=(1, 1))
    assert torch.equal(out, F.conv2d(sign(image), sign(taps), padding=1))


def test_what_does_not_fit_is_refused() -> None:
    x, bits = torch.ones(2, 9), torch.zeros(3, 2, dtype=torch.uint8)
    image, taps = torch.ones(1, 9, 4, 4), torch.zeros(3, 3, 3, 2, dtype=torch.uint8)
    cases = [
        ("contiguous float32", lambda: kernels.xnor_matmul(x.double(), bits)),
        ("got strided", lambda: kernels.xnor_matmul(torch.ones(9, 2).T, bits)),
        ("bits must be", lambda: kernels.xnor_matmul(x, bits[:, :1])),
        ("bits must be", lambda: kernels.xnor_matmul(torch.ones(2, 17), bits)),
        ("bits must be", lambda: kernels.xnor_matmul(x, bits.int())),
        ("at most 4194304 entries", lambda: kernels.xnor_matmul(torch.ones(1, (1 << 22) + 1), bits)),
        ("bits must be", lambda: kernels.xnor_unpack(bits, 17)),
        ("2 dimensions", lambda: kernels.xnor_pack(image)),
        ("4 dimensions", lambda: kernels.xnor_conv2d(x, taps)),
        ("bits must have shape", lambda: kernels.xnor_conv2d(image, bits)),
        ("bits must be", lambda: kernels.xnor_conv2d(torch.ones(1, 17, 4, 4), taps)),
        ("does not fit into 4 x 4", lambda: kernels.xnor_conv2d(image, taps, dilation=(2, 1))),
        ("stride_y must be from 1", lambda: kernels.xnor_conv2d(image, taps, stride=(0, 1))),
        ("padding_x must be from 0", lambda: kernels.xnor_conv2d(image, taps, padding=(0, -1))),
        (
            "at most 4194304 entries",
            lambda: kernels.xnor_conv2d(image, taps[:1].expand(1, 3, 3, 2).repeat(1, 400, 400, 1)),
        ),
    ]
    for says, call in cases:
        with pytest.raises(ValueError, match=says):
            call()

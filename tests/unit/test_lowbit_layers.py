"""Low-bit layers, norms and grids against their equations."""

from __future__ import annotations

import math
import re

import pytest
import torch
import torch.nn.functional as F
from tests.unit.shared import for_each, refuses
from torch import Tensor, nn

from laconic.core.errors import SpecError
from laconic.lowbit import (
    EvoNormS0,
    Precision,
    QuantAdd,
    QuantConv2d,
    QuantLinear,
    RangeEvoNorm,
    RangeGroupNorm,
    RangeNorm,
)
from laconic.lowbit.activation import Activation
from laconic.lowbit.grid import MIN_SPACING, ends, fitted, quantise, rounded_gradient, straight
from laconic.lowbit.range_scale import chunks_of, range_constant, range_scale

EIGHT = Precision()
ROUNDING = {"rtol": 1e-5, "atol": 1e-6}  # float32 sums in another order


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def twin(x: Tensor, low: float, high: float, bits: int) -> Tensor:
    """Q, an element at a time, in Python's own numbers."""
    most = 2**bits - 1
    s = max((high - low) / most, MIN_SPACING)
    values = [round(min(max((v - low) / s, 0), most)) * s + low for v in x.flatten().tolist()]
    return torch.tensor(values).view(x.shape)


def plain_scale(x: Tensor) -> float:
    """The range scale of one row, chunk by chunk."""
    cut = x.flatten().tolist()
    m = len(cut) // 16
    parts = [cut[k * m : (k + 1) * m] for k in range(16)]
    spread = sum(map(max, parts)) / 16 - sum(map(min, parts)) / 16
    return 1 / (range_constant(m) * spread + 1e-5)


def theirs(product, x: Tensor, weight: Tensor, bias: Tensor | None, key: int, bits: int) -> Tensor:
    """Two products, of which each gives one gradient."""
    fixed = None if bias is None else bias.detach()
    exact = product(x.detach(), weight, bias)
    rough = rounded_gradient(product(x, weight.detach(), fixed), bits, key)
    return exact + rough - exact.detach()


CONVS = [
    {"in_channels": 4, "out_channels": 6, "kernel_size": 3, "padding": 1},
    {"in_channels": 4, "out_channels": 8, "kernel_size": (1, 3), "stride": 2, "groups": 2, "bias": False},
    {"in_channels": 4, "out_channels": 4, "kernel_size": 3, "padding": (2, 0), "dilation": (2, 1)},
]


@for_each("shape", CONVS)
def test_one_backward_gives_both_gradients_of_a_convolution(shape) -> None:
    torch.manual_seed(0)
    layer = QuantConv2d(**shape, precision=Precision(bits=4, seed=9))
    runs = []
    for own in (True, False):
        layer.zero_grad()
        x = normal(3, 4, 9, 8).requires_grad_()
        if own:
            layer.inputs.turns.zero_()
            y = layer(x)
        else:
            layer.inputs.turns.zero_()
            quantised = layer.inputs(x)
            key = layer.inputs.key("gradient")

            def product(x, weight, bias):
                return F.conv2d(x, weight, bias, layer.stride, layer.padding, layer.dilation, layer.groups)

            bias = None if layer.bias is None else fitted(layer.bias, 4)
            y = theirs(product, quantised, fitted(layer.weight, 4), bias, key, 4)
        y.backward(normal(*y.shape, seed=2))
        runs.append([y.detach(), x.grad, *(p.grad.clone() for p in layer.parameters())])
    for ours, other in zip(*runs, strict=True):
        torch.testing.assert_close(ours, other, rtol=1e-4, atol=1e-5)


def test_one_backward_gives_both_gradients_of_a_dense_layer() -> None:
    torch.manual_seed(0)
    layer, slope = QuantLinear(7, 5, precision=Precision(bits=3, seed=1)), normal(4, 6, 5, seed=2)
    x = normal(4, 6, 7).requires_grad_()
    layer(x).backward(slope)
    other = normal(4, 6, 7).requires_grad_()
    low, high = other.detach().flatten(1).amin(1).mean(), other.detach().flatten(1).amax(1).mean()
    weight = layer.weight.detach().clone().requires_grad_()
    y = theirs(
        F.linear,
        straight(other, low, high, 3),
        fitted(weight, 3),
        fitted(layer.bias.detach(), 3),
        layer.inputs.key("gradient"),
        3,
    )
    y.backward(slope)
    torch.testing.assert_close(x.grad, other.grad, **ROUNDING)
    torch.testing.assert_close(layer.weight.grad, weight.grad, **ROUNDING)
    assert layer.bias is not None
    torch.testing.assert_close(layer.bias.grad, slope.sum((0, 1)), **ROUNDING)


def test_the_weight_gradient_does_not_see_the_rounding() -> None:
    layer, slope = QuantLinear(7, 5, precision=Precision(bits=2)), normal(64, 5, seed=2)
    x = normal(64, 7).requires_grad_()
    layer(x).backward(slope)
    quantised = layer.inputs.eval()(x.detach())
    torch.testing.assert_close(layer.weight.grad, slope.T @ layer.inputs.train()(x.detach()), **ROUNDING)
    assert quantised.unique().numel() <= 4
    exact = slope @ fitted(layer.weight, 2)
    assert x.grad is not None and not torch.allclose(x.grad, exact, rtol=0.01)


def test_what_a_layer_computes_with_has_few_values() -> None:
    layer = QuantLinear(1, 200, bias=False, precision=Precision(bits=3))
    with torch.no_grad():
        layer.weight.copy_(normal(200, 1))
        y = layer(torch.ones(2, 1))
    assert y.unique().numel() == 8


def test_a_sum_rounds_both_parts_and_the_gradient() -> None:
    layer = QuantAdd(Precision(bits=3, seed=4))
    x, y = normal(4, 10).requires_grad_(), normal(4, 10, seed=1).requires_grad_()
    total, slope = layer(x, y), normal(4, 10, seed=2)
    total.backward(slope)
    both = [twin(e, float(e.amin(1).mean()), float(e.amax(1).mean()), 3) for e in (x.detach(), y.detach())]
    torch.testing.assert_close(total.detach(), both[0] + both[1], **ROUNDING)
    assert x.grad is not None and torch.equal(x.grad, y.grad) and x.grad.unique().numel() <= 8


def test_autocast_leaves_low_bit_layers_in_float32() -> None:
    layer = nn.Sequential(QuantConv2d(3, 4, 3), nn.Flatten(), QuantLinear(16, 2))
    x = normal(2, 3, 4, 4)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        y = layer(x)
    assert y.dtype == torch.float32


def test_an_empty_batch_moves_nothing() -> None:
    layer = QuantLinear(3, 2, precision=Precision(bits=8))
    layer(normal(4, 3))
    before = layer.inputs.low.clone(), layer.inputs.high.clone()
    assert layer(torch.empty(0, 3)).shape == (0, 2)
    assert (layer.inputs.low, layer.inputs.high) == before


@for_each("bits", [2, 4, 8])
def test_the_grid_is_its_equation(bits: int) -> None:
    x = normal(300)
    low, high = torch.tensor(-1.3), torch.tensor(1.9)
    torch.testing.assert_close(quantise(x, low, high, bits), twin(x, -1.3, 1.9, bits), **ROUNDING)
    inside = x.clamp(-1.3, 1.9)
    spacing = 3.2 / (2**bits - 1)
    assert (quantise(x, low, high, bits) - inside).abs().max() <= spacing / 2 * 1.001
    assert (quantise(x, low, high, bits, key=5) - inside).abs().max() < spacing * 1.001


def test_equal_ends_give_that_value_and_zeros_stay() -> None:
    for value in (0.0, 1.0, -7.5):
        x = torch.full((5,), value)
        assert torch.equal(quantise(x, *ends(x)), x)
        assert torch.equal(quantise(x, *ends(x), key=3), x)


def test_rounding_at_random_is_right_on_average() -> None:
    x, draws = normal(50), 4000
    low, high = ends(x)
    mean = sum(quantise(x, low, high, 2, key).double() for key in range(draws)) / draws
    spacing = float(high - low) / 3
    assert (mean - x).abs().max() < 5 * spacing / 2 / math.sqrt(draws)  # 5 standard errors, at most s/2 each
    assert torch.equal(quantise(x, low, high, 2, 9), quantise(x, low, high, 2, 9))


def test_gradients_pass_straight_or_rounded() -> None:
    x = normal(40).requires_grad_()
    slope = normal(40, seed=1)
    straight(x, torch.tensor(-0.1), torch.tensor(0.1), 8).backward(slope)
    assert x.grad is not None and torch.equal(x.grad, slope)
    x.grad = None
    out = rounded_gradient(x, 3, key=4)
    assert torch.equal(out, x)
    out.backward(slope)
    assert torch.equal(x.grad, quantise(slope, *ends(slope), 3, 4))


def test_activations_take_the_mean_ends_of_examples_and_remember_them() -> None:
    layer = Activation(Precision(bits=4))
    batches = [normal(6, 3, 5, seed=s) * (s + 1) for s in range(3)]
    low = high = 0.0
    for x in batches:
        now = [float(x.flatten(1).amin(1).mean()), float(x.flatten(1).amax(1).mean())]
        low, high = 0.1 * low + 0.9 * now[0], 0.1 * high + 0.9 * now[1]
        torch.testing.assert_close(layer(x), twin(x, now[0], now[1], 4), **ROUNDING)
    layer.eval()
    torch.testing.assert_close(layer(batches[0]), twin(batches[0], low, high, 4), **ROUNDING)
    assert int(layer.turns) == 3
    fresh = Activation(EIGHT).eval()  # remembers nothing: the batch's own ends
    assert (fresh(batches[0]) - batches[0]).abs().max() < 2


def test_activations_round_to_nearest_unless_told_and_then_in_tests_too() -> None:
    x = normal(8, 64)
    nearest, random = Activation(Precision(bits=2)), Activation(Precision(bits=2, rounding="stochastic"))
    assert torch.equal(nearest(x), nearest(x))
    assert not torch.equal(random(x), random(x))
    assert not torch.equal(random.eval()(x), nearest.eval()(x))
    assert torch.equal(random(x), random(x)), "a test draws the bits of the last training batch"


@for_each(
    "how, words",
    [
        ({"bits": 1}, "bits must be a whole number in 2..8, got 1"),
        ({"bits": 9}, "got 9"),
        ({"rounding": "up"}, "rounding must be 'nearest' or 'stochastic', got 'up'"),
        ({"seed": -1}, "seed must be"),
    ],
)
def test_wrong_precisions_are_refused(how, words: str) -> None:
    refuses(SpecError, re.escape(words), Precision, **how)


@for_each("m, c", [(64, 0.187), (1024, 0.145), (16384, 0.123)])
def test_the_range_constant_is_known_and_makes_a_deviation_of_a_range(m: int, c: float) -> None:
    assert range_constant(m) == pytest.approx(c, abs=5e-4)
    scale = range_scale(3.0 * normal(8, 16 * m))  # 16 chunks of m
    assert 1.0 < float(3 * scale.mean()) < 1.15


def test_chunks_divide_and_hold_two_values_or_more() -> None:
    for n in range(2, 200):
        assert n % chunks_of(n) == 0 and n // chunks_of(n) >= 2
        assert chunks_of(n) == 16 or n % 16 or n < 32
    refuses(ValueError, "at least 2 values per group, got 1", chunks_of, 1)


def test_range_norm_is_its_equation_and_remembers() -> None:
    layer = RangeNorm(3, precision=EIGHT)
    with torch.no_grad():
        layer.weight.copy_(torch.tensor([0.5, 1.0, 2.0]))
        layer.bias.copy_(torch.tensor([-1.0, 0.0, 1.0]))
    x = 2 + 3 * normal(8, 3, 4, 4)
    y = layer(x).detach()
    q = layer.inputs.train()(x)
    scales = torch.tensor([plain_scale(q[:, c]) for c in range(3)])
    want = torch.stack([(q[:, c] - q[:, c].mean()) * scales[c] for c in range(3)], 1)
    want = want * layer.weight.detach().view(3, 1, 1) + layer.bias.detach().view(3, 1, 1)
    grain = float(scales.max() - scales.min()) / 255 / float(scales.min()) + 3 / 255
    torch.testing.assert_close(y, want, rtol=grain, atol=2 / 255)  # scale, gamma and beta in 8 bits
    torch.testing.assert_close(layer.running_scale, 0.1 + 0.9 * scales, **ROUNDING)
    torch.testing.assert_close(layer.running_mean, 0.9 * q.mean((0, 2, 3)), **ROUNDING)
    layer.eval()
    assert torch.equal(layer(x[:2]), layer(x)[:2]), "no statistics of the batch"


@for_each("make", [lambda: RangeGroupNorm(2, 4), lambda: RangeEvoNorm(8)])
def test_norms_by_example_see_no_other_example(make) -> None:
    layer = make()
    x = normal(6, layer.channels, 4, 8)
    layer(x)
    layer.eval()
    first = layer.inputs(x)[:1]
    assert (layer(x)[:1] - layer(x[:1])).abs().max() < 0.05, "but for the grid of the scales"
    assert torch.equal(first, layer.inputs(x[:1]))


def test_range_group_norm_is_near_group_norm() -> None:
    x = 1 + 2 * normal(8, 4, 16, 16)
    near, exact = (norm(2, 4)(x).detach() for norm in (RangeGroupNorm, nn.GroupNorm))
    share = float((near * exact).mean() / exact.square().mean())
    assert share == pytest.approx(1.17, abs=0.05)  # what the constant gives chunks of 32 values
    assert float((near / share - exact).square().mean()) < 0.02


def test_evonorm_is_its_equation_and_the_low_bit_one_follows() -> None:
    x = normal(3, 16, 4, 8)
    exact = EvoNormS0(16)
    with torch.no_grad():
        exact.v.copy_(normal(16, seed=1))
        exact.weight.copy_(normal(16, seed=2))
        exact.bias.copy_(normal(16, seed=3))
    y = exact(x)
    for n, c, i, j in [(0, 0, 0, 0), (1, 7, 3, 5), (2, 15, 2, 7)]:
        group = x[n, c // 2 * 2 : c // 2 * 2 + 2]
        value = x[n, c, i, j] * torch.sigmoid(exact.v[c] * x[n, c, i, j])
        want = exact.weight[c] * value / (group.var(correction=0) + 1e-5).sqrt() + exact.bias[c]
        torch.testing.assert_close(y[n, c, i, j], want, **ROUNDING)
    low = RangeEvoNorm.of(exact, EIGHT)
    out, q = low(x), low.inputs(x)
    for n, c, i, j in [(0, 0, 0, 0), (1, 7, 3, 5), (2, 15, 2, 7)]:
        scale = plain_scale(q[n, c // 2 * 2 : c // 2 * 2 + 2])
        v = q[n, c, i, j]
        want = exact.weight[c] * v * (exact.v[c] * v / 6 + 0.5).clamp(0, 1) * scale + exact.bias[c]
        torch.testing.assert_close(out[n, c, i, j], want, rtol=0.03, atol=0.06)  # 8 bits of each factor
    refuses(ValueError, "8 groups of 12 channels", EvoNormS0, 12)

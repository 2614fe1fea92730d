"""Low-bit layers that multiply or add, against their equations, one product at a time."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from tests.unit.lowbit_twins import ROUNDING, normal, twin
from torch import Tensor, nn

from laconic.lowbit import Precision, QuantAdd, QuantConv2d, QuantLinear
from laconic.lowbit.grid import fitted, rounded_gradient, straight


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


@pytest.mark.parametrize("shape", CONVS)
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

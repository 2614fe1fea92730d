"""The grid of low-bit values, and activations on it, against their equation, one element at a time."""

from __future__ import annotations

import math

import pytest
import torch
from tests.unit.lowbit_twins import EIGHT, ROUNDING, normal, twin

from laconic.core.errors import SpecError
from laconic.lowbit import Precision
from laconic.lowbit.activation import Activation
from laconic.lowbit.grid import ends, quantise, rounded_gradient, straight


@pytest.mark.parametrize("bits", [2, 4, 8])
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


@pytest.mark.parametrize(
    ("how", "words"),
    [
        ({"bits": 1}, "bits must be a whole number in 2..8, got 1"),
        ({"bits": 9}, "got 9"),
        ({"rounding": "up"}, "rounding must be 'nearest' or 'stochastic', got 'up'"),
        ({"seed": -1}, "seed must be"),
    ],
)
def test_wrong_precisions_are_refused(how, words: str) -> None:
    with pytest.raises(SpecError) as refused:
        Precision(**how)
    assert words in str(refused.value)

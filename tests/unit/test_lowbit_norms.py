"""Low-bit norms, and the range that stands for a deviation in them, against their equations."""

from __future__ import annotations

import pytest
import torch
from tests.unit.lowbit_twins import EIGHT, ROUNDING, normal, plain_scale
from torch import nn

from laconic.lowbit import EvoNormS0, RangeEvoNorm, RangeGroupNorm, RangeNorm
from laconic.lowbit.range_scale import chunks_of, range_constant, range_scale


@pytest.mark.parametrize(("m", "c"), [(64, 0.187), (1024, 0.145), (16384, 0.123)])
def test_the_range_constant_is_known_and_makes_a_deviation_of_a_range(m: int, c: float) -> None:
    assert range_constant(m) == pytest.approx(c, abs=5e-4)
    scale = range_scale(3.0 * normal(8, 16 * m))  # 16 chunks of m
    assert 1.0 < float(3 * scale.mean()) < 1.15


def test_chunks_divide_and_hold_two_values_or_more() -> None:
    for n in range(2, 200):
        assert n % chunks_of(n) == 0 and n // chunks_of(n) >= 2
        assert chunks_of(n) == 16 or n % 16 or n < 32
    with pytest.raises(ValueError, match="two values or more in each group, got 1"):
        chunks_of(1)


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


@pytest.mark.parametrize("make", [lambda: RangeGroupNorm(2, 4), lambda: RangeEvoNorm(8)])
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
    with pytest.raises(ValueError, match="8 groups of 12 channels"):
        EvoNormS0(12)

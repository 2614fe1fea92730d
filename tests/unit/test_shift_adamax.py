"""AdaMax by shifts: against its equations entry by entry, and what it refuses."""

from __future__ import annotations

import math

import pytest
import torch

from laconic.core.errors import AttachError, SpecError
from laconic.core.powers import nearest_power
from laconic.optim import ShiftAdaMax


def ap2(x: float) -> float:
    return math.copysign(2.0 ** round(math.log2(abs(x))), x) if x else 0.0


def test_the_nearest_power_is_by_the_logarithm() -> None:
    values = [3.0, -0.3, 1e-6, 0.0, 2.9, 2.8, -1024.0, 1e30]
    assert nearest_power(torch.tensor(values, dtype=torch.float64)).tolist() == [ap2(v) for v in values]
    odd = torch.tensor([math.inf, -math.inf, math.nan])
    assert torch.equal(nearest_power(odd)[:2], odd[:2]) and nearest_power(odd)[2].isnan()


def test_steps_are_those_of_the_equations() -> None:
    rng = torch.Generator().manual_seed(0)
    start = torch.randn(5, generator=rng, dtype=torch.float64)
    w = torch.nn.Parameter(start.clone())
    optimizer = ShiftAdaMax([w], lr=0.01, betas=(0.8, 0.9))
    expected, m, v = start.tolist(), [0.0] * 5, [0.0] * 5
    for t in range(1, 30):
        w.grad = torch.randn(5, generator=rng, dtype=torch.float64) * (10.0 if t == 1 else 1.0)
        w.grad[0] = 0.0
        optimizer.step()
        for i, g in enumerate(w.grad.tolist()):
            m[i] = 0.8 * m[i] + 0.2 * g
            v[i] = max(0.9 * v[i], abs(g))
            expected[i] -= ap2(0.01 / (1 - 0.8**t)) * m[i] / (ap2(v[i]) + 2.0**-27)
    assert w.tolist() == pytest.approx(expected, rel=1e-9)
    assert w[0].item() == start[0].item(), "an entry without gradients stays"
    assert optimizer.state[w]["v"][1] < 10, "the maximum falls again"


def test_settings_out_of_range_are_refused() -> None:
    w = torch.nn.Parameter(torch.ones(1))
    for wrong in ({"lr": -1.0}, {"betas": (1.0, 0.9)}, {"betas": 0.9}):
        with pytest.raises(SpecError):
            ShiftAdaMax([w], **wrong)
    with pytest.raises(SpecError):
        ShiftAdaMax([{"params": [w], "lr": -1.0}])


@pytest.mark.parametrize("odd", ["sparse", "complex"])
def test_gradients_of_another_kind_are_refused(odd: str) -> None:
    w = torch.nn.Parameter(torch.ones(2, dtype=torch.complex64 if odd == "complex" else torch.float32))
    w.grad = torch.ones_like(w).to_sparse() if odd == "sparse" else torch.ones_like(w)
    with pytest.raises(AttachError, match="ShiftAdaMax"):
        ShiftAdaMax([w]).step()

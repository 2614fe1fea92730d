"""The optimisers, each against a plain loop over numbers, and their prox against brute force."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from tests.unit.shared import for_each, refuses, resumed
from torch import Tensor
from torch.nn import Parameter

from laconic.core.errors import AttachError, SpecError
from laconic.optim import AMSGrad, QCMDAdaGrad, QRDAAdaGrad, ShiftAdaMax
from laconic.optim.powers import nearest_power
from laconic.optim.prox import block_soft, soft
from laconic.optim.rounds import Rounds

STEPS, SHAPE = 12, (4, 3)


def gradients(seed: int = 0) -> list[Tensor]:
    rng = torch.Generator().manual_seed(seed)
    return [torch.randn(SHAPE, generator=rng, dtype=torch.float64) for _ in range(STEPS)]


def run(make, seed: int = 0) -> tuple[Tensor, torch.optim.Optimizer]:  # type: ignore[no-untyped-def]
    rng = torch.Generator().manual_seed(seed + 100)
    w = Parameter(torch.randn(SHAPE, generator=rng, dtype=torch.float64))
    optimiser = make([w])
    for g in gradients(seed):
        w.grad = g.clone()
        optimiser.step()
    return w.detach(), optimiser


def start(seed: int = 0) -> list[float]:
    rng = torch.Generator().manual_seed(seed + 100)
    return torch.randn(SHAPE, generator=rng, dtype=torch.float64).flatten().tolist()


def entries(found: Tensor):  # type: ignore[no-untyped-def]
    """Each entry of the result, its start and its gradients."""
    rows = torch.stack(gradients()).flatten(1).T.tolist()
    return zip(found.flatten().tolist(), start(), rows, strict=True)


def test_amsgrad_is_its_equations() -> None:
    found, _ = run(lambda w: AMSGrad(w, lr=0.01, betas=(0.8, 0.95), eps=1e-6, weight_decay=0.1))
    for end, w, grads in entries(found):
        m = v = most = 0.0
        for grad in grads:
            g = grad + 0.1 * w
            m, v = 0.8 * m + 0.2 * g, 0.95 * v + 0.05 * g * g
            most = max(most, v)
            w -= 0.01 * m / math.sqrt(most + 1e-6)
        assert end == pytest.approx(w, abs=1e-12)


def test_qcmd_is_its_equations() -> None:
    found, optimiser = run(lambda w: QCMDAdaGrad(w, lr=0.3, l1=0.4, delta=1e-3))
    for end, w, grads in entries(found):
        s = 0.0
        for g in grads:
            s += g * g
            h = 1e-3 + math.sqrt(s)
            z = w - 0.3 * g / h
            w = math.copysign(max(abs(z) - 0.3 * 0.4 / h, 0.0), z)
        assert end == pytest.approx(w, abs=1e-12)
    assert optimiser.zero_share() == float((found == 0).double().mean()) > 0  # type: ignore[attr-defined]


def test_qrda_is_its_equations() -> None:
    found, optimiser = run(lambda w: QRDAAdaGrad(w, lr=0.5, l1=0.2, delta=1e-3))
    for end, first, grads in entries(found):
        s, mean, w = 0.0, 0.0, first
        for t, g in enumerate(grads, start=1):
            s += g * g
            h = 1e-3 + math.sqrt(s)
            mean = ((t - 1) * mean + g) / t
            z = first - 0.5 * t * mean / h
            w = math.copysign(max(abs(z) - 0.5 * t * 0.2 / h, 0.0), z)
        assert end == pytest.approx(w, abs=1e-12)
    assert optimiser.zero_share() == float((found == 0).double().mean()) > 0  # type: ignore[attr-defined]


def test_without_a_regulariser_mirror_descent_is_adagrad() -> None:
    ours, _ = run(lambda w: QCMDAdaGrad(w, lr=0.3, delta=1e-3))
    theirs, _ = run(lambda w: torch.optim.Adagrad(w, lr=0.3, eps=1e-3))
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-12)


@for_each("make", [QCMDAdaGrad, QRDAAdaGrad])
def test_what_never_had_a_gradient_stays(make) -> None:  # type: ignore[no-untyped-def]
    w = Parameter(torch.tensor([[0.3, -0.2], [0.1, 0.4]]))
    before = w.detach().clone()
    optimiser = make([w], lr=0.1, l1=10.0)
    for _ in range(3):
        w.grad = torch.tensor([[1.0, 0.0], [0.0, 0.0]])
        optimiser.step()
    assert w[0, 0] == 0
    assert torch.equal(w.detach().flatten()[1:], before.flatten()[1:])


def test_the_l2_step_is_the_minimum() -> None:
    rng = torch.Generator().manual_seed(1)
    z = torch.randn(5, 4, generator=rng, dtype=torch.float64)
    h = torch.rand(5, 4, generator=rng, dtype=torch.float64) + 0.1
    c = 1.0
    found = block_soft(z, h, c)

    def cost(w: Tensor) -> Tensor:
        return 0.5 * (h * (w - z).square()).sum(1) + c * w.norm(dim=1)

    assert bool((found == 0).all(1).any()) and not bool((found == 0).all())
    for _ in range(500):
        step = torch.randn(5, 4, generator=rng, dtype=torch.float64) * 10 ** (
            -4 * torch.rand(1, generator=rng)
        )
        assert bool((cost(found + step) >= cost(found) - 1e-12).all())


def test_the_l1_step_is_the_minimum() -> None:
    z, t = torch.tensor([1.5, -0.4, 0.2], dtype=torch.float64), torch.tensor(0.5, dtype=torch.float64)
    found = soft(z, t)
    grid = torch.linspace(-2, 2, 40001, dtype=torch.float64)[:, None]
    best = grid[(0.5 * (grid - z).square() + t * grid.abs()).argmin(0), 0]
    torch.testing.assert_close(found, best, rtol=0, atol=1e-4)


@for_each("dtype", [torch.float32, torch.bfloat16])
@for_each("make, settings", [(AMSGrad, {}), (QCMDAdaGrad, {"l1": 0.01}), (QRDAAdaGrad, {"l1": 0.01})])
def test_a_saved_state_goes_on_bit_for_bit(make, settings, dtype) -> None:  # type: ignore[no-untyped-def]
    class Weights(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = Parameter(torch.linspace(-0.1, 0.1, 40, dtype=dtype))

    def begin():  # type: ignore[no-untyped-def]
        model = Weights()
        return model, make([model.w], **settings)

    def train(parts, steps) -> None:  # type: ignore[no-untyped-def]
        for t in steps:
            parts[0].w.grad = torch.randn(40, generator=torch.Generator().manual_seed(t)).to(dtype)
            parts[1].step()

    (whole, _), (again, _) = resumed(begin, train, 150, 300)
    assert torch.equal(whole.w, again.w)


LR, TWO = "lr must be a finite number of 0 or more, got", "betas must be two numbers, "


@for_each(
    "make, settings, message",
    [
        (AMSGrad, {"lr": -1.0}, f"{LR} -1.0"),
        (AMSGrad, {"lr": "x"}, f"{LR} 'x'"),
        (AMSGrad, {"lr": True}, f"{LR} True"),
        (AMSGrad, {"eps": 0.0}, "eps must be a finite number above 0"),
        (AMSGrad, {"betas": (1.0, 0.9)}, r"betas\[0\] must be a number in \[0, 1\), got 1.0"),
        (AMSGrad, {"betas": (0.9,)}, rf"{TWO}such as \(0.9, 0.999\), got \(0.9,\)"),
        (AMSGrad, {"betas": 0.9}, f"{TWO}.* got 0.9"),
        (AMSGrad, {"betas": "xy"}, f"{TWO}.* got 'xy'"),
        (AMSGrad, {"betas": (0.9, True)}, r"betas\[1\] must be a number .* got True"),
        (AMSGrad, {"weight_decay": None}, "weight_decay must be a finite number of 0 or more, got None"),
        (QCMDAdaGrad, {"l1": math.nan}, "l1 must be a finite number"),
        (QCMDAdaGrad, {"delta": 10**400}, "delta must be a finite number above 0, got an integer of 1329"),
        (QRDAAdaGrad, {"l1": 0.1, "l2": 0.1}, "choose l1 or l2"),
    ],
)
def test_wrong_settings_are_refused(make, settings, message) -> None:  # type: ignore[no-untyped-def]
    one, two = ({"params": [Parameter(torch.ones(2))]} for _ in range(2))
    refuses(SpecError, message, make, one["params"], **settings)
    refuses(SpecError, message, make, [one, two | settings])
    optimiser = make(one["params"])
    refuses(SpecError, message, optimiser.add_param_group, two | settings)
    assert len(optimiser.param_groups) == 1


def test_a_group_is_checked_together_with_the_defaults() -> None:
    weights = [Parameter(torch.ones(2)) for _ in range(2)]
    for make in (QCMDAdaGrad, QRDAAdaGrad):
        with pytest.raises(SpecError, match=r"choose l1 or l2, got l1=0.1 and l2=0.2"):
            make([{"params": weights, "l2": 0.2}], l1=0.1)
        groups = [{"params": weights[:1], "l1": 0.0, "l2": 0.2}, {"params": weights[1:]}]
        assert [group["l2"] for group in make(groups, l1=0.1).param_groups] == [0.2, 0.0]


def test_numpy_numbers_are_settings_too() -> None:
    w = Parameter(torch.ones(2))
    w.grad = torch.ones(2)
    AMSGrad([w], lr=np.float32(0.5), betas=[np.float64(0.9), 0.99], eps=np.float64(1e-8)).step()
    assert bool((w < 1).all())


@for_each("rounds", [Rounds(1, 1, 1, 1), Rounds(20, 3, 7, 8), Rounds(9, 1, 1, 16), Rounds(5, 2, 13, 5)])
def test_rounds_are_the_paper_s_sequences(rounds: Rounds) -> None:
    learns, j = [0], 0
    while learns[-1] < 300:
        learns.append(learns[-1] + 2 ** (j // rounds.kappa))
        j += 1
    expected = [t for t in learns if t < min(300, rounds.freeze_steps)]
    assert [t for t in range(300) if rounds.learns(t)] == expected
    meets, at = [], rounds.freeze_steps
    while at < 300:
        meets.append(at)
        at += min(rounds.longest, 2 ** ((at - rounds.freeze_steps) // rounds.double_every))
    assert [t for t in range(300) if rounds.meets(t)] == [*range(rounds.freeze_steps), *meets]


@for_each("make", [AMSGrad, QCMDAdaGrad, QRDAAdaGrad])
def test_sparse_and_complex_gradients_are_refused(make: Any) -> None:
    table, z = torch.nn.Embedding(4, 2, sparse=True), Parameter(torch.ones(2, dtype=torch.complex64))
    table(torch.tensor([1])).sum().backward()
    z.abs().sum().backward()
    words = r"needs dense gradients, and this one, \(4, 2\), is sparse"
    refuses(AttachError, words, make(table.parameters(), lr=0.1).step)
    refuses(AttachError, f"{make.__name__} is for real parameters", make([z], lr=0.1).step)


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
        refuses(SpecError, ".", ShiftAdaMax, [w], **wrong)
    refuses(SpecError, ".", ShiftAdaMax, [{"params": [w], "lr": -1.0}])


@for_each("odd", ["sparse", "complex"])
def test_gradients_of_another_kind_are_refused(odd: str) -> None:
    w = torch.nn.Parameter(torch.ones(2, dtype=torch.complex64 if odd == "complex" else torch.float32))
    w.grad = torch.ones_like(w).to_sparse() if odd == "sparse" else torch.ones_like(w)
    with pytest.raises(AttachError, match="ShiftAdaMax"):
        ShiftAdaMax([w]).step()

"""The gradient noise scale: found where it is known, from norms that an exchange has anyway."""

from __future__ import annotations

import math

import pytest
import torch
from tests.unit.shared import for_each, refuses
from torch import Tensor, nn

from laconic.comm.loopback import Loopback
from laconic.comm.metered import Metered
from laconic.core.errors import AttachError
from laconic.core.layout import Layout
from laconic.exchange.attached import Attached
from laconic.exchange.method import lift
from laconic.exchange.no_optimiser import MOMENTUM_SGD
from laconic.exchange.noise_scale import EVERY, Noise, NoiseScale
from laconic.recipes import Accumulation
from laconic.tools.report.noise import advice, noise_section, read_noise

LAYOUT = Layout.of([("weight", (4, 50)), ("bias", (100,))])
TRUE = torch.linspace(-0.1, 0.2, LAYOUT.numel)  # the gradient; each rank adds noise of sigma 1
VARIANCE, SIGNAL = float(LAYOUT.numel), float(TRUE.square().sum())


def gradient(rank: int, step: int) -> Tensor:
    rng = torch.Generator().manual_seed(100 * step + rank)
    return TRUE + torch.randn(LAYOUT.numel, generator=rng)


def step_(exchange: Attached, bucket: Tensor, scale: float = 1.0) -> None:
    exchange.begin()
    exchange.mean_(bucket, LAYOUT, scale)
    exchange.end()


def measured(spec: str, size: int = 4, steps: int = 5 * 60, scale: float = 1.0) -> list[tuple[Noise, int]]:
    def body(comm: Loopback) -> tuple[Noise, int]:
        metered = Metered(comm)
        exchange = Attached(lift(spec), LAYOUT, metered, MOMENTUM_SGD)
        for step in range(steps):
            step_(exchange, scale * gradient(comm.rank, step), scale)
        return exchange.noise.noise, metered.snapshot().payload_sent

    return Loopback.run(size, body)


def mean_of(found: list[tuple[Noise, int]], name: str) -> float:
    return sum(getattr(noise, name) for noise, _ in found) / len(found)


@for_each("spec", ["dense()", "fp16()"])
def test_it_is_found_where_it_is_known(spec: str) -> None:
    """20 effective samples of 4 ranks: tr(S) within 5 %; |G|^2 is a small difference, within 40 %."""
    found = measured(spec)
    assert mean_of(found, "variance") == pytest.approx(VARIANCE, rel=0.05)
    assert mean_of(found, "signal") == pytest.approx(SIGNAL, rel=0.4)
    assert all(noise.samples == 60 and noise.share == 1 for noise, _ in found)


def test_it_costs_no_byte_and_a_scaler_leaves_it_alone() -> None:
    (plain, sent), *_ = measured("dense()", steps=11)
    assert sent == 11 * 4 * LAYOUT.numel
    scaled = measured("dense()", steps=11, scale=1024.0)[0][0]
    assert scaled.variance == pytest.approx(plain.variance, rel=1e-5)
    assert scaled.signal == pytest.approx(plain.signal, rel=1e-3)


def test_a_lossy_method_is_measured_on_what_it_sums() -> None:
    """And nothing where no mean is exact or no other rank is there."""
    found = measured("topk(density=0.1)", steps=300)
    assert {noise.share for noise, _ in found} == {100 / 300}
    assert mean_of(found, "variance") == pytest.approx(100, rel=0.08)
    assert measured("cast('bf16')", size=1, steps=6)[0][0] is None
    assert measured("majority_vote()", steps=6)[0][0].share == pytest.approx(1 / 3)  # vectors are summed


def test_a_void_step_does_not_count() -> None:
    def body(comm: Loopback) -> None:
        exchange = Attached(lift("dense()"), LAYOUT, Metered(comm), MOMENTUM_SGD)
        for step in range(EVERY + 1):
            bucket = gradient(comm.rank, step)
            bucket[0] = math.nan if (step, comm.rank) == (0, 1) else bucket[0]
            step_(exchange, bucket)
        noise = exchange.noise.noise
        assert noise is not None and math.isfinite(noise.variance) and noise.samples == 1

    Loopback.run(2, body)


def test_both_estimates_are_unbiased_for_any_two_batch_sizes() -> None:
    """Brute force: the means over 1,500 draws, against the numbers that the draws were made of."""
    rng = torch.Generator().manual_seed(3)
    for units in (1.5, 2, 16):
        variance, signal = [], []
        for _ in range(1500):
            unit = torch.tensor([1.0, -2.0]) + torch.randn(2, generator=rng)
            other = torch.tensor([1.0, -2.0]) + torch.randn(2, generator=rng) / math.sqrt(units)
            scale = NoiseScale()
            scale.add(float(unit.square().sum()), float(other.square().sum()), units)
            noise = scale.noise()
            assert noise is not None
            variance.append(noise.variance)
            signal.append(noise.signal)
        for found, true in ((variance, 2.0), (signal, 5.0)):
            sample = torch.tensor(found)
            assert abs(float(sample.mean()) - true) < 5 * float(sample.std()) / math.sqrt(1500)


def test_accumulation_on_one_rank_measures_it_too() -> None:
    """Least squares at w = 0: the gradient of an example is known, and so is its covariance."""
    torch.manual_seed(0)
    n, width = 400, 8
    x = torch.randn(n, width, dtype=torch.float64)
    y = x @ torch.ones(width, dtype=torch.float64) + torch.randn(n, dtype=torch.float64)
    model = nn.Linear(width, 1, bias=False).double()
    each = -2 * x * y[:, None]  # at w = 0
    variance, signal = float(each.var(0).sum()), float(each.mean(0).square().sum())
    accumulation = Accumulation(40, most=8, ranks=1)
    for step in range(5 * 200):
        with torch.no_grad():
            model.weight.zero_()
        model.zero_grad()
        chosen = torch.randint(n, (40,), generator=torch.Generator().manual_seed(step))
        for share, rows, right in accumulation.parts(model, x[chosen], y[chosen]):
            (share * (model(rows)[:, 0] - right).square().mean()).backward()
    noise = accumulation.noise
    assert noise is not None
    assert noise.samples == 200
    assert noise.examples(unit=8) == pytest.approx(variance / signal, rel=0.35)


def test_noise_is_the_same_under_a_grad_scaler() -> None:
    found = []
    for scaler in (None, torch.amp.GradScaler("cpu", init_scale=2.0**16, growth_interval=7)):
        torch.manual_seed(0)
        model, accumulation = nn.Linear(6, 2), Accumulation(12, most=4, ranks=1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        for _ in range(4 * EVERY):
            optimizer.zero_grad()
            for share, rows in accumulation.parts(model, torch.randn(12, 6), scaler=scaler):
                loss = share * model(rows).square().mean()
                (loss if scaler is None else scaler.scale(loss)).backward()
            if scaler is None:
                optimizer.step()
            else:
                scaler.step(optimizer)
                scaler.update()
        found.append(accumulation.noise)
    plain, scaled = found
    assert scaler.get_scale() == 2.0**18
    assert plain.samples == scaled.samples == 4
    assert scaled.variance == pytest.approx(plain.variance) and scaled.signal == pytest.approx(plain.signal)


def test_what_is_no_grad_scaler_is_refused_and_older_gradients_are_not_measured() -> None:
    model, accumulation = nn.Linear(2, 1), Accumulation(4, most=2, ranks=1)
    parts = Accumulation(4, most=2, ranks=1).parts(model, torch.ones(4, 2), scaler=65536.0)
    refuses(AttachError, r"takes the GradScaler that the script steps by, got 65536\.0", next, parts)
    for _ in range(EVERY + 1):
        for share, rows in accumulation.parts(model, torch.ones(4, 2)):
            (share * model(rows).mean()).backward()  # no zero_grad
    assert accumulation.noise is not None
    assert accumulation.noise.samples == 1


def test_the_report_says_how_large_a_batch_would_pay() -> None:
    both = {step: [[8.0 * step, 2.0, 1.0], [16.0 * step, 4.0, 1.0]] for step in range(5, 41, 5)}
    steps = {step: [{"noise": noise} for noise in both.get(step, [])] or [{}] for step in range(1, 41)}
    series = read_noise(steps)
    assert series.steps.tolist() == [5, 10, 15, 20, 25, 30, 35, 40]
    assert series.scale(0.5, 1.0) == pytest.approx(4 * 32.5)  # the mean of both ranks' parts, then the ratio
    text = noise_section([("dense()", series)], batch=10, workers=2)
    assert "1,300: this batch has room to grow 65.0 times" in text
    assert noise_section([("sgp()", read_noise({1: [{}]}))], 10, 2) == ""
    assert advice(math.inf, 5) == "no signal left"

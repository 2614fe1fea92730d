"""An entry without a gradient: where one bit an entry is sent, it must go nowhere on average."""

from __future__ import annotations

import torch
from tests.unit.shared import for_each

import laconic
from laconic.comm.loopback import Loopback
from laconic.comm.metered import Metered
from laconic.core.layout import Layout
from laconic.core.spec import parse
from laconic.exchange.attached import Attached
from laconic.exchange.method import lift
from laconic.exchange.no_optimiser import MOMENTUM_SGD
from laconic.optim.amsgrad import AMSGrad

SPECS = ["sign()", "sign(block=37)", "signmean()", "hierarchy(levels=1)"]
HALF, DRAWS = 500, 100


def half_zeros() -> torch.Tensor:
    """Float32 (2 HALF,): every other entry is 0."""
    x = torch.randn(2 * HALF, generator=torch.Generator().manual_seed(1))
    x[::2] = 0.0
    return x


@for_each("spec", SPECS)
def test_zero_stays_zero_in_expectation(spec: str) -> None:
    """Over DRAWS keys, of which each zero has one sign: HALF DRAWS coins, within 5 sigma."""
    codec, x = laconic.parse(spec), half_zeros()
    draws = torch.stack([codec.decode(codec.encode(x, key), len(x)) for key in range(DRAWS)])
    assert bool((draws[:, 1::2] == draws[0, 1::2]).all()), "what is not zero has its own sign"
    signs = draws[:, ::2].sign()
    assert bool(signs.all()) and abs(float(signs.mean())) < 5 / (HALF * DRAWS) ** 0.5
    assert float(signs.mean(dim=0).abs().max()) < 0.55


@for_each("spec", SPECS)
def test_ranks_draw_signs_of_their_own(spec: str) -> None:
    layout = Layout.of([("w", (2, HALF))])

    def body(comm):
        out = half_zeros()
        Attached(lift(parse(f"gather({spec})")), layout, Metered(comm), MOMENTUM_SGD).mean_(out, layout)
        return out

    mean = Loopback.run(4, body)[0][::2]
    assert float((mean == 0).float().mean()) > 0.25, "of 4 coins, 3 in 8 tosses come out even"
    assert 0.3 < float((mean > 0).sum() / (mean != 0).sum()) < 0.7


def test_weights_without_a_gradient_do_not_drift_under_comp_ams() -> None:
    layout = Layout.of([("w", (40, 25))])

    def body(comm):
        weights = torch.zeros(layout.numel, requires_grad=True)
        optimizer = AMSGrad([weights], lr=0.01)
        method = lift(parse("gather(sign())"))
        exchange = Attached(method, layout, Metered(comm), MOMENTUM_SGD)
        rng = torch.Generator().manual_seed(comm.rank)
        for _ in range(60):
            gradient = torch.randn(layout.numel, generator=rng)
            gradient[::2] = 0.0
            exchange.begin()
            exchange.mean_(gradient, layout)
            weights.grad = gradient
            optimizer.step()
        return weights.detach()[::2]

    untouched = Loopback.run(2, body)[0]
    assert float(untouched.mean().abs()) < 5 * float(untouched.std()) / len(untouched) ** 0.5

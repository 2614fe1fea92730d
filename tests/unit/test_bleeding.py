"""A residual that bleeds out: in steps of bounded size, nothing lost, nothing left."""

from __future__ import annotations

import torch
from tests.unit.shared import for_each

from laconic.comm.messages import Sent
from laconic.core.layout import Layout
from laconic.core.turn import Turn
from laconic.feedback.error_feedback import Residual
from laconic.reducers.sum import DenseShare

MODEL = Layout.of([("a", (10, 10)), ("b", (7,)), ("c", (20, 10))])
MATRICES = MODEL.where(lambda entry: len(entry.shape) > 1)


def picked(x):
    return torch.cat(MATRICES.segments.views(x))


def whole(x) -> Sent:
    return DenseShare(MATRICES.segments, picked(x), 1.0)


@for_each("most", [1.0, 0.5])
def test_each_step_adds_at_most_the_gradients_norm_and_in_the_end_all_is_sent(most):
    rng = torch.Generator().manual_seed(3)
    residual, given, sent, steps = Residual(MATRICES), torch.zeros(300), torch.zeros(300), 0
    for step in range(9):
        grad = torch.randn(MODEL.numel, generator=rng)
        assert residual.correct(grad, MATRICES, Turn(step, 0)) is not None
        given += picked(grad)
    done = False
    while not done:
        grad = torch.randn(MODEL.numel, generator=rng)
        before = grad.clone()
        x, done = residual.release_part(grad, MATRICES, Turn(9 + steps, 0), most)
        assert torch.equal(grad, before)
        added = float((picked(x) - picked(grad)).norm())
        assert added <= most * float(picked(grad).norm()) * (1 + 1e-5)
        given, sent = given + picked(grad), sent + picked(x)
        residual.settle(whole(x), MATRICES, Turn(9 + steps, 0))
        steps += 1
    residual.finish_before(9 + steps)
    assert residual.norm(MATRICES) == 0
    assert steps <= 1 + 3 / most
    torch.testing.assert_close(sent, given, rtol=1e-5, atol=1e-5)


def test_a_gradient_of_zeros_or_one_that_is_not_finite_adds_nothing():
    residual = Residual(MATRICES)
    residual.correct(torch.ones(MODEL.numel), MATRICES, Turn(0, 0))
    x, done = residual.release_part(torch.zeros(MODEL.numel), MATRICES, Turn(1, 0), 1.0)
    assert not picked(x).any() and not done
    for bad in (torch.inf, torch.nan):
        x, _ = residual.release_part(torch.full((MODEL.numel,), bad), MATRICES, Turn(2, 0), 1.0)
        assert x is None
    assert bool(residual.state_dict()["residual/a"].eq(1).all())

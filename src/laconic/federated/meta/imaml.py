"""iMAML among agents: the meta-gradient solves a linear system (Rajeswaran et al. 2019, arXiv:1909.04630).

    every round:  w_i = argmin f_i(w; support) + lambda/2 |w - P|^2    agent i, by `inner_steps` of descent
                  (I + H_i / lambda) g_i = grad f_i(w_i; query)        by `cg_steps` of conjugate gradients
                  P = Adam(P, mean of C(g_i))                          the server

H_i is the Hessian of f_i(.; support) at w_i. Memory does not grow with the inner steps.

Verified against the authors' code (aravindr93/imaml_dev), which differs: it applies the proximal term in one
last inner step, and solves (2 I + H_i / (lambda + 10)) g_i. Ours: an agent's search ends at a curvature below
-lambda / 2, since steps are unbounded near -lambda.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from laconic.core import arguments
from laconic.federated.meta.descent import Descent
from laconic.federated.meta.learner import Learner
from laconic.federated.meta.tasks import Batch

LEAST = 0.5  # curvature of I + H / lambda


@dataclass(frozen=True, kw_only=True)
class ImplicitGradient(Descent):
    """Rounds of implicit meta-gradients, as in `Descent`, with at least one inner step.

    Args:
        proximal: lambda. Descent needs inner_lr * lambda < 2.
        cg_steps: Products with the Hessian; 0: first order.
    """

    inner_steps: int = 16
    proximal: float = 1.0
    cg_steps: int = 5

    def __post_init__(self) -> None:
        arguments.whole("inner_steps", self.inner_steps, 1)
        super().__post_init__()
        arguments.number(
            "proximal", self.proximal, above=0, hint="without it the inner steps forget the model"
        )
        arguments.whole("cg_steps", self.cg_steps)

    def gradients(self, learner: Learner, start: Tensor, support: Batch, query: Batch) -> Tensor:
        weights = start
        for _ in range(self.inner_steps):
            pull = self.proximal * (weights - start)
            weights = weights - self.inner_lr * (learner.gradients(weights, *support) + pull)
        outer = learner.gradients(weights, *query)
        if not self.cg_steps:
            return outer
        at = weights.detach().requires_grad_()
        slope = learner.gradients(at, *support, create_graph=True)

        def product(v: Tensor) -> Tensor:
            (image,) = torch.autograd.grad(slope, at, v, retain_graph=True)
            return v + image / self.proximal

        return solved(product, outer, self.cg_steps)


def solved(product: Callable[[Tensor], Tensor], right: Tensor, steps: int) -> Tensor:
    """Solve product(x) = right for each row (a, n) by conjugate gradients from x = 0.

    Exact after n steps if no eigenvalue is below 1/2; a row stops at a curvature below 1/2.
    """
    x, left, direction, square = torch.zeros_like(right), right, right, _dot(right, right)
    goes_on = square > 0
    for _ in range(steps):
        image = product(direction)
        curvature = _dot(direction, image)
        goes_on = goes_on & (curvature > LEAST * _dot(direction, direction))
        length = torch.where(goes_on, square / curvature, 0.0)
        x, left = x + length * direction, left - length * image
        square, before = _dot(left, left), square
        direction = left + torch.where(before > 0, square / before, 0.0) * direction
    return x


def _dot(a: Tensor, b: Tensor) -> Tensor:
    return (a * b).sum(dim=1, keepdim=True)

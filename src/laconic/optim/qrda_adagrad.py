"""QRDA AdaGrad: AdaGrad by regularised dual averaging, on quantised gradients, with sparse models out.

Xu et al. 2022, arXiv:2208.05631, of which the abstract was at hand; the update is derived from Duchi et al.
2011 [recalled]. Each step regularises the whole past anew.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from laconic.optim.prox import check, shrink, zero_share
from laconic.optim.settings import Parameters


class QRDAAdaGrad(Optimizer):
    """With g the mean of the quantised gradients, and sums over all steps so far:

        s = s + g^2        H = delta + sqrt(s)        a = a + lr * g        c = c + lr
        z = w_1 - a / H
        w = argmin  1/2 sum_j H_j (w_j - z_j)^2 + c * (l1 * |w|_1  or  l2 * sum over rows of |row|_2)

    At a constant rate a is the paper's lr * t * (mean of g); under a schedule every gradient keeps the rate
    of its own step. The prox-centre is w_1, what the weights were at the first step: from zero, as convex
    problems start, all layers of a network would vanish together. Without a regulariser it is lazy AdaGrad.
    An entry whose gradient has always been zero stays as it is. State: three tensors a parameter.

    >>> w = torch.nn.Parameter(torch.tensor([1.0, 0.105]))
    >>> w.grad = torch.tensor([0.5, 0.5])
    >>> optimizer = QRDAAdaGrad([w], lr=0.1, l1=0.1)
    >>> optimizer.step()
    >>> [round(value, 4) for value in w.tolist()], optimizer.zero_share()
    ([0.88, 0.0], 0.5)
    """

    def __init__(
        self, params: Parameters, lr: float = 0.01, l1: float = 0.0, l2: float = 0.0, delta: float = 1e-6
    ) -> None:
        super().__init__(params, {"lr": lr, "l1": l1, "l2": l2, "delta": delta})

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """One more group of parameters, as `torch.optim.Optimizer` takes it. Wrong settings: `SpecError`."""
        check({**self.defaults, **param_group})
        super().add_param_group(param_group)

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """One update of every parameter that has a gradient."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for w in group["params"]:
                if w.grad is not None:
                    self._update_(w, group["lr"], group["l1"], group["l2"], group["delta"])
        return loss

    def _update_(self, w: Tensor, lr: float, l1: float, l2: float, delta: float) -> None:
        state = self.state[w]
        if not state:
            state["rates"] = 0.0  # a number, which loading leaves as it is: tensors take the weights' dtype
            state["sum"] = torch.zeros_like(w)
            state["dual"] = torch.zeros_like(w)
            state["start"] = w.detach().clone()
        g = w.grad
        c = state["rates"] = state["rates"] + lr
        seen = state["sum"].addcmul_(g, g)
        h = seen.sqrt().add_(delta)
        z = state["start"] - state["dual"].add_(g, alpha=lr) / h
        w.copy_(torch.where(seen > 0, shrink(z, h, c * l1, c * l2), w))

    def zero_share(self) -> float:
        """Share of all weights that are exactly zero."""
        return zero_share([w for group in self.param_groups for w in group["params"]])

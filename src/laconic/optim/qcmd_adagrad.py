"""QCMD AdaGrad: AdaGrad by composite mirror descent, on quantised gradients, with sparse models out.

Xu et al. 2022, arXiv:2208.05631, of which the abstract was at hand; the update is derived from Duchi et al.
2011 [recalled]. Without a regulariser it is AdaGrad.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from laconic.optim.prox import check, shrink, zero_share
from laconic.optim.settings import Parameters


class QCMDAdaGrad(Optimizer):
    """With g the mean of the quantised gradients:

        s = s + g^2        H = delta + sqrt(s)        z = w - lr * g / H
        w = argmin  1/2 sum_j H_j (w_j - z_j)^2 + lr * (l1 * |w|_1  or  l2 * sum over rows of |row|_2)

    l1 makes single weights exactly zero, l2 whole rows. An entry whose gradient has always been zero stays as
    it is: H would be delta there, and a quantiser that sends few entries would wipe the rest out. To leave
    biases alone, give them a group with l1=0. State: one tensor a parameter.

    >>> w = torch.nn.Parameter(torch.tensor([1.0, 0.001]))
    >>> w.grad = torch.tensor([0.5, 0.5])
    >>> optimizer = QCMDAdaGrad([w], lr=0.1, l1=0.1)
    >>> optimizer.step()
    >>> [round(value, 4) for value in w.tolist()], optimizer.zero_share()
    ([0.88, -0.079], 0.0)
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
            state["sum"] = torch.zeros_like(w)
        g = w.grad
        seen = state["sum"].addcmul_(g, g)
        h = seen.sqrt().add_(delta)
        w.copy_(torch.where(seen > 0, shrink(w - lr * g / h, h, lr * l1, lr * l2), w))  # type: ignore[operator]

    def zero_share(self) -> float:
        """Share of all weights that are exactly zero."""
        return zero_share([w for group in self.param_groups for w in group["params"]])

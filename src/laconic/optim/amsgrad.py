"""AMSGrad as in the COMP-AMS paper: Adam whose second moment never falls.

Reddi et al. 2018, arXiv:1904.09237; Li, Karimi, Li 2022, arXiv:2205.05632 [recalled]. Adam's v falls while a
sparse gradient's entry is absent, and the next step is too long.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from laconic.optim.per_tensor import PerTensor
from laconic.optim.settings import Parameters, above_zero, at_least_zero, two_shares


class AMSGrad(PerTensor):
    """AMSGrad, with g the gradient plus `weight_decay` * w:

        m = b1 * m + (1 - b1) * g        v = b2 * v + (1 - b2) * g^2        vhat = max(vhat, v)
        w = w - lr * m / sqrt(vhat + eps)

    Unlike in `torch.optim.Adam(amsgrad=True)`, there is no bias correction, and eps is inside the root.
    State: three tensors like the parameter.

    Args:
        params: Parameters or parameter groups.
        lr: Learning rate, 0 or more.
        betas: b1 and b2, in [0, 1).
        eps: Added to vhat, above 0.
        weight_decay: L2 decay, 0 or more.

    Raises:
        SpecError: A setting is outside its range.

    >>> w = torch.nn.Parameter(torch.tensor([1.0]))
    >>> w.grad = torch.tensor([2.0])
    >>> AMSGrad([w], lr=0.1).step()
    >>> round(w.item(), 4)
    0.6838
    """

    def __init__(
        self,
        params: Parameters,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
    ) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})

    def check(self, group: Mapping[str, Any]) -> None:
        at_least_zero(lr=group["lr"], weight_decay=group["weight_decay"])
        above_zero(eps=group["eps"])
        two_shares("betas", group["betas"])

    def update_(self, w: Tensor, g: Tensor, group: Mapping[str, Any]) -> None:
        state, (b1, b2) = self.state[w], group["betas"]
        if not state:
            for name in ("exp_avg", "exp_avg_sq", "max_exp_avg_sq"):
                state[name] = torch.zeros_like(w)
        if group["weight_decay"]:
            g = g + group["weight_decay"] * w
        m, v, vhat = state["exp_avg"], state["exp_avg_sq"], state["max_exp_avg_sq"]
        m.lerp_(g, 1 - b1)
        v.mul_(b2).addcmul_(g, g, value=1 - b2)
        torch.maximum(vhat, v, out=vhat)
        w.addcdiv_(m, (vhat + group["eps"]).sqrt_(), value=-group["lr"])

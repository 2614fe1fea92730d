"""Shift-based AdaMax: step and divisor are rounded to powers of two.

    m = b1 m + (1 - b1) g;  v = max(b2 v, |g|);  w = w - AP2(lr / (1 - b1^t)) m / (AP2(v) + 2^-27)

Courbariaux et al. 2016, arXiv:1602.02830, from the authors' Torch7 code with one change: they store AP2(v) in
v, which then never falls. AdaMax: Kingma and Ba 2015, arXiv:1412.6980. `laconic.lowbit` clips the weights.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from laconic.optim.per_tensor import PerTensor
from laconic.optim.powers import nearest_power
from laconic.optim.settings import Parameters, at_least_zero, two_shares

LEAST = 2.0**-27


class ShiftAdaMax(PerTensor):
    """Shift-based AdaMax. State: two tensors per parameter, and the step.

    Args:
        params: Parameters or parameter groups.
        lr: Learning rate, 0 or more.
        betas: b1 and b2, in [0, 1).

    Raises:
        SpecError: A setting is outside its range.

    >>> w = torch.nn.Parameter(torch.tensor([1.0]))
    >>> w.grad = torch.tensor([0.25])
    >>> ShiftAdaMax([w], lr=0.1).step()
    >>> w
    Parameter containing:
    tensor([0.9000], requires_grad=True)
    """

    def __init__(
        self, params: Parameters, lr: float = 0.002, betas: tuple[float, float] = (0.9, 0.999)
    ) -> None:
        super().__init__(params, {"lr": lr, "betas": betas})

    def check(self, group: Mapping[str, Any]) -> None:
        at_least_zero(lr=group["lr"])
        two_shares("betas", group["betas"])

    def update_(self, w: Tensor, g: Tensor, group: Mapping[str, Any]) -> None:
        state, (b1, b2) = self.state[w], group["betas"]
        if not state:
            state.update(step=0, m=torch.zeros_like(w), v=torch.zeros_like(w))
        state["step"] += 1
        state["m"].lerp_(g, 1 - b1)
        torch.maximum(state["v"].mul_(b2), g.abs(), out=state["v"])
        size = float(
            nearest_power(
                torch.tensor(group["lr"] / (1 - b1 ** state["step"]), dtype=torch.float64, device="cpu")
            )
        )
        w.addcdiv_(state["m"], nearest_power(state["v"]).add_(LEAST), value=-size)

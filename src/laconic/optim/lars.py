"""LARS: momentum SGD in which each layer's step is a share of the norm of its weights.

You et al. 2017, arXiv:1708.03888. Checked against pytorch_optimizer 4.1.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from laconic.core import arguments
from laconic.optim.layerwise import Layerwise, Tensors, adapted, norms, real, trust_ratios
from laconic.optim.settings import Parameters, above_zero, at_least_zero, real_number


class LARS(Layerwise):
    """For each tensor of at least `least_dim` dimensions, with gradient g, weights w and momentum mu:

        r = trust * |w| / (|g| + weight_decay * |w|)          1 if |w| or |g| + ... is 0
        v = mu * v + r * (g + weight_decay * w)
        w = w - lr * v                                        Nesterov: lr * (r * (g + ...) + mu * v)

    Other tensors (biases and norms) have r = 1 and no weight decay. The rate multiplies the whole velocity,
    as in `torch.optim.SGD`; in the paper it is inside the sum. Under `laconic.compress` g is the method's
    mean; where the method applies the momentum, r is that of (1 - mu) times the mean velocity. State: one
    tensor like the parameter.

    Args:
        params: Parameters or parameter groups.
        lr: Learning rate, 0 or more, at least ten times that of SGD.
        momentum: In [0, 1).
        weight_decay: L2 decay, 0 or more.
        trust: The paper's trust coefficient eta, above 0.
        nesterov: Look ahead by one step of momentum.
        least_dim: Tensors of fewer dimensions are excluded. Can be set per group.

    Raises:
        SpecError: A setting is outside its range.

    >>> w = torch.nn.Parameter(torch.tensor([[3.0, 4.0]]))
    >>> w.grad = torch.tensor([[0.0, 10.0]])
    >>> LARS([w], lr=1.0, trust=0.1).step()
    >>> [round(value, 4) for value in w.flatten().tolist()]
    [3.0, 3.5]
    """

    def __init__(
        self,
        params: Parameters,
        lr: float = 1.0,
        momentum: float = 0.9,
        weight_decay: float = 0.0,
        *,
        trust: float = 0.001,
        nesterov: bool = False,
        least_dim: int = 2,
    ) -> None:
        settings = {"lr": lr, "momentum": momentum, "weight_decay": weight_decay, "trust": trust}
        super().__init__(params, {**settings, "nesterov": nesterov, "least_dim": least_dim})

    def check(self, group: Mapping[str, Any]) -> None:
        at_least_zero(lr=group["lr"], weight_decay=group["weight_decay"])
        above_zero(trust=group["trust"])
        arguments.number("momentum", real_number(group["momentum"]), least=0, below=1)
        arguments.flag("nesterov", group["nesterov"])

    def update_(
        self,
        ws: Tensors,
        gs: Tensors,
        states: Sequence[dict[str, Any]],
        group: Mapping[str, Any],
        adapt: bool,
    ) -> None:
        steps = gs
        if adapt:
            if decay := float(group["weight_decay"]):
                steps = list(torch._foreach_add(gs, ws, alpha=decay))
            steps = list(torch._foreach_mul(steps, ratios(ws, gs, group)))
        mu = float(group["momentum"])
        if mu:
            for state, g in zip(states, gs, strict=True):
                if "velocity" not in state:  # not SGD's name: its unit is that of w
                    state["velocity"] = torch.zeros_like(g)
            velocities = [state["velocity"] for state in states]
            torch._foreach_mul_(velocities, mu)
            torch._foreach_add_(velocities, steps)
            ahead = torch._foreach_add(steps, velocities, alpha=mu) if group["nesterov"] else velocities
            steps = list(ahead)
        torch._foreach_add_(ws, steps, alpha=-float(group["lr"]))

    def velocity_ratio(self, w: Tensor, velocity: Tensor, group: Mapping[str, Any]) -> float:
        """Return r where momentum is applied before the exchange: (1 - mu) * velocity stands for g.

        At a constant g the step is LARS's own. Ours, from no paper.
        """
        if not adapted(w, group):
            return 1.0
        return float(ratios([real(w)], [real(velocity)], group, 1 - float(group["momentum"]))[0])


def ratios(ws: Tensors, gs: Tensors, group: Mapping[str, Any], gain: float = 1.0) -> Tensors:
    """Return r of each tensor, with gain * g for g."""
    sizes = norms(ws)
    under = list(torch._foreach_mul(norms(gs), gain))
    if decay := float(group["weight_decay"]):
        torch._foreach_add_(under, sizes, alpha=decay)
    return trust_ratios(sizes, under, float(group["trust"]))

"""LAMB: Adam in which each layer's step is as long as its weights, times the rate.

You et al. 2020, arXiv:1904.00962, algorithm 2. Checked against pytorch_optimizer 4.1.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from laconic.core import arguments
from laconic.optim.layerwise import Layerwise, Tensors, norms, trust_ratios
from laconic.optim.settings import Parameters, above_zero, at_least_zero, two_shares


class LAMB(Layerwise):
    """For each tensor of at least `least_dim` dimensions, with gradient g and weights w, at step t from 1:

        m = b1 * m + (1 - b1) * g        v = b2 * v + (1 - b2) * g^2
        u = m / (1 - b1^t) / (sqrt(v / (1 - b2^t)) + eps) + weight_decay * w
        w = w - lr * min(|w|, most) / |u| * u                          lr * u if |w| or |u| is 0

    Other tensors (biases and norms) take w - lr * u, without weight decay. Under `laconic.compress` g is the
    method's mean. State: two tensors like the parameter, and t.

    Args:
        params: Parameters or parameter groups.
        lr: Learning rate, 0 or more.
        betas: b1 and b2, in [0, 1).
        eps: Added to the root, above 0.
        weight_decay: Decoupled decay, 0 or more.
        bias_correction: Divide by 1 - b^t, unlike the authors' code.
        most: Largest norm of weights that counts (the paper's phi), above 0. None: no limit.
        least_dim: Tensors of fewer dimensions are excluded. Can be set per group.

    Raises:
        SpecError: A setting is outside its range.

    >>> w = torch.nn.Parameter(torch.tensor([[3.0, 4.0]]))
    >>> w.grad = torch.tensor([[2.0, 2.0]])
    >>> LAMB([w], lr=0.1, weight_decay=0.0).step()
    >>> [round(value, 4) for value in w.flatten().tolist()]  # 0.1 * 5 along (1, 1) / sqrt(2)
    [2.6464, 3.6464]
    """

    def __init__(
        self,
        params: Parameters,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-6,
        weight_decay: float = 0.01,
        *,
        bias_correction: bool = True,
        most: float | None = None,
        least_dim: int = 2,
    ) -> None:
        settings = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        more = {"bias_correction": bias_correction, "most": most, "least_dim": least_dim}
        super().__init__(params, {**settings, **more})

    def check(self, group: Mapping[str, Any]) -> None:
        at_least_zero(lr=group["lr"], weight_decay=group["weight_decay"])
        above_zero(eps=group["eps"])
        two_shares("betas", group["betas"])
        arguments.flag("bias_correction", group["bias_correction"])
        if group["most"] is not None:
            above_zero(most=group["most"])

    def update_(
        self,
        ws: Tensors,
        gs: Tensors,
        states: Sequence[dict[str, Any]],
        group: Mapping[str, Any],
        adapt: bool,
    ) -> None:
        b1, b2 = group["betas"]
        for state, g in zip(states, gs, strict=True):
            if not state:
                state |= {"step": 0, "exp_avg": torch.zeros_like(g), "exp_avg_sq": torch.zeros_like(g)}
            state["step"] += 1
        ms, vs = ([state[name] for state in states] for name in ("exp_avg", "exp_avg_sq"))
        torch._foreach_lerp_(ms, gs, 1 - b1)
        torch._foreach_mul_(vs, b2)
        torch._foreach_addcmul_(vs, gs, gs, 1 - b2)
        roots = list(torch._foreach_sqrt(vs))
        if group["bias_correction"]:  # with each tensor's own t
            torch._foreach_div_(roots, [(1 - b2 ** state["step"]) ** 0.5 for state in states])
        torch._foreach_add_(roots, group["eps"])
        steps = list(torch._foreach_div(ms, roots))
        if group["bias_correction"]:
            torch._foreach_div_(steps, [1 - b1 ** state["step"] for state in states])
        if adapt:
            if group["weight_decay"]:
                torch._foreach_add_(steps, ws, alpha=float(group["weight_decay"]))
            sizes = norms(ws)
            if group["most"] is not None:
                sizes = [size.clamp(max=float(group["most"])) for size in sizes]
            torch._foreach_mul_(steps, trust_ratios(sizes, norms(steps)))
        torch._foreach_add_(ws, steps, alpha=-float(group["lr"]))

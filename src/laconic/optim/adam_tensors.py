"""The tensors of a `torch.optim.Adam` or `AdamW`, for rules that take steps in its place.

Moments and step counts stay in the optimiser's own state: its `state_dict` saves them, and without the rule
it goes on from them.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.optim import Adam, AdamW, Optimizer

from laconic.core.errors import AttachError
from laconic.core.layout import Layout
from laconic.strategies.rule import OptimiserView, refuse_settings

ADAM = "torch.optim.Adam or AdamW"


def check_adam(optimiser: Optimizer, missing: Collection[str]) -> None:
    """Raise `AttachError` unless this is a `torch.optim.Adam` or `AdamW` whose step a rule can take."""
    if not isinstance(optimiser, (Adam, AdamW)):
        raise AttachError(
            f"this method is made for torch.optim.Adam or AdamW, got {type(optimiser).__name__}: build one of"
            " these, or take error_fed(...), which goes with any optimiser"
        )
    refuse_settings(optimiser, ("fused", "capturable", "differentiable"), "takes Adam's step")
    if missing:
        raise AttachError(
            "this method exchanges momentum, not gradients, but the optimiser does not hold"
            f" {next(iter(missing))}: give all of model.parameters() to one optimiser"
        )


def make_adam(parameters: list[Tensor], lr: float | None, weight_decay: float) -> AdamW:
    """The usual AdamW."""
    return AdamW(parameters, lr=1e-3 if lr is None else lr, weight_decay=weight_decay)


class AdamTensors:
    """One Adam's view of the tensors of a layout, in float32 whatever the parameters are."""

    def __init__(self, layout: Layout, view: OptimiserView) -> None:
        self.layout = Layout.of((entry.name, entry.shape) for entry in layout)  # one after the other
        self._view = view

    def settings(self, name: str) -> Mapping[str, Any]:
        """Adam's settings of this tensor."""
        return self._view.settings(name)

    def state(self, name: str) -> dict[str, Any]:
        """Adam's own state of this tensor; made as Adam makes it where there is none."""
        parameter = self._view.parameter(name)
        state: dict[str, Any] = self._view.optimiser.state[parameter]
        if not state:
            state["step"] = torch.tensor(0.0)
            state["exp_avg"] = torch.zeros_like(parameter)
            state["exp_avg_sq"] = torch.zeros_like(parameter)
            if self.settings(name)["amsgrad"]:
                state["max_exp_avg_sq"] = torch.zeros_like(parameter)
        return state

    def gradient(self, name: str) -> Tensor:
        """float32 (n,): this rank's gradient with Adam's L2 decay."""
        parameter, settings = self._view.parameter(name), self.settings(name)
        assert parameter.grad is not None
        g = (-parameter.grad if settings["maximize"] else parameter.grad).detach().to(torch.float32)
        if settings["weight_decay"] and not decoupled(settings, self._view.optimiser):
            g = g.add(parameter.detach().to(torch.float32), alpha=float(settings["weight_decay"]))
        return g.flatten()

    def present(self) -> list[str]:
        """The tensors that have a gradient, the same on all ranks. The others are left alone, as by Adam."""
        return [name for name in self.layout.names if self._view.parameter(name).grad is not None]

    def steps(self, name: str) -> float:
        """How many steps Adam has taken with this tensor."""
        return float(self.state(name)["step"])

    def momentum(self, name: str) -> Tensor:
        """float32 (n,): the first moment."""
        moment: Tensor = self.state(name)["exp_avg"]
        return moment.to(torch.float32).flatten()

    def momentum_with(self, name: str, gradient: Tensor) -> Tensor:
        """float32 (n,): the first moment that Adam would have after this gradient (n,)."""
        return torch.lerp(gradient, self.momentum(name), self.b1(name))

    def b1(self, name: str) -> float:
        """How much of the first moment Adam keeps in a step."""
        return float(self.settings(name)["betas"][0])

    def count(self, name: str) -> None:
        """One step more."""
        step: Tensor = self.state(name)["step"]
        step.add_(1)

    def rate(self, name: str) -> float:
        """The learning rate with the first moment's correction."""
        corrected: float = float(self.settings(name)["lr"]) / (1 - self.b1(name) ** self.steps(name))
        return corrected

    def keep(self, name: str, m: Tensor) -> None:
        """Put a new first moment, float32 (n,), in Adam's state."""
        moment = self.state(name)["exp_avg"]
        moment.copy_(m.view_as(moment))

    def shrink(self, name: str) -> float:
        """What one step of AdamW's decay multiplies the weights by."""
        settings = self.settings(name)
        apart = settings["weight_decay"] and decoupled(settings, self._view.optimiser)
        return 1 - float(settings["lr"]) * float(settings["weight_decay"]) if apart else 1.0

    def direction(self, name: str, m: Tensor, updates: float) -> Tensor:
        """float32 (n,): m / (sqrt(v / (1 - b2^updates)) + eps), of momentum m (n,).

        Where v is learnt at every step no entry of this exceeds (1 - b1) / sqrt((1 - b2) (1 - b1^2 / b2)), by
        Cauchy and Schwarz. A v that has missed an entry's large gradients gives no bound, and training blows
        up; so this one is put in force. Where v is zero the direction is: no gradient has told a scale.
        """
        state, settings = self.state(name), self.settings(name)
        b1, b2 = (float(beta) for beta in settings["betas"])
        held: Tensor = state["max_exp_avg_sq" if settings["amsgrad"] else "exp_avg_sq"]
        v = held.to(torch.float32).flatten()
        most = (1 - b1) / math.sqrt((1 - b2) * (1 - b1**2 / b2)) if b1**2 < b2 else math.inf
        scale = (v / (1 - b2**updates)).sqrt_().add_(float(settings["eps"]))
        move: Tensor = (m / scale).clamp_(-most, most)
        return move.masked_fill_(v == 0, 0.0)

    def learn_variance(self, name: str, gradient: Tensor) -> None:
        """v = b2 * v + (1 - b2) * gradient^2, and AMSGrad's maximum."""
        state, settings = self.state(name), self.settings(name)
        b2, v = float(settings["betas"][1]), state["exp_avg_sq"]
        g = gradient.view_as(v).to(v.dtype)
        v.mul_(b2).addcmul_(g, g, value=1 - b2)
        if settings["amsgrad"]:
            torch.maximum(state["max_exp_avg_sq"], v, out=state["max_exp_avg_sq"])

    @torch.no_grad()
    def take(self, name: str, weights: Tensor) -> None:
        """Put new weights, float32 (n,), in the parameter's place."""
        parameter = self._view.parameter(name)
        parameter.copy_(weights.view_as(parameter))

    def weights(self, name: str) -> Tensor:
        """float32 (n,): a copy of the parameter."""
        return self._view.parameter(name).detach().to(torch.float32, copy=True).flatten()


def decoupled(settings: Mapping[str, Any], optimiser: Optimizer) -> bool:
    """Whether weight decay acts on the weights (AdamW), not on the gradient (Adam)."""
    return bool(settings.get("decoupled_weight_decay", isinstance(optimiser, AdamW)))

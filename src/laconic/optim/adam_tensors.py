"""Tensors of a `torch.optim.Adam` or `AdamW`, for rules that replace its steps but keep its state."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.optim import Adam, AdamW, Optimizer

from laconic.comm.comm import Comm
from laconic.core.errors import AttachError
from laconic.core.layout import Layout
from laconic.exchange.rule import OptimiserView, refuse_settings
from laconic.optim.own_step import check_step

ADAM = "torch.optim.Adam or AdamW"


def check_adam(optimiser: Optimizer, missing: Collection[str]) -> None:
    if not isinstance(optimiser, (Adam, AdamW)):
        raise AttachError(
            f"this method needs torch.optim.Adam or AdamW, got {type(optimiser).__name__}: use one of these,"
            " or error_fed(...), which works with any optimiser"
        )
    check_step(optimiser, Adam, AdamW, instead="'cgx()', which works with any optimiser")
    hints = {"fused": "; with a Trainer of transformers, optim='adamw_torch'"}
    refuse_settings(optimiser, ("fused", "capturable", "differentiable"), "does Adam's step", hints)
    if missing:
        raise AttachError(
            "this method learns variances in its warm-up, then exchanges momentum, but the optimiser does not"
            f" have {next(iter(missing))}: give it all of model.parameters() before compress"
        )


def make_adam(parameters: list[Tensor], lr: float | None, weight_decay: float) -> AdamW:
    return AdamW(parameters, lr=1e-3 if lr is None else lr, weight_decay=weight_decay)


class AdamTensors:
    """Adam's tensors for a layout, flat and float32."""

    def __init__(self, layout: Layout, view: OptimiserView) -> None:
        self.layout = Layout.of((entry.name, entry.shape) for entry in layout)  # without gaps
        self._view = view

    def settings(self, name: str) -> Mapping[str, Any]:
        return self._view.settings(name)

    def state(self, name: str) -> dict[str, Any]:
        parameter = self._view.parameter(name)
        state: dict[str, Any] = self._view.optimiser.state[parameter]
        if not state:
            state["step"] = torch.tensor(0.0, dtype=torch.float32, device="cpu")
            state["exp_avg"] = torch.zeros_like(parameter)
            state["exp_avg_sq"] = torch.zeros_like(parameter)
            if self.settings(name)["amsgrad"]:
                state["max_exp_avg_sq"] = torch.zeros_like(parameter)
        return state

    def gradient(self, name: str) -> Tensor:
        parameter, settings = self._view.parameter(name), self.settings(name)
        assert parameter.grad is not None
        g = (-parameter.grad if settings["maximize"] else parameter.grad).detach().to(torch.float32)
        if settings["weight_decay"] and not decoupled(settings, self._view.optimiser):
            g = g.add(parameter.detach().to(torch.float32), alpha=float(settings["weight_decay"]))
        return g.flatten()

    def own_gradients(self) -> dict[str, Tensor]:
        grads = {name: self._view.parameter(name).grad for name in self.layout.names}
        return {name: g.detach().to(torch.float32).flatten() for name, g in grads.items() if g is not None}

    @torch.no_grad()
    def set_own_gradients(self, means: Mapping[str, Tensor]) -> None:
        for name, mean in means.items():
            grad = self._view.parameter(name).grad
            assert grad is not None
            grad.copy_(mean.view_as(grad))

    def present(self) -> list[str]:
        """Return the tensors with a gradient: the same on all ranks."""
        return [name for name in self.layout.names if self._view.parameter(name).grad is not None]

    def steps(self, name: str) -> float:
        return float(self.state(name)["step"])

    def momentum(self, name: str) -> Tensor:
        moment: Tensor = self.state(name)["exp_avg"]
        return moment.to(torch.float32).flatten()

    def momenta_with(self, gradients: Mapping[str, Tensor]) -> dict[str, Tensor]:
        found: dict[str, Tensor] = {}
        for b1, names in _grouped(gradients, self.b1):
            old = [self.momentum(name) for name in names]
            made = torch._foreach_lerp([gradients[name] for name in names], old, b1)
            found.update(zip(names, made, strict=True))
        return {name: found[name] for name in gradients}

    def gradients(self) -> dict[str, Tensor]:
        return {name: self.gradient(name) for name in self.present()}

    def b1(self, name: str) -> float:
        return float(self.settings(name)["betas"][0])

    def b2(self, name: str) -> float:
        return float(self.settings(name)["betas"][1])

    def rate(self, name: str) -> float:
        corrected: float = float(self.settings(name)["lr"]) / (1 - self.b1(name) ** self.steps(name))
        return corrected

    def set_momentum(self, name: str, m: Tensor) -> None:
        moment = self.state(name)["exp_avg"]
        moment.copy_(m.view_as(moment))

    def decay_factor(self, name: str) -> float:
        settings = self.settings(name)
        decays = settings["weight_decay"] and decoupled(settings, self._view.optimiser)
        return 1 - float(settings["lr"]) * float(settings["weight_decay"]) if decays else 1.0

    def count_steps(self, names: Iterable[str]) -> None:
        steps = [self.state(name)["step"] for name in names]
        if steps:
            torch._foreach_add_(steps, 1)

    def set_momenta(self, momenta: Mapping[str, Tensor]) -> None:
        moments = [self.state(name)["exp_avg"] for name in momenta]
        if moments:
            made = [m.view_as(moment) for m, moment in zip(momenta.values(), moments, strict=True)]
            torch._foreach_copy_(moments, made)

    @torch.no_grad()
    def move_(self, momenta: Mapping[str, Tensor], updates: Mapping[str, float]) -> None:
        """Step these tensors: w = decay * w - rate * `direction`, with v learnt `updates` times."""

        def settings(name: str) -> tuple[Any, ...]:
            found, v = self.settings(name), self.second(name)
            same = (*found["betas"], found["eps"], updates[name], self.decay_factor(name), self.rate(name))
            return (*map(float, same), v.device)

        for (*_, decay, rate, _), names in _grouped(momenta, settings):
            v = torch.cat([self.second(name).to(torch.float32).flatten() for name in names])
            m = torch.cat([momenta[name] for name in names])
            move = _direction(v, m, self.settings(names[0]), updates[names[0]])
            del v, m
            parameters = [self._view.parameter(name).detach() for name in names]
            weights = [parameter.to(torch.float32) for parameter in parameters]
            moves = torch.split(move, [weight.numel() for weight in weights])
            torch._foreach_mul_(weights, decay)
            shaped = [each.view(weight.shape) for each, weight in zip(moves, weights, strict=True)]
            torch._foreach_sub_(weights, shaped, alpha=rate)
            rounded = [
                (p, w) for p, w in zip(parameters, weights, strict=True) if p.dtype is not torch.float32
            ]
            if rounded:
                torch._foreach_copy_([p for p, _ in rounded], [w for _, w in rounded])

    def second(self, name: str) -> Tensor:
        v: Tensor = self.state(name)["max_exp_avg_sq" if self.settings(name)["amsgrad"] else "exp_avg_sq"]
        return v

    def direction(self, name: str, m: Tensor, updates: float) -> Tensor:
        """Return m / (sqrt(v / (1 - b2^updates)) + eps), clamped; zero where v is zero.

        If v is learnt at every step, no entry exceeds (1 - b1) / sqrt((1 - b2) (1 - b1^2 / b2)), by Cauchy
        and Schwarz. A v that missed large gradients gives no bound: without the clamp training diverges.
        """
        v = self.second(name).to(torch.float32).flatten()
        return _direction(v, m, self.settings(name), updates)

    def scale(self, name: str, updates: float) -> Tensor:
        """Return D = sqrt(v / (1 - b2^updates)) + eps."""
        return _scale(self.second(name).to(torch.float32).flatten(), self.settings(name), updates)

    def scaled(self, momenta: Mapping[str, Tensor], updates: Mapping[str, float]) -> dict[str, Tensor]:
        return {
            name: torch.div(m, scale := self.scale(name, updates[name]), out=scale).masked_fill_(
                self.second(name).flatten() == 0, 0.0
            )
            for name, m in momenta.items()
        }

    def unscaled(self, directions: Mapping[str, Tensor], updates: Mapping[str, float]) -> dict[str, Tensor]:
        return {
            name: self.scale(name, updates[name]).mul_(x).masked_fill_(self.second(name).flatten() == 0, 0.0)
            for name, x in directions.items()
        }

    def variance_norm(self, name: str) -> Tensor:
        """Return |v|_1 / (1 - b2^steps), float64."""
        norm: Tensor = self.second(name).sum(dtype=torch.float64)
        return norm.div_(1 - self.b2(name) ** self.steps(name))

    def learn_variance(self, name: str, gradient: Tensor) -> None:
        state, settings = self.state(name), self.settings(name)
        b2, v = float(settings["betas"][1]), state["exp_avg_sq"]
        g = gradient.view_as(v).to(v.dtype)
        v.mul_(b2).addcmul_(g, g, value=1 - b2)
        if settings["amsgrad"]:
            torch.maximum(state["max_exp_avg_sq"], v, out=state["max_exp_avg_sq"])

    @torch.no_grad()
    def set_weights(self, name: str, weights: Tensor) -> None:
        parameter = self._view.parameter(name)
        parameter.copy_(weights.view_as(parameter))

    def follow(self, comm: Comm, root: int) -> None:
        for name in self.layout.names:
            weights, state = self.weights(name), self.state(name)
            kinds = [kind for kind in state if kind != "step"]
            moments = [state[kind].to(torch.float32).flatten() for kind in kinds]
            steps = weights.new_full((1,), self.steps(name))
            got = comm.broadcast(torch.cat([weights, *moments, steps]), root)
            weights, *moments, steps = torch.split(got, [len(weights)] * (1 + len(moments)) + [1])
            self.set_weights(name, weights)
            for kind, moment in zip(kinds, moments, strict=True):
                state[kind].copy_(moment.view_as(state[kind]))
            state["step"].fill_(float(steps))

    def weights(self, name: str) -> Tensor:
        return self._view.parameter(name).detach().to(torch.float32, copy=True).flatten()


def _direction(v: Tensor, m: Tensor, settings: Mapping[str, Any], updates: float) -> Tensor:
    b1, b2 = (float(beta) for beta in settings["betas"])
    bound = (1 - b1) / math.sqrt((1 - b2) * (1 - b1**2 / b2)) if b1**2 < b2 else math.inf
    scale = _scale(v, settings, updates)
    move: Tensor = torch.div(m, scale, out=scale).clamp_(-bound, bound)
    return move.masked_fill_(v == 0, 0.0)


def _scale(v: Tensor, settings: Mapping[str, Any], updates: float) -> Tensor:
    corrected: Tensor = v / (1 - float(settings["betas"][1]) ** updates)
    return corrected.sqrt_().add_(float(settings["eps"]))


def _grouped(names: Iterable[str], key: Callable[[str], Any]) -> list[tuple[Any, list[str]]]:
    groups: dict[Any, list[str]] = {}
    for name in names:
        groups.setdefault(key(name), []).append(name)
    return list(groups.items())


def decoupled(settings: Mapping[str, Any], optimiser: Optimizer) -> bool:
    return bool(settings.get("decoupled_weight_decay", isinstance(optimiser, AdamW)))

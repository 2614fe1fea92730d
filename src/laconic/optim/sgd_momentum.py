"""SGD whose momentum is applied before the exchange (DGC): `torch.optim.SGD` must not apply it again.

Just before `step`, this rule updates the optimiser's tensors whose gradient holds velocity; SGD all others:

    w = w - lr * (G + d)     G: mean of the sent velocities; d: weight decay * w, with its own momentum

With LARS in place of SGD the step has its trust ratio, from w and (1 - momentum) * G: ours, see `lars`.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import increment_version
from torch.optim import SGD, Optimizer

from laconic import kernels
from laconic.core.errors import AttachError, StateError
from laconic.core.inference import outside_inference_mode
from laconic.core.layout import Layout
from laconic.exchange.rule import BoundRule, OptimiserView, Rule, Site, refuse_settings
from laconic.feedback import Feedback
from laconic.optim.lars import LARS
from laconic.optim.layerwise import adapted
from laconic.optim.own_step import check_step, steps_as

log = logging.getLogger("laconic")


@dataclass(frozen=True)
class SgdMomentum(Rule):
    """Updates the tensors whose momentum `feedback` owns, at the steps at which it does."""

    feedback: Feedback

    @property
    def wants(self) -> str:
        return "torch.optim.SGD or laconic.optim.LARS"

    def check(self, optimiser: Optimizer, missing: Collection[str]) -> None:
        if not isinstance(optimiser, (SGD, LARS)):
            raise AttachError(
                f"this method continues the momentum of torch.optim.SGD, got {type(optimiser).__name__}: use"
                " SGD or laconic.optim.LARS; with Adam and AdamW take 'onebit_adam()', with any optimiser"
                " 'auto()' or 'cgx()'"
            )
        check_step(optimiser, SGD, LARS, instead="'cgx()', which works with any optimiser")
        if isinstance(optimiser, LARS) and not steps_as(optimiser, LARS, by="update_"):
            raise AttachError(
                f"this method does LARS's step itself, and {type(optimiser).__name__} has an update_ of its"
                " own: use LARS, or 'cgx()', which works with any optimiser"
            )
        refuse_settings(optimiser, ("fused", "differentiable", "dampening"), "applies SGD's momentum")
        if missing:
            log.warning(
                "the optimiser does not have %s (tensors in all: %d): exchanged, and not updated before"
                " add_param_group brings them",
                next(iter(missing)),
                len(missing),
            )

    def bind(self, layout: Layout, view: OptimiserView, site: Site) -> BoundRule:
        return _BoundSgdMomentum(self.feedback, layout, view)


@outside_inference_mode("close", "state_dict", "load_state_dict")
class _BoundSgdMomentum(BoundRule):
    def __init__(self, feedback: Feedback, layout: Layout, view: OptimiserView) -> None:
        self._feedback = feedback
        self._layout = layout
        self._view = view
        self._decay: dict[str, Tensor] = {}  # momentum of the weight decay

    def step_(self, step: int) -> Iterable[str]:
        if not self._feedback.owns_momentum(step):
            return ()
        held = {name: self._view.parameter(name) for name in self._layout.names if self._view.holds(name)}
        present = {name: parameter for name, parameter in held.items() if parameter.grad is not None}
        for name, parameter in present.items():
            self._update_(name, parameter, self._view.settings(name))
        return present.keys()

    def close(self) -> None:
        """Replicas are equal."""

    @torch.no_grad()
    def _update_(self, name: str, parameter: Tensor, group: Mapping[str, Any]) -> None:
        assert parameter.grad is not None
        sign, optimiser, decays = (-1 if group.get("maximize") else 1), self._view.optimiser, True
        rate = float(group["lr"]) * sign
        if isinstance(optimiser, LARS):
            rate *= optimiser.velocity_ratio(parameter, parameter.grad, group)
            decays = adapted(parameter, group)
        if group["weight_decay"] and decays:
            term = parameter * (sign * float(group["weight_decay"]))
            momentum = float(group["momentum"])
            if momentum:
                held = self._decay.get(name)
                held = torch.zeros_like(parameter) if held is None else held
                held.mul_(momentum).add_(term)
                self._decay[name] = held
                term = term.add_(held, alpha=momentum) if group["nesterov"] else held
            parameter.add_(term, alpha=-rate)
        _add_(parameter, parameter.grad, -rate)

    def state_dict(self) -> dict[str, Tensor]:
        return {f"decay/{name}": value.detach().clone() for name, value in self._decay.items()}

    def check_state(self, state: Mapping[str, Tensor]) -> None:
        shapes = {f"decay/{entry.name}": entry.shape for entry in self._layout}
        for key, value in state.items():
            if shapes.get(key) != tuple(value.shape):
                raise StateError(
                    f"the saved state has {key} of shape {tuple(value.shape)}, but this model does not:"
                    " load the state of the same model"
                )

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        self.check_state(state)
        named = {key.removeprefix("decay/"): value for key, value in state.items()}
        self._decay = {
            name: value.to(parameter.device).clone()
            for name, value in named.items()
            for parameter in (self._view.parameter(name),)
        }


def _add_(parameter: Tensor, mean: Tensor, alpha: float) -> None:
    """parameter += alpha * mean, which is mostly zero: on the CPU, entries with zero are skipped."""
    if all(x.is_cpu and x.is_contiguous() and x.dtype is torch.float32 for x in (parameter, mean)):
        kernels.add_sparse_(parameter.view(-1), mean.view(-1), alpha)
        increment_version(parameter)
    else:
        parameter.add_(mean, alpha=alpha)

"""Muon's step on the rows or columns of a matrix that a method has exchanged."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.optim import Muon, Optimizer

from laconic.core.errors import AttachError
from laconic.core.layout import Layout
from laconic.exchange.rule import BoundRule, OptimiserView, Rule, RuleContext
from laconic.optim.chosen_rows import axis
from laconic.optim.muon_adamw import MuonAdamW, is_muon
from laconic.optim.newton_schulz import orthonormal
from laconic.optim.own_step import check_step


@dataclass(frozen=True)
class MuonRows(Rule):
    """Steps of `torch.optim.Muon` on matrices' nonzero rows or columns, without further momentum."""

    @property
    def wants(self) -> str:
        return "torch.optim.Muon(..., nesterov=False)"

    def steps(self, settings: Mapping[str, Any]) -> bool:
        return is_muon(settings)

    def check(self, optimiser: Optimizer, missing: Collection[str]) -> None:
        if isinstance(optimiser, Muon):
            check_step(optimiser, Muon, instead="'cgx()', which works with any optimiser")
        if any(is_muon(group) and group["nesterov"] for group in optimiser.param_groups):
            raise AttachError(
                "this method applies Muon's momentum itself, without Nesterov's correction: build"
                " torch.optim.Muon with nesterov=False"
            )

    def make(self, parameters: list[Tensor], *, lr: float | None, weight_decay: float) -> Optimizer:
        return MuonAdamW(parameters, lr=1e-3 if lr is None else lr, weight_decay=weight_decay)

    def bind(self, layout: Layout, view: OptimiserView, context: RuleContext) -> BoundRule:
        return _MuonRows(layout, view)


class _MuonRows(BoundRule):
    def __init__(self, layout: Layout, view: OptimiserView) -> None:
        self._names = layout.names
        self._view = view
        for name in layout.names:
            if not view.parameter(name).is_contiguous():
                raise AttachError(
                    f"{name} is not in row-major order, so its rows are not those of its gradient in memory:"
                    " make the parameter contiguous"
                )

    @torch.no_grad()
    def step_(self, step: int) -> Iterable[str]:
        names = [name for name in self._names if self._view.holds(name)]
        names = [name for name in names if self._view.parameter(name).grad is not None]
        for name in names:
            settings, w = self._view.settings(name), self._view.parameter(name)
            if not is_muon(settings):
                raise AttachError(
                    f"{name} was added to an optimiser other than Muon, but its exchange is Muon's: call the"
                    " handle's remove(), then compress() again"
                )
            assert w.grad is not None
            _step_(w, w.grad, settings)
        return names

    def close(self) -> None:
        """Do nothing: replicas are equal."""


def _step_(w: Tensor, g: Tensor, settings: Mapping[str, Any]) -> None:
    """Step the nonzero slices of g: w = (1 - lr * weight decay) * w - adjusted lr * orthonormal(g)."""
    along, lr = axis(tuple(w.shape)), float(settings["lr"])
    slices = g.ne(0).any(1 - along).nonzero().flatten()  # the union over several exchanges
    iteration = settings["ns_coefficients"], settings["ns_steps"], settings["eps"]
    change = orthonormal(g.index_select(along, slices), *iteration)
    w.mul_(1 - lr * settings["weight_decay"])
    w.index_add_(along, slices, change.to(w.dtype), alpha=-lr * _ratio(w, settings["adjust_lr_fn"]))


def _ratio(w: Tensor, adjust: str | None) -> float:
    m, n = w.shape
    return 0.2 * math.sqrt(max(m, n)) if adjust == "match_rms_adamw" else math.sqrt(max(1, m / n))

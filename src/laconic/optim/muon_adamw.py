"""Muon for matrices and AdamW for other parameters, for tools that build one optimiser."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.optim import AdamW, Muon, Optimizer

from laconic.optim.closure import evaluate


def is_muon(settings: Mapping[str, Any]) -> bool:
    return "ns_steps" in settings


class MuonAdamW(Optimizer):
    """Optimiser that steps matrices as `torch.optim.Muon` without Nesterov, others as AdamW.

    Muon's rate is adjusted so that one `lr` suits both.

    >>> weight, bias = torch.nn.Parameter(torch.ones(4, 3)), torch.nn.Parameter(torch.ones(4))
    >>> [is_muon(group) for group in MuonAdamW([weight, bias]).param_groups]
    [True, False]
    """

    def __init__(self, params: list[Tensor], lr: float = 1e-3, weight_decay: float = 0.0) -> None:
        matrices = [each for each in params if each.dim() == 2]
        others = [each for each in params if each.dim() != 2]
        self._parts: list[Optimizer] = []
        if matrices:
            self._parts.append(
                Muon(
                    matrices,
                    lr=lr,
                    weight_decay=weight_decay,
                    nesterov=False,
                    adjust_lr_fn="match_rms_adamw",
                )
            )
        if others:
            self._parts.append(AdamW(others, lr=lr, weight_decay=weight_decay))
        super().__init__([group for part in self._parts for group in part.param_groups], {})

    def __getstate__(self) -> dict[str, Any]:
        return super().__getstate__() | {"_parts": self._parts}  # torch copies nothing else

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        loss = evaluate(closure)
        for part in self._parts:
            own = isinstance(part, Muon)
            part.param_groups = [group for group in self.param_groups if is_muon(group) == own]
            part.state = self.state
            part.step()
        return loss

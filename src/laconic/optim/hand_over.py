"""Gradients with which SGD's own momentum step makes a given update.

x is the mean of the velocities that a method sent, m SGD's momentum, b its buffer, d the momentum of the
weight decay, which is not compressed:

    heavy ball   h = (x - m * (b - d)) / (1 - dampening)      step: x + d'
    Nesterov     h = (x - m^2 * (b - d)) / (1 + m)            step: x + weight_decay * w + m * d'
    afterwards   d' = m * d + (1 - dampening) * weight_decay * w,    b = 0

x is minus the gradient with `maximize`. SGD runs its own step, for fused kernels, schedules and torch's
checkpoint functions. Its buffer is zero between steps: the momentum is in the velocity alone. LARS scales the
step by the gradient's norm: its step is made here.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import increment_version
from torch.optim import SGD, Adam, AdamW, Optimizer

from laconic import kernels
from laconic.core.memory_order import shaped
from laconic.optim.lars import LARS
from laconic.optim.layerwise import adapted
from laconic.optim.own_step import steps_as

BUFFER = "momentum_buffer"
FOR_ADAM = "; 'sparse_adam()' and 'onebit_adam()' are made for Adam and exchange its momentum"


def why_in_optimizer(optimizer: Optimizer, group: Mapping[str, Any], parameter: Tensor) -> str | None:
    """Return why this tensor's momentum stays in its optimiser ("" without momentum), or None.

    >>> weight = torch.nn.Parameter(torch.zeros(2, 2))
    >>> sgd = SGD([weight], lr=0.1, momentum=0.9, dampening=0.5)
    >>> why_in_optimizer(sgd, sgd.param_groups[0], weight)
    'dampening is 0.5'
    """
    kind = type(optimizer).__name__
    if not isinstance(optimizer, (SGD, LARS)):
        hint = FOR_ADAM if isinstance(optimizer, (Adam, AdamW)) else ""
        return f"the optimiser is {kind}, not torch.optim.SGD{hint}"
    own_update = isinstance(optimizer, LARS) and not steps_as(optimizer, LARS, by="update_")
    if own_update or not steps_as(optimizer, SGD, LARS):
        return f"{kind} has a step of its own"
    if not group.get("momentum"):
        return ""
    for name in ("dampening", "differentiable"):
        if group.get(name):
            return f"{name} is {group[name]}"
    return "its parameters are complex" if parameter.is_complex() else None


class HandOver:
    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = optimizer
        self._parameters: list[Tensor] = []  # of this step
        self._cleared: dict[Tensor, tuple[Tensor, int]] = {}  # zeroed buffers, and their versions

    @torch.no_grad()
    def prepare(
        self,
        tensors: Mapping[str, tuple[Tensor, Mapping[str, Any]]],
        decay: dict[str, Tensor],
        scale: float = 1.0,
    ) -> tuple[dict[Tensor, Tensor], list[str]]:
        """Return the gradients that differ from x, and the names of the tensors stepped here.

        `tensors`: parameter with gradient x, and group, by name. `decay`: momentum of the weight decay;
        updated. `scale`: factor of x; the step divides by it.
        """
        self._parameters = []
        changed: dict[Tensor, Tensor] = {}
        stepped: list[str] = []
        for name, (parameter, group) in tensors.items():
            if isinstance(self._optimizer, LARS):
                self._step(self._optimizer, name, parameter, group, decay)
                stepped.append(name)
                continue
            assert parameter.grad is not None
            self._parameters.append(parameter)
            old = _updated(name, parameter, group, decay)
            gradient = self._gradient(parameter, parameter.grad, group, old, scale)
            if gradient is not parameter.grad:
                changed[parameter] = gradient
        return changed, stepped

    @torch.no_grad()
    def finish(self, *, keep: bool) -> None:
        """Zero the step's momentum buffers, unless SGD is to `keep` them."""
        buffers = [] if keep else [(each, self.buffer(each)) for each in self._parameters]
        held = {each: buffer for each, buffer in buffers if buffer is not None}
        if held:
            torch._foreach_zero_([*held.values()])
        self._cleared = {each: (buffer, buffer._version) for each, buffer in held.items()}
        self._parameters = []

    def buffer(self, parameter: Tensor) -> Tensor | None:
        state = self._optimizer.state.get(parameter)
        buffer = None if state is None else state.get(BUFFER)
        return buffer if isinstance(buffer, Tensor) else None

    def set_buffer(self, parameter: Tensor, value: Tensor) -> None:
        if (buffer := self.buffer(parameter)) is None:
            buffer = self._optimizer.state[parameter][BUFFER] = torch.empty_like(parameter.detach())
        buffer.copy_(shaped(value, buffer))

    def _gradient(
        self, parameter: Tensor, x: Tensor, group: Mapping[str, Any], decay: Tensor | None, scale: float
    ) -> Tensor:
        """Return h, or x itself if they are equal. `decay`: d before this step."""
        m, sign = float(group["momentum"]), (-1.0 if group.get("maximize") else 1.0)
        if not m:
            return x
        buffer = self.buffer(parameter)
        fresh = buffer is None
        if buffer is not None and (known := self._cleared.get(parameter)) is not None:
            buffer = None if known[0] is buffer and known[1] == buffer._version else buffer
        nesterov = bool(group["nesterov"])
        alpha = sign * scale * (m * m if nesterov else m)
        h = x
        if decay is not None:
            h = torch.add(h, decay.to(h.dtype), alpha=alpha)
        if buffer is not None:
            h = torch.add(h, buffer.to(h.dtype), alpha=-alpha)
        if nesterov:
            return h / (1 + m)
        dampening = float(group.get("dampening", 0.0))
        return h / (1 - dampening) if dampening and not fresh else h

    def _step(
        self,
        optimizer: LARS,
        name: str,
        parameter: Tensor,
        group: Mapping[str, Any],
        decay: dict[str, Tensor],
    ) -> None:
        """Step a tensor of LARS: w = w - lr * r * (x + d'), with r from (1 - m) * x."""
        assert parameter.grad is not None
        rate = float(group["lr"]) * optimizer.velocity_ratio(parameter, parameter.grad, group)
        if adapted(parameter, group) and (group["weight_decay"] or name in decay):
            m, term = float(group["momentum"]), parameter * float(group["weight_decay"])
            _updated(name, parameter, group, decay)
            parameter.add_(term.add_(decay[name], alpha=m) if group["nesterov"] else decay[name], alpha=-rate)
        _add_(parameter, parameter.grad, -rate)


def _updated(
    name: str, parameter: Tensor, group: Mapping[str, Any], decay: dict[str, Tensor]
) -> Tensor | None:
    """Update the momentum of a tensor's weight decay; return the old one, None for zero."""
    weight, old = float(group["weight_decay"]), decay.get(name)
    if not weight and old is None:
        return None
    old = None if old is None else old.to(parameter)  # it may be on another device
    m = float(group["momentum"])
    held = torch.zeros_like(parameter) if old is None else old * m
    if weight:
        held.add_(parameter, alpha=weight * (1 - float(group.get("dampening", 0.0))))
    decay[name] = held
    return old


def _add_(parameter: Tensor, mean: Tensor, alpha: float) -> None:
    """Add alpha * mean, mostly zero: the CPU skips zeros."""
    if all(x.is_cpu and x.is_contiguous() and x.dtype is torch.float32 for x in (parameter, mean)):
        kernels.add_sparse_(parameter.view(-1), mean.view(-1), alpha)
        increment_version(parameter)
    else:
        parameter.add_(mean, alpha=alpha)

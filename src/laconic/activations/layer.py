"""Statistics and error bound of a layer."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from laconic.activations.coding import CodingRule
from laconic.kernels.error_bound import LEAST, MOST

EARLY_STEPS = (0, 3, 10, 30)  # extra statistics while momentum builds up
MAX_RELATIVE_BOUND = 0.5  # of the input's rms; larger errors are not like noise
A = 0.32  # of arXiv:2111.09562
STATE = ("calls", "spread", "limit", "rms", "support", "mean_grad", "bound", "_fresh")
Geometry = tuple[tuple[int, int, int], ...]  # stride, padding, dilation per dimension
Momentum = Callable[[Tensor], Tensor | None]


class Layer:
    """Convolution, linear layer or batch norm. `calls`: number of steps; one ends when the optimiser steps,
    the weight changes or its gradient is cleared.
    """

    def __init__(self, name: str, weight: nn.Parameter, coding: CodingRule, momentum: Momentum) -> None:
        self.name, self.weight, self.coding, self.momentum = name, weight, coding, momentum
        self.calls = 0
        self.spread = math.nan  # sigma of the weight gradient's error for a bound of 1
        self.limit = math.inf  # bound of a batch norm * mean |grad of the scale| <= share * limit
        self.rms = 0.0
        self.support = 1.0
        self.mean_grad = math.nan
        self.bound: float | None = None
        self._fresh = False
        self._version: int | None = None  # of the weight
        self._in_backward = self._due = False
        self._squares = 0.0  # sum of squared spreads
        self._removable: RemovableHandle | None = None

    @property
    def label(self) -> str:
        module, _, name = self.name.rpartition(".")
        return module if name == "weight" else self.name

    def state(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in STATE}

    def load(self, state: Mapping[str, Any], same_coding: bool) -> None:
        """Restore `state`; solve the bound for another coding."""
        for name in STATE:
            setattr(self, name, state[name])
        self._version = None
        if not same_coding:
            self.calls, self._fresh = 0, math.isfinite(self.spread)

    def stepped(self) -> None:
        """Note a step: fused optimisers do not change the weight's version."""
        if self.weight.grad is not None:
            self._version = None

    def begin(self, x: Tensor) -> bool:
        """Note a call; begin a step if it is its first; return whether statistics are due."""
        if not x.numel():
            return False
        cleared = self._in_backward and self.weight.grad is None
        if self._version != self.weight._version or cleared:
            self._begin_step()
        if self._due:
            rms = float(x.detach().float().square().mean().sqrt())
            self.rms = min(filter(None, (self.rms, rms)), default=0.0)
            self.support = float((x.detach() != 0).float().mean())
        return self._due

    def _begin_step(self) -> None:
        self._version, self._in_backward = self.weight._version, False
        self._due = self.calls in EARLY_STEPS or self.calls % self.coding.every == 0
        self.calls += 1
        if self._fresh:
            self._fresh = False
            self.bound = self.solve()
        if self._due:
            self._squares, self.limit, self.rms = 0.0, math.inf, 0.0

    def mark_backward(self) -> None:
        self._in_backward = True

    def solve(self) -> float | None:
        held = self.momentum(self.weight)
        scale = self.mean_grad if held is None else float(held.abs().mean())
        bound = self.coding.share * scale / self.spread if self.spread > 0 else math.nan
        if self.mean_grad > 0:
            bound = min(bound, self.coding.share * self.limit / self.mean_grad, MAX_RELATIVE_BOUND * self.rms)
        return min(max(bound, LEAST), MOST) if bound > 0 and math.isfinite(bound) else None

    def current(self, x: Tensor) -> float:
        """Return the bound for x. Before one is solved, guess it.

        For noise, mean |grad| is 0.8 rms(g) rms(x) sqrt(n); 0.5 is used, as batch norms have less.
        """
        if self.bound is not None:
            return self.bound
        guess = self.coding.share * 0.5 * math.sqrt(3) * self.rms / math.sqrt(max(self.support, 1e-6))
        return min(max(guess, LEAST), MOST) if math.isfinite(guess) else LEAST

    def watch(self, out: Tensor, saw: Callable[[Tensor], None]) -> None:
        """Pass the output's gradient to `saw`, then read the weight's."""

        def begun(grad: Tensor) -> None:
            if self._removable is None and self.weight.grad is None:
                self._squares, self.limit = 0.0, math.inf
            saw(grad)
            self.mean_grad = math.nan
            if self._removable is None:
                hook = self.weight.register_post_accumulate_grad_hook
                self._removable = hook(self._record_weight)  # type: ignore[no-untyped-call]

        out.register_hook(begun)  # type: ignore[no-untyped-call]

    def _record_weight(self, weight: Tensor) -> None:
        if weight.grad is not None:
            self.mean_grad = float(weight.grad.abs().mean())
            self._fresh = True
        if self._removable is not None:
            self._removable.remove()
            self._removable = None

    def record_products(self, grad: Tensor, terms: float, batch: int, support: float) -> None:
        g = grad.detach().float()
        if self.coding.mode == "law":
            self._add(float(g.square().mean().sqrt()) * math.sqrt(terms * support / 3))
        else:
            self._add(A * float(g.abs().mean()) * math.sqrt(batch * support))

    def record_norm(self, grad: Tensor, inverse: float) -> None:
        """Add the error of a batch norm's scale.

        Its input's gradient has the relative error c * inverse * bound / sqrt(3). `inverse`: rms of 1/sigma
        over channels; c: correlation of g with the normalised input, the scale's gradient / (n rms(g)).
        """
        g = grad.detach().float()
        n, rms = g.numel() / g.shape[1], float(g.square().mean().sqrt())
        self._add(rms * math.sqrt(n / 3) * inverse)
        self.limit = min(self.limit, math.sqrt(3) * n * rms / inverse)

    def _add(self, spread: float) -> None:
        self._squares += spread**2
        self.spread = math.sqrt(self._squares)


def terms(x: torch.Size, out: torch.Size, weight: torch.Size, geometry: Geometry | None) -> float:
    """Return a weight gradient's mean number of terms, without padding."""
    if geometry is None:
        return out.numel() / out[-1]
    total = float(out[0])
    for d, (stride, padding, dilation) in enumerate(geometry):
        places, taps = (torch.arange(n[2 + d], dtype=torch.int64, device="cpu") for n in (out, weight))
        at = places[:, None] * stride - padding + taps * dilation
        total *= float(((at >= 0) & (at < x[2 + d])).sum()) / len(taps)
    return total

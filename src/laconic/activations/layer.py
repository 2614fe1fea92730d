"""One layer's statistics, and the bound on its input's error that follows from them."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from laconic.activations.coding import Coding
from laconic.kernels.error_bound import LEAST, MOST

EARLY = (0, 3, 10, 30)  # steps: momentum grows in them
COARSEST = 0.5  # of the input's rms: beyond that errors are no noise any more
A = 0.32  # the paper's factor
STATE = ("calls", "spread", "limit", "rms", "support", "mean_grad", "bound", "_fresh")
Geometry = tuple[tuple[int, int, int], ...]  # stride, padding, dilation of each dimension
Momentum = Callable[[Tensor], Tensor | None]


class Layer:
    """A convolution, linear layer or batch norm, known by its weight. `name`: of that parameter.

    `calls` counts steps: all calls whose gradients add up are one, of a layer that is used several times and
    of micro-batches. A step ends with the optimiser's, or when the weight changes or its gradient is cleared.
    """

    def __init__(self, name: str, weight: nn.Parameter, coding: Coding, momentum: Momentum) -> None:
        self.name, self.weight, self.coding, self.momentum = name, weight, coding, momentum
        self.calls = 0
        self.spread = math.nan  # sigma of the weight gradient's error for a bound of 1
        self.limit = math.inf  # of a batch norm: share of it is the most of bound * mean |grad| of its scale
        self.rms = 0.0
        self.support = 1.0
        self.mean_grad = math.nan
        self.bound: float | None = None
        self._fresh = False
        self._version: int | None = None  # of the weight, in this step
        self._went_back = self._due = False  # in this step
        self._squares = 0.0  # of the spreads of this step's calls
        self._removable: RemovableHandle | None = None

    @property
    def label(self) -> str:
        """The module's name, or the parameter's where it is not the module's `weight`."""
        module, _, name = self.name.rpartition(".")
        return module if name == "weight" else self.name

    def state(self) -> dict[str, Any]:
        """All that it has learned, as numbers."""
        return {name: getattr(self, name) for name in STATE}

    def load(self, state: Mapping[str, Any], alike: bool) -> None:
        """Go on where `state` was taken; with a coding that is not `alike`, bounds are solved anew."""
        for name in STATE:
            setattr(self, name, state[name])
        self._version = None
        if not alike:
            self.calls, self._fresh = 0, math.isfinite(self.spread)

    def stepped(self) -> None:
        """The optimiser has stepped: fused ones leave the weight's version as it is."""
        if self.weight.grad is not None:
            self._version = None

    def begin(self, x: Tensor) -> bool:
        """One more call with this input; whether its statistics are due."""
        if not x.numel():
            return False
        cleared = self._went_back and self.weight.grad is None
        if self._version != self.weight._version or cleared:
            self._begin_step()
        if self._due:
            rms = float(x.detach().float().square().mean().sqrt())
            self.rms = min(filter(None, (self.rms, rms)), default=0.0)
            self.support = float((x.detach() != 0).float().mean())
        return self._due

    def _begin_step(self) -> None:
        self._version, self._went_back = self.weight._version, False
        self._due = self.calls in EARLY or self.calls % self.coding.every == 0
        self.calls += 1
        if self._fresh:
            self._fresh = False
            self.bound = self.solve()
        if self._due:
            self._forget()
            self.rms = 0.0

    def _forget(self) -> None:
        """What calls have added to a gradient that is no more."""
        self._squares, self.limit = 0.0, math.inf

    def goes_back(self) -> None:
        """Its input is read in backward."""
        self._went_back = True

    def solve(self) -> float | None:
        """The bound of the last statistics, or None where they say nothing."""
        held = self.momentum(self.weight)
        scale = self.mean_grad if held is None else float(held.abs().mean())
        bound = self.coding.share * scale / self.spread if self.spread > 0 else math.nan
        if self.mean_grad > 0:
            bound = min(bound, self.coding.share * self.limit / self.mean_grad, COARSEST * self.rms)
        return min(max(bound, LEAST), MOST) if bound > 0 and math.isfinite(bound) else None

    def current(self, x: Tensor) -> float:
        """The bound to keep x with. Before there are statistics: of a gradient that is all noise.

        Terms that cancel by chance leave mean |grad| = 0.8 rms(g) rms(x) sqrt(n); batch norms make it less,
        so with 0.5 of it the law gives share * 0.5 * sqrt(3) * rms(x) / sqrt(R).
        """
        if self.bound is not None:
            return self.bound
        guess = self.coding.share * 0.5 * math.sqrt(3) * self.rms / math.sqrt(max(self.support, 1e-6))
        return min(max(guess, LEAST), MOST) if math.isfinite(guess) else LEAST

    def watch(self, out: Tensor, saw: Callable[[Tensor], None]) -> None:
        """Take the statistics of this step's backward: `saw` the output's gradient, then the weight's."""

        def begun(grad: Tensor) -> None:
            if self._removable is None and self.weight.grad is None:
                self._forget()
            saw(grad)
            self.mean_grad = math.nan
            if self._removable is None:
                hook = self.weight.register_post_accumulate_grad_hook
                self._removable = hook(self._see_weight)  # type: ignore[no-untyped-call]

        out.register_hook(begun)  # type: ignore[no-untyped-call]

    def _see_weight(self, weight: Tensor) -> None:
        """Once a backward, after the output's gradient; nothing stays on the weight until the next."""
        if weight.grad is not None:
            self.mean_grad = float(weight.grad.abs().mean())
            self._fresh = True
        if self._removable is not None:
            self._removable.remove()
            self._removable = None

    def see_products(self, grad: Tensor, terms: float, batch: int, support: float) -> None:
        """The law of sums of products: of a convolution or linear layer with this output gradient."""
        g = grad.detach().float()
        if self.coding.mode == "law":
            self._add(float(g.square().mean().sqrt()) * math.sqrt(terms * support / 3))
        else:
            self._add(A * float(g.abs().mean()) * math.sqrt(batch * support))

    def see_norm(self, grad: Tensor, inverse: float) -> None:
        """The law of a batch norm's scale, whose gradient sums g * (x - mean) * inverse over n elements.

        Its input's gradient errs, relative to rms(g), by correlation * inverse * eb / sqrt(3), where the
        correlation of g with the normalised input is the scale's gradient over n rms(g).
        """
        g = grad.detach().float()
        n, rms = g.numel() / g.shape[1], float(g.square().mean().sqrt())
        self._add(rms * math.sqrt(n / 3) * inverse)
        self.limit = min(self.limit, math.sqrt(3) * n * rms / inverse)

    def _add(self, spread: float) -> None:
        """One call's error: those of several, which are independent, add up in squares."""
        self._squares += spread**2
        self.spread = math.sqrt(self._squares)


def terms(x: torch.Size, out: torch.Size, weight: torch.Size, geometry: Geometry | None) -> float:
    """How many products a weight's gradient sums, on average: those with padding do not count."""
    if geometry is None:  # a linear layer
        return out.numel() / out[-1]
    total = float(out[0])
    for d, (stride, padding, dilation) in enumerate(geometry):
        places, taps = (
            torch.arange(out[2 + d], dtype=torch.int64, device="cpu"),
            torch.arange(weight[2 + d], dtype=torch.int64, device="cpu"),
        )
        at = places[:, None] * stride - padding + taps * dilation
        total *= float(((at >= 0) & (at < x[2 + d])).sum()) / len(taps)
    return total

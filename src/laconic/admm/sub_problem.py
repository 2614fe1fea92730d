"""Sub-problem of one block on one mini-batch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from laconic.admm.block_admm import BlockAdmm
from laconic.admm.proximal import Proximal

Loss = Callable[[Tensor, Tensor], Tensor]  # (outputs, targets) -> mean over samples


@dataclass
class Visit:
    """One mini-batch at one block, between its forward pass and its targets.

    `x`: the block's input; `u`: scaled duals; `f`: the previous block's output; `before`: X at the end of the
    last visit; `ids`: int64 (rows,) on the CPU, in mode 'batch'.
    """

    number: int
    x: Tensor
    u: Tensor | None = None
    f: Tensor | None = None
    before: Tensor | None = None
    ids: Tensor | None = None


@dataclass(frozen=True)
class Solution:
    """Result of a sub-problem.

    `x`: None on the first block; `term`: mean loss before the steps; `primal`, `dual`: |X - f| and |X -
    before|, over |f|.
    """

    x: Tensor | None
    term: float
    primal: float = 0.0
    dual: float = 0.0


class SubProblem:
    """Training of one block.

    `loss`: of the last block; None: beta/2 |target - f|^2 per sample.
    """

    def __init__(
        self,
        layers: nn.Module,
        proximal: Proximal | None,
        optimizer: Optimizer,
        training: BlockAdmm,
        loss: Loss | None,
    ) -> None:
        self.layers, self.proximal, self.optimizer = layers, proximal, optimizer
        self.training, self.loss = training, loss

    def feasible(self, f: Tensor) -> Tensor:
        return f if self.proximal is None else self.proximal(f).detach()

    @torch.no_grad()
    def penalty_step(self, x: Tensor, f: Tensor, u: Tensor) -> Tensor:
        """Return a stored X after a proximal step on the penalty alone."""
        return self.feasible(x - self.training.rate * (x - f + u))

    @torch.no_grad()
    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.layers(x)
        return found

    def solve(self, visit: Visit, target: Tensor) -> Solution:
        """Train the block's parameters T and input X for `steps` steps.

        `target`: X + U of the next boundary, or labels on the last block.
        """
        x, first = visit.x, 0.0
        for step in range(self.training.steps):
            term, gradient = self._descend(x, target, wants_x=visit.f is not None)
            first = first if step else term
            if gradient is not None:
                x = self._proximal_step(x, gradient, visit)
        if visit.f is None or visit.before is None:
            return Solution(None, first)
        size = visit.f.norm().clamp(min=torch.finfo(torch.float32).tiny)
        return Solution(x, first, float((x - visit.f).norm() / size), float((x - visit.before).norm() / size))

    def _descend(self, x: Tensor, target: Tensor, wants_x: bool) -> tuple[float, Tensor | None]:
        """Step T; return the term and its gradient per sample of X."""
        x = x.detach().requires_grad_(wants_x)
        with torch.enable_grad():
            term = self._term(self.layers(x), target)
            self.optimizer.zero_grad()
            term.backward()  # type: ignore[no-untyped-call]
        self.optimizer.step()
        return term.item(), None if x.grad is None else len(x) * x.grad

    def _term(self, out: Tensor, target: Tensor) -> Tensor:
        if self.loss is not None:
            return self.loss(out, target)
        return self.training.beta / 2 * (out - target).square().sum() / len(out)

    def _proximal_step(self, x: Tensor, gradient: Tensor, visit: Visit) -> Tensor:
        assert visit.f is not None and visit.u is not None
        pull = x - visit.f + visit.u + gradient / self.training.beta
        moved = x - self.training.rate * pull
        return moved if self.proximal is None else self.proximal.learn(moved)

"""One block's own sub-problem on one mini-batch: steps of its parameters T, and of X, what it is given."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from laconic.admm.block_admm import BlockAdmm
from laconic.admm.proximal import Proximal

Loss = Callable[[Tensor, Tensor], Tensor]  # outputs and targets to the mean over samples


@dataclass
class Visit:
    """One mini-batch at one block, between its forward pass and its targets.

    Attributes:
        number: Of the mini-batch, from 0.
        x: What the block is given, X; on the first block the input.
        u: Its scaled duals, of the same shape; None on the first block.
        f: What the block before gave, of the same shape; None on the first block.
        before: X at the end of these samples' last visit; at a first one `x`.
        ids: int64 (rows,) on the CPU; None where nothing is stored.
    """

    number: int
    x: Tensor
    u: Tensor | None = None
    f: Tensor | None = None
    before: Tensor | None = None
    ids: Tensor | None = None


@dataclass(frozen=True)
class Solved:
    """What came of a sub-problem. `x`: None on the first block. `term`: before the steps, a mean."""

    x: Tensor | None
    term: float
    primal: float = 0.0
    dual: float = 0.0


class SubProblem:
    """Trains one block. No graph leaves it: X and targets are tensors without history.

    Args:
        layers: The block.
        proximal: What constrains X; None: nothing.
        optimizer: Of the block's parameters.
        loss: The last block's, against labels; None on others, whose term is beta/2 |target - f|^2 a sample.
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
        """X of a sample that has none yet: what the block before gives, constrained."""
        return f if self.proximal is None else self.proximal(f).detach()

    @torch.no_grad()
    def nearer(self, x: Tensor, f: Tensor, u: Tensor) -> Tensor:
        """Stored X after a proximal step on the penalty alone: the blocks have moved since its last visit."""
        return self.feasible(x - self.training.rate * (x - f + u))

    @torch.no_grad()
    def forward(self, x: Tensor) -> Tensor:
        """f(X; T)."""
        found: Tensor = self.layers(x)
        return found

    def solve(self, visit: Visit, target: Tensor) -> Solved:
        """Steps of T and X. `target`: X + U of the next boundary, or labels on the last block."""
        x, first = visit.x, 0.0
        for step in range(self.training.steps):
            term, gradient = self._descend(x, target, wants_x=visit.f is not None)
            first = first if step else term
            if gradient is not None:
                x = self._moved(x, gradient, visit)
        if visit.f is None or visit.before is None:
            return Solved(None, first)
        size = visit.f.norm().clamp(min=torch.finfo(torch.float32).tiny)
        return Solved(x, first, float((x - visit.f).norm() / size), float((x - visit.before).norm() / size))

    def _descend(self, x: Tensor, target: Tensor, wants_x: bool) -> tuple[float, Tensor | None]:
        """One step of T; the block's term, and its gradient with respect to each sample's own X."""
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

    def _moved(self, x: Tensor, gradient: Tensor, visit: Visit) -> Tensor:
        """One proximal step of X."""
        assert visit.f is not None and visit.u is not None
        pull = x - visit.f + visit.u + gradient / self.training.beta
        moved = x - self.training.rate * pull
        return moved if self.proximal is None else self.proximal.learn(moved)

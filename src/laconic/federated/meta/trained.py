"""Result of meta-training."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode


@dataclass(frozen=True)
class Trained:
    """Meta-model and its cost.

    weights: float32 (n,), held by all agents at the end. agents: float32 (a, n), final models. up_nbytes,
    down_nbytes, flops: totals of all agents.
    """

    weights: Tensor
    agents: Tensor
    rounds: int
    up_nbytes: int
    down_nbytes: int
    flops: int


@dataclass
class Work:
    """Counter of floating-point operations in matrix products.

    The first step of each kind is measured; later ones count the same.
    """

    flops: int = 0
    _of: dict[str, int] = field(default_factory=dict)

    def do(self, kind: str, step: Callable[[], Tensor]) -> Tensor:
        if kind in self._of:
            self.flops += self._of[kind]
            return step()
        with FlopCounterMode(display=False) as counter:
            made = step()
        self._of[kind] = counter.get_total_flops()
        self.flops += self._of[kind]
        return made

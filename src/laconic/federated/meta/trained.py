"""Result of meta-training: the meta-model, and its cost in flops and bytes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode


@dataclass(frozen=True)
class Trained:
    """Meta-model and its cost.

    weights: float32 (n,), held by all agents at the end. agents: float32 (a, n), each agent's final model.
    up_nbytes, down_nbytes: total encoded bytes of all agents. flops: total of all agents.
    """

    weights: Tensor
    agents: Tensor
    rounds: int
    up_nbytes: int
    down_nbytes: int
    flops: int


@dataclass
class Work:
    """Counter of floating-point operations in matrix products, as PyTorch counts them.

    Each kind of step is counted once, in its first run; later runs add the same count, as the batches of one
    kind have one shape.
    """

    flops: int = 0
    _of: dict[str, int] = field(default_factory=dict)

    def do(self, kind: str, step: Callable[[], Tensor]) -> Tensor:
        """Run `step` and add its cost."""
        if kind in self._of:
            self.flops += self._of[kind]
            return step()
        with FlopCounterMode(display=False) as counter:
            made = step()
        self._of[kind] = counter.get_total_flops()
        self.flops += self._of[kind]
        return made

"""What a meta-training leaves: the meta-model, and what it cost in flops and bytes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode


@dataclass(frozen=True)
class Trained:
    """A meta-model and its price.

    weights: float32 (n,), what agents hold at the end. agents: float32 (a, n), where each agent stands.
    up_nbytes, down_nbytes: of all agents' messages together, as encoded. flops: of all agents together.
    """

    weights: Tensor
    agents: Tensor
    rounds: int
    up_nbytes: int
    down_nbytes: int
    flops: int


@dataclass
class Work:
    """Counts floating-point operations: those of matrix products, as PyTorch's counter sees them.

    Every kind of step is counted as it runs for the first time, and again by as much whenever it runs: the
    batches of one kind have one shape.
    """

    flops: int = 0
    _of: dict[str, int] = field(default_factory=dict)

    def do(self, kind: str, step: Callable[[], Tensor]) -> Tensor:
        """Run `step` and add what it costs."""
        if kind in self._of:
            self.flops += self._of[kind]
            return step()
        with FlopCounterMode(display=False) as counter:
            made = step()
        self._of[kind] = counter.get_total_flops()
        self.flops += self._of[kind]
        return made

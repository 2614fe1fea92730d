"""Mean of models trained locally from a common one: FedAvg and Reptile.

    every round:  w_i = local training from P;  P += step * mean of C(w_i - P)

step = 1 is FedAvg (McMahan et al. 2017, arXiv:1602.05629); a smaller step is Reptile (Nichol et al. 2018,
arXiv:1803.02999), here with the optimiser of `local`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from laconic.core import arguments
from laconic.federated.meta.exchange import Exchange
from laconic.federated.meta.learner import Learner
from laconic.federated.meta.local import Local
from laconic.federated.meta.tasks import Tasks
from laconic.federated.meta.trained import Trained, Work


@dataclass(frozen=True)
class Averaging:
    """Rounds of local training and a step towards the mean.

    Wire: per round and agent, one message of `up` (with error feedback if biased) and one of `down`.
    """

    rounds: int = 1
    step: float = 1.0
    local: Local = field(default_factory=Local)
    up: Any = "dense()"
    down: Any = "dense()"

    def __post_init__(self) -> None:
        arguments.whole("rounds", self.rounds, 1)
        arguments.number("step", self.step, above=0, most=1)

    def train(self, learner: Learner, tasks: Tasks, first: Tensor, seed: int = 0) -> Trained:
        """Train from common weights, float32 (n,)."""
        work = Work()
        exchange = Exchange(learner.network.layout, first, tasks.count, self.up, self.down, seed)
        model = first
        for k in range(self.rounds):
            start = exchange.public.repeat(tasks.count, 1)
            moved = self.local.train(learner, tasks, start, work, begin=k * self.local.steps) - start
            model = model + self.step * exchange.updates(moved, k).mean(dim=0)
            exchange.answer(model, k)
        agents = exchange.public.repeat(tasks.count, 1)
        return Trained(
            exchange.public, agents, self.rounds, exchange.up_nbytes, exchange.down_nbytes, work.flops
        )

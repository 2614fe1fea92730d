"""Sinusoid regression (Finn et al. 2017, arXiv:1703.03400): y = A sin(x - p), one (A, p) for each agent.

A is uniform in [0.1, 5], p in [0, pi], x in [-5, 5].
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from laconic.core import arguments
from laconic.core.turn import mix
from laconic.federated.meta.tasks import Batch

AMPLITUDES, PHASES, REACH = (0.1, 5.0), (0.0, math.pi), 5.0


@dataclass(frozen=True)
class Sinusoids:
    """Sinusoids of `count` agents, drawn from `seed`.

    fresh: new agents in every step, as in MAML.
    """

    count: int
    seed: int = 0
    fresh: bool = False

    def __post_init__(self) -> None:
        arguments.whole("count", self.count, 1, hint="a meta-model needs agents")

    def batch(self, step: int, size: int) -> Batch:
        arguments.whole("size", size, 1)
        amplitudes, phases = self.waves(step)
        rng = torch.Generator("cpu").manual_seed(mix(self.seed, step, 2))
        x = REACH * (
            2 * torch.rand(self.count, size, 1, generator=rng, dtype=torch.float32, device="cpu") - 1
        )
        return x, amplitudes * torch.sin(x - phases)

    def episode(self, step: int, shots: int, queries: int) -> tuple[Batch, Batch]:
        arguments.whole("shots", shots, 1)
        arguments.whole("queries", queries, 1)
        x, y = self.batch(step, shots + queries)
        return (x[:, :shots], y[:, :shots]), (x[:, shots:], y[:, shots:])

    def waves(self, step: int = 0) -> tuple[Tensor, Tensor]:
        """Return a step's amplitudes and phases, float32 (a, 1, 1) each."""
        rng = torch.Generator("cpu").manual_seed(mix(self.seed, step if self.fresh else 0, 1))
        drawn = torch.rand(2, self.count, 1, 1, generator=rng, dtype=torch.float32, device="cpu")
        low, high = AMPLITUDES
        return low + (high - low) * drawn[0], PHASES[0] + (PHASES[1] - PHASES[0]) * drawn[1]

"""P-SGA: ascend from the agents' own models until they agree (GLOBECOM 2021, arXiv:2105.14772).

    theta_i = agent i's own model
    for k = 0..K-1:
        v_i = theta_i + eta clip(grad f_i(theta_i))       each agent undoes steps of descent; send v_i
        c = mean of v_i                                   the server; send c and r_k
        theta_i = projection of v_i on ball(c, r_k)       r_k = r (1 - (k + 1) / K)^power, 0 at the last
    meta-model = c

A reconstruction from the abstract: projected stochastic gradient ascent from local models, without a Hessian
or a double loop. The projection set, its radius, the clipping, the server and all step sizes are ours.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from laconic.core import arguments
from laconic.federated.meta.exchange import Exchange
from laconic.federated.meta.learner import Learner, clipped
from laconic.federated.meta.local import Local
from laconic.federated.meta.tasks import Tasks
from laconic.federated.meta.trained import Trained, Work


@dataclass(frozen=True)
class PSGA:
    """Projected stochastic gradient ascent, as reconstructed.

    Wire: per round and agent, one message of `up`, and one of `down` with the radius, float32.

    Args:
        rounds: K.
        eta: Step of the ascent.
        radius: r, in units of the largest distance of an agent from the first centre.
        power: Exponent of the radius; 1: linear.
        clip: Largest norm of a gradient, as the loss has no maximum.
        batch: Examples per step of ascent.
        up, down: Specs or codecs. Lossy ones encode the difference to the other side's copy.
        local: Local training before the ascent.

    Raises:
        SpecError: A number is out of range.
    """

    rounds: int = 50
    eta: float = 0.01
    radius: float = 1.0
    power: float = 1.0
    clip: float = 1.0
    batch: int = 10
    up: Any = "dense()"
    down: Any = "dense()"
    local: Local = field(default_factory=Local)

    def __post_init__(self) -> None:
        arguments.whole("rounds", self.rounds, 1, hint="K rounds of ascent")
        arguments.number("eta", self.eta, above=0, hint="descend with Averaging")
        arguments.number("radius", self.radius, above=0, hint="radius 0 allows no ascent")
        arguments.number("power", self.power, above=0)
        arguments.number("clip", self.clip, above=0)
        arguments.whole("batch", self.batch, 1)

    def train(self, learner: Learner, tasks: Tasks, first: Tensor, seed: int = 0) -> Trained:
        """Train from common weights, float32 (n,)."""
        work = Work()
        own = self.local.train(learner, tasks, first.repeat(tasks.count, 1), work)
        return self.climb(learner, tasks, first, own, work, seed)

    def climb(
        self, learner: Learner, tasks: Tasks, first: Tensor, own: Tensor, work: Work, seed: int = 0
    ) -> Trained:
        """Train from agents' models, float32 (a, n), which cost `work`."""
        exchange = Exchange(learner.network.layout, first, tasks.count, self.up, self.down, seed)
        agents, unit = own, 0.0
        for k in range(self.rounds):
            x, y = tasks.batch(self.local.steps + k, self.batch)
            uphill = work.do("ascent", lambda w=agents, x=x, y=y: learner.gradients(w, x, y))  # type: ignore[misc]
            agents = agents + self.eta * clipped(uphill, self.clip)
            known = exchange.states(agents, k)
            centre = known.mean(dim=0)
            if k == 0:
                unit = float((known - centre).norm(dim=1).max())
            reach = exchange.answer(centre, k, unit * self.share(k))
            agents = projected(agents, exchange.public, reach)
        return Trained(
            exchange.public, agents, self.rounds, exchange.up_nbytes, exchange.down_nbytes, work.flops
        )

    def share(self, k: int) -> float:
        return float(self.radius * (1 - (k + 1) / self.rounds) ** self.power)


def projected(points: Tensor, centre: Tensor, radius: float) -> Tensor:
    """Project points (a, n) onto the ball around the centre (n,).

    >>> projected(torch.tensor([[3.0, 4.0], [0.5, 0.0]]), torch.zeros(2), 1.0)
    tensor([[0.6000, 0.8000],
            [0.5000, 0.0000]])
    """
    away = points - centre
    norms = away.norm(dim=1, keepdim=True)
    inside = centre + away * (radius / norms.clamp(min=torch.finfo(norms.dtype).tiny))
    stays = norms <= (radius if radius > 0 else -1.0)  # a norm is 0 if its squares underflow
    return torch.where(stays, points, inside)

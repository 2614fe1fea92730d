"""0/1 Adam: Adam whose variance is learnt ever more rarely, and whose ranks meet ever more rarely.

Lu et al. 2022, arXiv:2202.06009 [recalled]. While v is being learnt every step is a round; then ranks take
steps of their own and, at a round, agree on the mean momentum of the steps since the last one.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import astuple, dataclass
from typing import ClassVar

import torch
from torch import Tensor
from torch.optim import Optimizer

from laconic.core.errors import StateError
from laconic.core.layout import Layout
from laconic.feedback.memory import Memory
from laconic.optim.adam_tensors import AdamTensors, check_adam, make_adam
from laconic.optim.inner import mean_of, split
from laconic.optim.rounds import Rounds
from laconic.strategies.exchange import Exchange
from laconic.strategies.method import Method
from laconic.strategies.rule import BoundRule, OptimiserView, Rule, Site


@dataclass(frozen=True)
class LocalAdam(Rule):
    """With c_t = lr / (1 - b1^t) and D = sqrt(vhat) + eps, on rank i:

        m_i = b1 * m_i + (1 - b1) * g_i       w_i = w_i - c_t * m_i / D       u_i = u_i + c_t * m_i

    and at a round, with C the sum of c_t and w_0 the weights at the round before:

        m = mean of u_i / C by `exchange`     w = w_0 - C * m / D             u_i = 0

    The paper sends u; u / C is the same where the rate does not change, and one rank's residual then never
    outweighs the momentum after the rate has fallen. No m / D exceeds the bound that Adam's has. At a step
    that learns v, the gradients' mean comes by `dense`, and m and v are Adam's.
    """

    rounds: Rounds
    exchange: Method
    dense: Method

    meets_in_step: ClassVar[bool] = True

    @property
    def wants(self) -> str:
        return "torch.optim.Adam or AdamW"

    def check(self, optimiser: Optimizer, missing: Collection[str]) -> None:
        check_adam(optimiser)

    def make(self, parameters: list[Tensor], *, lr: float | None, weight_decay: float) -> Optimizer:
        return make_adam(parameters, lr, weight_decay)

    def bind(self, layout: Layout, view: OptimiserView, site: Site) -> BoundRule:
        return _Local(self, layout, view, site)


@dataclass
class Since:
    """What one tensor has gone through since the last round."""

    span: float = 0.0  # C, the sum of c_t
    shrink: float = 1.0  # product of AdamW's decay
    learnt: float = 0.0  # times that v was learnt, since the start


class _Local(BoundRule):
    def __init__(self, spec: LocalAdam, layout: Layout, view: OptimiserView, site: Site) -> None:
        self._rounds = spec.rounds
        self._adam = AdamTensors(layout, view)
        self._layout = self._adam.layout
        self._exchange = Exchange(spec.exchange, self._layout, site.comm, view, site.seed, site.seconds)
        self._dense = Exchange(spec.dense, self._layout, site.comm, view, site.seed, site.seconds)
        self._moved = Memory("moved", self._layout)  # u
        self._anchor = Memory("anchor", self._layout)  # w_0
        self._since = {name: Since() for name in self._layout.names}

    def step_(self, step: int) -> Iterable[str]:
        gradients = [self._adam.gradient(name) for name in self._layout.names]
        learns = self._rounds.learns(step)
        if learns:
            mean = mean_of(gradients, self._dense, step)
            gradients = self._layout.segments.views(mean)
        moved = self._moved.flat(self._layout, gradients[0].device)
        for name, g, u in zip(self._layout.names, gradients, self._layout.segments.views(moved), strict=True):
            if learns:
                self._adam.learn_variance(name, g)
                self._since[name].learnt += 1
            self._move_(name, g, u)
        if self._rounds.meets(step):
            anchor = self._anchor.flat(self._layout, moved.device)
            if not learns:  # else all ranks have moved alike
                self._meet_(moved, anchor, step)
            self._part_(moved, anchor)
        return self._layout.names

    def _part_(self, moved: Tensor, anchor: Tensor) -> None:
        """From here every rank goes its own way."""
        moved.zero_()
        for name, start in zip(self._layout.names, self._layout.segments.views(anchor), strict=True):
            start.copy_(self._adam.weights(name))
            self._since[name] = Since(learnt=self._since[name].learnt)

    def _move_(self, name: str, g: Tensor, u: Tensor) -> None:
        """One step of this rank's own."""
        adam, since, b1 = self._adam, self._since[name], float(self._adam.settings(name)["betas"][0])
        state = adam.state(name)
        state["step"] += 1
        m = torch.lerp(g, adam.momentum(name), b1)
        adam.keep(name, m)
        c = float(adam.settings(name)["lr"]) / (1 - b1 ** float(state["step"]))
        u.add_(m, alpha=c)
        since.span += c
        since.shrink *= adam.shrink(name)
        move = adam.direction(name, m, since.learnt)
        adam.take(name, adam.weights(name).mul_(adam.shrink(name)).sub_(move, alpha=c))

    def _meet_(self, moved: Tensor, anchor: Tensor, step: int) -> None:
        """All ranks back to one place: where the mean momentum leads from the last round's."""
        names, segments, adam = self._layout.names, self._layout.segments, self._adam
        own = [
            u / self._since[name].span if self._since[name].span else adam.momentum(name)
            for name, u in zip(names, segments.views(moved), strict=True)
        ]
        mean = segments.views(mean_of(own, self._exchange, step))
        for name, m, start in zip(names, mean, segments.views(anchor), strict=True):
            since = self._since[name]
            adam.keep(name, m)
            move = adam.direction(name, m, since.learnt)
            adam.take(name, (start * since.shrink).sub_(move, alpha=since.span))

    def state_dict(self) -> dict[str, Tensor]:
        since = {
            f"since/{name}": torch.tensor(astuple(past), dtype=torch.float64)
            for name, past in self._since.items()
        }
        memories = self._moved.state_dict() | self._anchor.state_dict()
        return self._exchange.state_dict() | memories | since

    def check_state(self, state: Mapping[str, Tensor]) -> None:
        since, rest = split(state, "since/")
        own, memories = split(rest, "route", keep=True)
        for name in self._layout.names:
            if name not in since or since[name].shape != (3,):
                raise StateError(f"the saved state has no since/{name}: it is of another model or method")
        self._moved.check(memories)
        self._anchor.check(memories)
        self._exchange.check_state(own)

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        self.check_state(state)
        since, rest = split(state, "since/")
        own, memories = split(rest, "route", keep=True)
        self._exchange.load_state_dict(own, step=0)
        self._moved.load_state_dict(memories)
        self._anchor.load_state_dict(memories)
        self._since = {name: Since(*since[name].tolist()) for name in self._layout.names}

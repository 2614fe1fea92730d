"""0/1 Adam: Adam whose variance is learnt ever more rarely, and whose ranks meet ever more rarely.

Lu et al. 2022, arXiv:2202.06009 [recalled]. While v is being learnt every step is a round; then ranks take
steps of their own and, at a round, agree on the mean momentum of the steps since the last one.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import astuple, dataclass

import torch
from torch import Tensor

from laconic.core.codec import Codec
from laconic.core.errors import StateError
from laconic.core.layout import Layout
from laconic.optim.adam_rule import AdamRule
from laconic.optim.adam_tensors import AdamTensors
from laconic.optim.inner import Inner, both_ways, under, without
from laconic.optim.rounds import Rounds
from laconic.reducers.sum import Sum
from laconic.strategies.method import Route, everything, routes
from laconic.strategies.rule import BoundRule, OptimiserView, Site


@dataclass(frozen=True)
class LocalAdam(AdamRule):
    """With c_t = lr / (1 - b1^t) and D = sqrt(vhat) + eps, on rank i:

        m_i = b1 * m_i + (1 - b1) * g_i       w_i = w_i - c_t * m_i / D       u_i = u_i + c_t * m_i

    and at a round, with C the sum of c_t and w_0 the weights at the round before:

        m = mean of u_i / C by `what`         w = w_0 - C * m / D             u_i = 0

    The paper sends u; u / C is the same where the rate does not change, and one rank's residual then never
    outweighs the momentum after the rate has fallen. No m / D exceeds the bound that Adam's has. At a step
    that learns v, the gradients' exact mean goes into m and v, as Adam's.
    """

    rounds: Rounds
    what: Codec

    @property
    def warm_at(self) -> int:
        return self.rounds.freeze_steps

    def bind(self, layout: Layout, view: OptimiserView, site: Site) -> BoundRule:
        return _Local(self, layout, view, site)


@dataclass
class Since:
    """What one tensor has gone through since the last round."""

    steps: float = 0.0
    span: float = 0.0  # C, the sum of c_t
    shrink: float = 1.0  # product of AdamW's decay
    learnt: float = 0.0  # times that v was learnt, since the start


KINDS = ("taken", "since/", "moved/", "anchor/")


class _Local(BoundRule):
    def __init__(self, spec: LocalAdam, layout: Layout, view: OptimiserView, site: Site) -> None:
        self._rounds = spec.rounds
        self._adam = adam = AdamTensors(layout, view)
        self._inner = Inner(both_ways(spec.what), adam.layout, view, site)
        self._dense = Inner(routes(Route(everything, Sum())), adam.layout, view, site)
        self._taken = -1  # steps of the optimiser so far, as rounds count them; from the first on
        self._moved = {name: torch.zeros_like(adam.weights(name)) for name in adam.layout.names}  # u
        self._anchor = {name: adam.weights(name) for name in adam.layout.names}  # w_0
        self._since: dict[str, Since] = {}

    def step_(self, step: int) -> Iterable[str]:
        adam = self._adam
        if self._taken < 0:
            self._taken = step
            self._since = {name: Since(learnt=adam.steps(name)) for name in adam.layout.names}
            self._anchor = {name: adam.weights(name) for name in adam.layout.names}
        gradients = {name: adam.gradient(name) for name in adam.present()}
        learns = self._rounds.learns(self._taken)
        if learns:
            gradients = self._dense.mean(gradients, self._taken)
        for name, g in gradients.items():
            if learns:
                adam.learn_variance(name, g)
                self._since[name].learnt += 1
            self._move_(name, g)
        if learns:  # all ranks have moved alike
            self._part_(gradients)
        elif self._rounds.meets(self._taken):
            self._meet_()
        self._taken += 1
        return gradients.keys()

    def _move_(self, name: str, g: Tensor) -> None:
        """One step of this rank's own."""
        adam, since = self._adam, self._since[name]
        m = adam.momentum_with(name, g)
        adam.keep(name, m)
        adam.count(name)
        c = adam.rate(name)
        self._moved[name].add_(m, alpha=c)
        since.steps += 1
        since.span += c
        since.shrink *= adam.shrink(name)
        move = adam.direction(name, m, since.learnt)
        adam.take(name, adam.weights(name).mul_(adam.shrink(name)).sub_(move, alpha=c))

    def _meet_(self) -> None:
        """All ranks back to one place: where the mean momentum leads from the last round's."""
        adam = self._adam
        own = {
            name: self._moved[name] / since.span if since.span else adam.momentum(name)
            for name, since in self._since.items()
            if since.steps
        }
        for name, m in self._inner.mean(own, self._taken).items():
            since = self._since[name]
            adam.keep(name, m)
            move = adam.direction(name, m, since.learnt)
            adam.take(name, (self._anchor[name] * since.shrink).sub_(move, alpha=since.span))
        self._part_(own)

    def _part_(self, names: Iterable[str]) -> None:
        """From here every rank goes its own way."""
        for name in names:
            self._moved[name].zero_()
            self._anchor[name] = self._adam.weights(name)
            self._since[name] = Since(learnt=self._since[name].learnt)

    def close(self) -> None:
        if any(since.steps for since in self._since.values()):
            self._meet_()

    def state_dict(self) -> dict[str, Tensor]:
        return {
            "taken": torch.tensor(self._taken, dtype=torch.float64),
            **{f"since/{name}": _numbers(self._since.get(name, Since())) for name in self._moved},
            **{f"moved/{name}": value.clone() for name, value in self._moved.items()},
            **{f"anchor/{name}": value.clone() for name, value in self._anchor.items()},
            **self._inner.exchange.state_dict(),
        }

    def check_state(self, state: Mapping[str, Tensor]) -> None:
        own = {key: value.shape for key, value in self.state_dict().items() if key.startswith(KINDS)}
        for key in own:
            if key not in state or state[key].shape != own[key]:
                raise StateError(f"the saved state has no {key} of this shape: it is of another model")
        self._inner.exchange.check_state(without(KINDS, state))

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        self.check_state(state)
        self._inner.exchange.load_state_dict(without(KINDS, state), step=0)
        self._taken = int(state["taken"])
        self._since = {name: Since(*value.tolist()) for name, value in under("since/", state).items()}
        for own, saved in ((self._moved, under("moved/", state)), (self._anchor, under("anchor/", state))):
            for name, value in saved.items():
                own[name] = value.to(own[name].device, torch.float32).clone()


def _numbers(since: Since) -> Tensor:
    return torch.tensor(astuple(since), dtype=torch.float64)

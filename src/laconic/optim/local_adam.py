"""0/1 Adam: Adam that learns its variance, and communicates, at growing intervals.

Lu et al. 2022, arXiv:2202.06009 [recalled]. Once v is frozen, ranks step locally and, at a round, average the
momentum since the last one.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import astuple, dataclass
from typing import ClassVar

import torch
from torch import Tensor

from laconic.core.codec import Codec
from laconic.core.errors import StateError
from laconic.core.inference import outside_inference_mode
from laconic.core.layout import Layout
from laconic.exchange.method import Route, everything, routes
from laconic.exchange.rule import BoundRule, OptimiserView, RuleContext
from laconic.exchange.state import under, without
from laconic.optim.adam_rule import AdamRule
from laconic.optim.adam_tensors import AdamTensors
from laconic.optim.inner import Inner, both_ways
from laconic.optim.rounds import Rounds
from laconic.reducers.sum import Sum


@dataclass(frozen=True)
class LocalAdam(AdamRule):
    """Adam with local steps. With c_t = lr / (1 - b1^t) and D = sqrt(vhat) + eps, on rank i:

        m_i = b1 * m_i + (1 - b1) * g_i       w_i = w_i - c_t * m_i / D       u_i = u_i + c_t * m_i

    and at a round, with C the sum of c_t and w_0 the weights at the round before:

        m = mean of u_i / C by `codec`         w = w_0 - C * m / D             u_i = 0

    The paper sends u. u / C is the same at a constant rate; at a falling rate, its residual does not outweigh
    the momentum. A step that learns v uses the exact mean of the gradients.
    """

    rounds: Rounds
    codec: Codec

    keeps_equal: ClassVar[bool] = False

    @property
    def warm_at(self) -> int:
        return self.rounds.freeze_steps

    def bind(self, layout: Layout, view: OptimiserView, context: RuleContext) -> BoundRule:
        return _BoundLocalAdam(self, layout, view, context)


@dataclass
class SinceRound:
    """Local steps of a tensor since the last round."""

    steps: float = 0.0
    span: float = 0.0  # C, the sum of c_t
    shrink: float = 1.0  # product of AdamW's decay
    learnt: float = 0.0  # updates of v in all


KINDS = ("steps", "since/", "moved/", "anchor/")


@outside_inference_mode("close", "state_dict", "load_state_dict")
class _BoundLocalAdam(BoundRule):
    def __init__(self, spec: LocalAdam, layout: Layout, view: OptimiserView, context: RuleContext) -> None:
        self._rounds = spec.rounds
        self._adam = adam = AdamTensors(layout, view)
        self._inner = Inner(both_ways(spec.codec), adam.layout, context)
        self._dense = Inner(routes(Route(everything, Sum())), adam.layout, context)
        self._steps = -1  # -1 before the first
        self._moved = {name: torch.zeros_like(adam.weights(name)) for name in adam.layout.names}  # u
        self._anchor = {name: adam.weights(name) for name in adam.layout.names}  # w_0
        self._since: dict[str, SinceRound] = {}

    def step_(self, step: int) -> Iterable[str]:
        adam = self._adam
        if self._steps < 0:
            self._steps = step
            self._since = {name: SinceRound(learnt=adam.steps(name)) for name in adam.layout.names}
            self._anchor = {name: adam.weights(name) for name in adam.layout.names}
        gradients = adam.gradients()
        learns = self._rounds.learns(self._steps)
        if learns:
            gradients = self._dense.mean(gradients, self._steps)
        if learns:
            for name, g in gradients.items():
                adam.learn_variance(name, g)
                self._since[name].learnt += 1
        self._move_(gradients)
        if learns:  # all ranks have made the same step
            self._start_round_(gradients)
        elif self._rounds.meets(self._steps):
            self._meet_()
        self._steps += 1
        return gradients.keys()

    def _move_(self, gradients: Mapping[str, Tensor]) -> None:
        adam = self._adam
        momenta = adam.momenta_with(gradients)
        adam.set_momenta(momenta)
        adam.count_steps(momenta)
        for name, m in momenta.items():
            since, c = self._since[name], adam.rate(name)
            self._moved[name].add_(m, alpha=c)
            since.steps += 1
            since.span += c
            since.shrink *= adam.decay_factor(name)
        adam.move_(momenta, {name: self._since[name].learnt for name in momenta})

    def _meet_(self) -> None:
        adam = self._adam
        own = {
            name: self._moved[name] / since.span if since.span else adam.momentum(name)
            for name, since in self._since.items()
            if since.steps
        }
        for name, m in self._inner.mean(own, self._steps).items():
            since = self._since[name]
            adam.set_momentum(name, m)
            move = adam.direction(name, m, since.learnt)
            adam.set_weights(name, (self._anchor[name] * since.shrink).sub_(move, alpha=since.span))
        self._start_round_(own)

    def _start_round_(self, names: Iterable[str]) -> None:
        for name in names:
            self._moved[name].zero_()
            self._anchor[name] = self._adam.weights(name)
            self._since[name] = SinceRound(learnt=self._since[name].learnt)

    def close(self) -> None:
        if any(since.steps for since in self._since.values()):
            self._meet_()

    def follow(self, root: int) -> None:
        self._adam.follow(self._inner.exchange.comm, root)
        self._anchor = {name: self._adam.weights(name) for name in self._anchor}

    def state_dict(self) -> dict[str, Tensor]:
        return {
            "steps": torch.tensor(self._steps, dtype=torch.float64, device="cpu"),
            **{f"since/{name}": _numbers(self._since.get(name, SinceRound())) for name in self._moved},
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
        self._steps = int(state["steps"])
        self._since = {name: SinceRound(*value.tolist()) for name, value in under("since/", state).items()}
        for own, saved in ((self._moved, under("moved/", state)), (self._anchor, under("anchor/", state))):
            for name, value in saved.items():
                own[name] = value.to(own[name].device, torch.float32).clone()


def _numbers(since: SinceRound) -> Tensor:
    return torch.tensor(astuple(since), dtype=torch.float64, device="cpu")

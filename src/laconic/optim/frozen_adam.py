"""Adam whose second moment is learnt in a warm-up and then frozen, so that its momentum can be compressed.

Tang et al. 2021, arXiv:2102.02888 (1-bit Adam) [recalled]. Adam's update is not linear in the gradients, so
compressing them breaks it. With v frozen it is linear in the momentum, and error feedback is exact again.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from laconic.core.errors import StateError
from laconic.core.inference import outside_inference_mode
from laconic.core.layout import Layout
from laconic.exchange.method import Method, Route, everything, routes
from laconic.exchange.no_optimiser import NoOptimiser
from laconic.exchange.rule import BoundRule, OptimiserView, Site
from laconic.exchange.state import under, without
from laconic.optim.adam_rule import AdamRule
from laconic.optim.adam_tensors import AdamTensors
from laconic.optim.inner import Inner
from laconic.optim.settled_variance import CHECKS, SettledVariance
from laconic.reducers.sum import Sum

log = logging.getLogger("laconic")
USUAL = 1000  # Delta of Adam's default betas, in steps
SETTLED, FROZEN, VELOCITY = "settled", "frozen/", "/velocity/"


@dataclass(frozen=True)
class FrozenAdam(AdamRule):
    """From step `warmup_steps` on, `inner` sends the momentum inside `optimizer.step()`.

    Where `inner` applies momentum before the exchange, on each rank, it gets (1 - b1) * g / D, with D =
    sqrt(vhat) + eps, and its mean moves the weights; elsewhere it gets the momentum.

    Args:
        warmup_steps: Steps of the warm-up, which the route's reducer averages. None: the warm-up ends once v
            has settled, and its gradients are averaged inside `optimizer.step()`.
        inner: The exchange after the warm-up.
    """

    warmup_steps: int | None
    inner: Method

    @property
    def warm_at(self) -> int:
        return USUAL if self.warmup_steps is None else self.warmup_steps

    def bind(self, layout: Layout, view: OptimiserView, site: Site) -> BoundRule:
        return _BoundFrozenAdam(self, layout, view, site)


class _Momentum(NoOptimiser):
    """Adam's momentum over D, for a feedback that applies it before the exchange."""

    def __init__(self, adam: AdamTensors, updates: Mapping[str, float]) -> None:
        super().__init__()
        self._adam, self._updates = adam, updates

    def settings(self, name: str) -> Mapping[str, Any]:
        return {"momentum": self._adam.b1(name)}

    def momentum_buffer(self, name: str) -> Tensor | None:
        return self._adam.directions({name: self._adam.momentum(name)}, self._updates)[name]

    def why_in_optimizer(self, name: str) -> str | None:
        return None


@outside_inference_mode("close", "state_dict", "load_state_dict")
class _BoundFrozenAdam(BoundRule):
    def __init__(self, spec: FrozenAdam, layout: Layout, view: OptimiserView, site: Site) -> None:
        self._spec = spec
        self._comm = site.comm
        self._adam = adam = AdamTensors(layout, view)
        self._updates: dict[str, float] = {}  # Adam's steps before v was frozen, by tensor
        self._settled = SettledVariance()
        self._inner = Inner(spec.inner, adam.layout, site, _Momentum(adam, self._updates))
        self._dense = Inner(routes(Route(everything, Sum())), adam.layout, site)

    def step_(self, step: int) -> Iterable[str]:
        adam, spec = self._adam, self._spec
        if not self._updates:
            if spec.warmup_steps is None and not self._has_settled():
                adam.set_own_gradients(self._dense.mean(adam.own_gradients(), step))
                return ()
            if spec.warmup_steps is not None and step < spec.warmup_steps:
                return ()
            self._updates.update((name, adam.steps(name)) for name in adam.layout.names)
        gradients = adam.gradients()
        local = {name: g for name, g in gradients.items() if self._inner.exchange.momentum.is_local(name)}
        momenta = adam.momenta_with({name: g for name, g in gradients.items() if name not in local})
        shares = {name: g * (1 - adam.b1(name)) for name, g in local.items()}
        means = self._inner.mean(momenta | adam.directions(shares, self._updates), step)
        adam.count_steps(means)
        shared = {name: means[name] for name in momenta}
        adam.set_momenta(shared)
        adam.move_(means | adam.directions(shared, self._updates))
        return gradients.keys()

    def _has_settled(self) -> bool:
        adam = self._adam
        names = [name for name in adam.layout.names if adam.steps(name)]
        if not names:
            return False
        span = max(1 / (1 - adam.b2(name)) for name in names)
        every = max(1, round(span / CHECKS))
        if not self._settled.is_due(max(map(adam.steps, names)), every):
            return False
        norm = torch.stack([adam.variance_norm(name) for name in names]).sum()
        rate = max(float(adam.settings(name)["lr"]) for name in names)
        # The sum over ranks, so that all of them decide alike.
        total = float(self._comm.all_reduce(norm.reshape(1)))
        settled = self._settled.add(total, rate, round(span / every))
        if settled and self._comm.rank == 0:
            log.info("Adam's variance has settled and is frozen: from now on %s", self._spec.inner)
        return settled

    def close(self) -> None:
        """Give Adam the mean of the momenta that ranks apply before the exchange."""
        if not self._updates:
            return
        state = self._inner.exchange.state_dict()
        held = {key.split(VELOCITY)[1]: value.flatten() for key, value in state.items() if VELOCITY in key}
        if held:
            means = self._dense.mean(held, self._dense.exchange.step)
            scales = {name: self._adam.scale(name, self._updates[name]) for name in means}
            self._adam.set_momenta({name: mean * scales[name] for name, mean in means.items()})

    def follow(self, root: int) -> None:
        self._adam.follow(self._inner.exchange.comm, root)

    def state_dict(self) -> dict[str, Tensor]:
        frozen = {
            f"{FROZEN}{name}": torch.tensor(count, dtype=torch.float32, device="cpu")
            for name, count in self._updates.items()
        }
        watched = {} if self._spec.warmup_steps is not None else {SETTLED: self._settled.state}
        numbers = {
            key: torch.tensor(state, dtype=torch.float64, device="cpu") for key, state in watched.items()
        }
        return {**self._inner.exchange.state_dict(), **frozen, **numbers}

    def check_state(self, state: Mapping[str, Tensor]) -> None:
        frozen = under(FROZEN, state)
        if frozen and frozen.keys() != set(self._adam.layout.names):
            raise StateError("the saved state has frozen variances of other tensors: it is of another model")
        self._inner.exchange.check_state(without((FROZEN, SETTLED), state))

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        self.check_state(state)
        self._inner.exchange.load_state_dict(without((FROZEN, SETTLED), state), step=0)
        self._updates.clear()
        self._updates.update((name, float(count)) for name, count in under(FROZEN, state).items())
        if SETTLED in state:
            self._settled = SettledVariance(state[SETTLED].tolist())

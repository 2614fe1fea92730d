"""Adam whose second moment is learnt in a warm-up and then frozen, to compress the momentum.

Tang et al. 2021, arXiv:2102.02888 (1-bit Adam; from memory, not checked against code). Adam's update is not
linear in the gradients, so error feedback fails; with v frozen it is linear in the momentum.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from laconic.core.errors import StateError
from laconic.core.inference import outside_inference_mode
from laconic.core.layout import Layout
from laconic.exchange.method import Method, Route, everything, routes
from laconic.exchange.rule import BoundRule, OptimiserView, RuleContext
from laconic.exchange.state import under, without
from laconic.optim.adam_rule import AdamRule
from laconic.optim.adam_tensors import AdamTensors
from laconic.optim.inner import Inner
from laconic.optim.settled_variance import CHECKS, SettledVariance
from laconic.reducers.sum import Sum

log = logging.getLogger("laconic")
EARLIEST = (CHECKS + 1) * (1000 // CHECKS)  # first step that can freeze v, with usual betas
SETTLED, FROZEN = "settled", "frozen/"
LATE = 1.5  # an unfinished warm-up is logged after this many times 1 / (1 - b2) steps


@dataclass(frozen=True)
class FrozenAdam(AdamRule):
    """Exchange of the momentum by `inner` inside `optimizer.step()`, after a warm-up.

    Args:
        warmup_steps: None: until v has settled, averaging gradients inside `optimizer.step()`.
        inner: The exchange after the warm-up.
        scaled: Send m / D, with D = sqrt(vhat) + eps: selects the entries that move the weights most.
    """

    warmup_steps: int | None
    inner: Method
    scaled: bool = False

    @property
    def warm_at(self) -> int:
        return EARLIEST if self.warmup_steps is None else self.warmup_steps

    def bind(self, layout: Layout, view: OptimiserView, context: RuleContext) -> BoundRule:
        return _BoundFrozenAdam(self, layout, view, context)


@outside_inference_mode("close", "state_dict", "load_state_dict")
class _BoundFrozenAdam(BoundRule):
    def __init__(self, spec: FrozenAdam, layout: Layout, view: OptimiserView, context: RuleContext) -> None:
        self._spec = spec
        self._comm = context.comm
        self._adam = adam = AdamTensors(layout, view)
        self._updates: dict[str, float] = {}  # Adam's steps before v was frozen
        self._settled = SettledVariance()
        self._is_late = False  # whether a long warm-up is logged
        self._inner = Inner(spec.inner, adam.layout, context)
        self._dense = Inner(routes(Route(everything, Sum())), adam.layout, context)

    def step_(self, step: int) -> Iterable[str]:
        adam, spec = self._adam, self._spec
        if not self._updates:
            if spec.warmup_steps is None and not self._has_settled():
                adam.set_own_gradients(self._dense.mean(adam.own_gradients(), step))
                return ()
            if spec.warmup_steps is not None and step < spec.warmup_steps:
                return ()
            self.end_warmup()
        momenta = adam.momenta_with(adam.gradients())
        if spec.scaled:
            means = self._inner.mean(adam.scaled(momenta, self._updates), step)
            means = adam.unscaled(means, self._updates)
        else:
            means = self._inner.mean(momenta, step)
        adam.count_steps(means)
        adam.set_momenta(means)
        adam.move_(means, self._updates)
        return momenta.keys()

    def end_warmup(self) -> None:
        self._updates = {name: self._adam.steps(name) for name in self._adam.layout.names}

    def _has_settled(self) -> bool:
        adam = self._adam
        names = [name for name in adam.layout.names if adam.steps(name)]
        if not names:
            return False
        span = max(1 / (1 - adam.b2(name)) for name in names)
        every = max(1, round(span / CHECKS))
        steps = max(map(adam.steps, names))
        if not self._settled.is_due(steps, every):
            return False
        norm = torch.stack([adam.variance_norm(name) for name in names]).sum()
        rate = max(float(adam.settings(name)["lr"]) for name in names)
        # all ranks decide the same
        total = float(self._comm.all_reduce(norm.reshape(1)))
        settled = self._settled.add(total, rate, round(span / every))
        if settled and self._comm.rank == 0:
            log.info("Adam's variance has settled and is frozen: from now on %s", self._spec.inner)
        elif steps >= LATE * span and not self._is_late and self._comm.rank == 0:
            self._is_late = True
            log.info(
                "Adam's variance has not settled after %d steps, so gradients are still averaged in full;"
                " warmup_steps= ends the warm-up at a fixed step",
                steps,
            )
        return settled

    def close(self) -> None:
        """Do nothing: replicas are equal."""

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
        self._updates = {name: float(count) for name, count in under(FROZEN, state).items()}
        self._settled = SettledVariance(state[SETTLED].tolist()) if SETTLED in state else SettledVariance()

"""Adam whose second moment is learnt in a warm-up and then frozen, so that its momentum can be compressed.

Tang et al. 2021, arXiv:2102.02888 (1-bit Adam) [recalled]. Adam's update is not linear in the gradients, so
compressing them breaks it. With v frozen it is linear in the momentum, and error feedback is exact again.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from laconic.core.codec import Codec
from laconic.core.errors import StateError
from laconic.core.inference import outside_inference_mode
from laconic.core.layout import Layout
from laconic.exchange.rule import BoundRule, OptimiserView, Site
from laconic.exchange.state import under, without
from laconic.optim.adam_rule import AdamRule
from laconic.optim.adam_tensors import AdamTensors
from laconic.optim.inner import Inner, both_ways


@dataclass(frozen=True)
class FrozenAdam(AdamRule):
    """From step `warmup_steps` on, `codec` sends the momentum inside `optimizer.step()`."""

    warmup_steps: int
    codec: Codec

    @property
    def warm_at(self) -> int:
        return self.warmup_steps

    def bind(self, layout: Layout, view: OptimiserView, site: Site) -> BoundRule:
        return _BoundFrozenAdam(self, layout, view, site)


@outside_inference_mode("close", "state_dict", "load_state_dict")
class _BoundFrozenAdam(BoundRule):
    def __init__(self, spec: FrozenAdam, layout: Layout, view: OptimiserView, site: Site) -> None:
        self._spec = spec
        self._adam = AdamTensors(layout, view)
        self._inner = Inner(both_ways(spec.codec), self._adam.layout, site)
        self._updates: dict[str, float] = {}  # Adam's steps before v was frozen, by tensor

    def step_(self, step: int) -> Iterable[str]:
        if step < self._spec.warmup_steps:
            return ()
        adam = self._adam
        if not self._updates:
            self._updates = {name: adam.steps(name) for name in adam.layout.names}
        momenta = adam.momenta_with(adam.gradients())
        means = self._inner.mean(momenta, step)
        adam.count_steps(means)
        adam.set_momenta(means)
        adam.move_(means, self._updates)
        return momenta.keys()

    def close(self) -> None:
        """Replicas are equal."""

    def follow(self, root: int) -> None:
        self._adam.follow(self._inner.exchange.comm, root)

    def state_dict(self) -> dict[str, Tensor]:
        frozen = {
            f"frozen/{name}": torch.tensor(count, dtype=torch.float32, device="cpu")
            for name, count in self._updates.items()
        }
        return {**self._inner.exchange.state_dict(), **frozen}

    def check_state(self, state: Mapping[str, Tensor]) -> None:
        frozen = under("frozen/", state)
        if frozen and frozen.keys() != set(self._adam.layout.names):
            raise StateError("the saved state has frozen variances of other tensors: it is of another model")
        self._inner.exchange.check_state(without(("frozen/",), state))

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        self.check_state(state)
        self._inner.exchange.load_state_dict(without(("frozen/",), state), step=0)
        self._updates = {name: float(count) for name, count in under("frozen/", state).items()}

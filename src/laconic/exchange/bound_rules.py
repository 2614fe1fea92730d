"""Rules of a method, bound to a model's optimisers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from torch import Tensor

from laconic.comm.joint_calls import Exchanging
from laconic.core.errors import AttachError
from laconic.core.layout import Layout
from laconic.core.mask import MaskWatch, cleared
from laconic.exchange.method import Method
from laconic.exchange.rule import BoundRule, OptimiserSide, OptimiserView, RuleContext
from laconic.exchange.state import under


class BoundRules:
    """Each rule, bound to every optimiser and the tensors that it may step."""

    def __init__(
        self,
        method: Method,
        layout: Layout,
        optimisers: OptimiserSide,
        context: RuleContext,
        parameters: Mapping[str, Tensor],
        exchanging: Exchanging,
    ) -> None:
        self._method = method
        self._optimisers = optimisers
        self._exchanging = exchanging
        self._masks = MaskWatch(parameters)
        self._bound: list[tuple[OptimiserView, BoundRule]] = []
        self._apart: list[BoundRule] = []  # replicas differ between rounds
        for view, own in optimisers.views(layout):
            for rule, part in method.governed(layout):
                bound = rule.bind(part.named(own.names), view, context)
                self._bound.append((view, bound))
                if not rule.keeps_equal:
                    self._apart.append(bound)

    def __iter__(self) -> Iterator[BoundRule]:
        return (rule for _, rule in self._bound)

    @property
    def keep_equal(self) -> bool:
        return not self._apart

    def step_(self, optimiser: OptimiserView, step: int) -> list[str]:
        updated: list[str] = []
        for view, rule in self._bound:
            if view is optimiser:
                with self._exchanging(f"optimizer.step() of step {step}"):
                    updated += rule.step_(step)
        return updated

    def finish(self) -> None:
        with self._optimisers.on_masters():
            for rule in self._apart:
                rule.close()

    def close(self) -> None:
        with self._optimisers.on_masters():
            for rule in self:
                rule.close()

    def state_dict(self) -> dict[str, Tensor]:
        states = enumerate(rule.state_dict() for rule in self)
        return {f"rule{i}/{key}": value for i, state in states for key, value in state.items()}

    def check_state(self, state: Mapping[str, Tensor]) -> None:
        for i, rule in enumerate(self):
            rule.check_state(under(f"rule{i}/", state))

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        for i, rule in enumerate(self):
            rule.load_state_dict(under(f"rule{i}/", state))

    def follow_masks(self) -> None:
        """Clear masked entries of the rules' state. Raises `AttachError` if a rule cannot follow masks."""
        masks = self._masks.changed()
        if self._masks.present and any(rule.exchanges_in_step for rule in self._method.rules):
            raise AttachError(
                f"{self._method} exchanges inside optimizer.step(), but sparse training needs gradients that"
                " are exchanged before it: use a different method, such as 'dgc(density=0.01)' or 'cgx()'"
            )
        if not masks:
            return
        for rule in self:
            state = cleared(rule.state_dict(), masks)
            if state is not None:
                rule.load_state_dict(state)

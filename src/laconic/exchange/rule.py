"""Rule: requirements of a method on the optimiser, and its updates in place of the optimiser's.

Tensors that a rule has updated are hidden from the optimiser for that step.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

from torch import Tensor
from torch.optim import Optimizer

from laconic.comm.metered import Metered
from laconic.core.errors import AttachError, StateError
from laconic.core.layout import Layout
from laconic.exchange.stopwatch import Seconds


class OptimiserView(Protocol):
    optimiser: Optimizer

    def settings(self, name: str) -> Mapping[str, Any]:
        """Return the present settings of this tensor's group."""

    def parameter(self, name: str) -> Tensor:
        """Return this parameter."""

    def holds(self, name: str) -> bool:
        """Return whether the optimiser has this tensor now."""

    def hand_over(self, names: Collection[str], decay: dict[str, Tensor], *, keep: bool) -> Collection[str]:
        """Let this step apply the gradients of these tensors without further momentum; return those stepped.

        Args:
            names: Tensors whose momentum was applied before the exchange.
            decay: Momentum of the weight decay by name, which is updated.
            keep: Whether the optimiser continues their momentum.
        """


class OptimiserSide(Protocol):
    def settings(self, name: str) -> Mapping[str, Any]:
        """Return the present settings of this tensor's group."""

    def momentum_buffer(self, name: str) -> Tensor | None:
        """Return SGD's momentum of this tensor, or None."""

    def continues_momentum(self, name: str) -> bool:
        """Return whether SGD can continue a momentum from elsewhere."""

    def set_momentum_buffer(self, name: str, value: Tensor) -> None:
        """Set SGD's momentum buffer to flat `value` (n,)."""

    def why_in_optimizer(self, name: str) -> str | None:
        """Return why momentum stays in the optimiser, "" without momentum; None if it need not."""

    def held(self, name: str) -> bool:
        """Return whether an optimiser has this tensor now."""

    def views(self, layout: Layout) -> Iterable[tuple[OptimiserView, Layout]]:
        """Return each optimiser with the tensors that it may step."""

    def before_steps(self, act: Callable[[OptimiserView], Iterable[str]]) -> None:
        """Call `act` before each step, which skips the tensors that it returns."""

    def on_masters(self) -> AbstractContextManager[None]:
        """Return a context in which master weights replace their parameters."""


class Observer(Protocol):
    def before_step(self, optimiser: OptimiserView, step: int) -> None:
        """Act before this optimiser's step; an error forbids it."""


@dataclass(frozen=True)
class RuleContext:
    comm: Metered
    seed: int
    seconds: Seconds


class Rule(ABC):
    """Configuration of a rule, a frozen dataclass. `bind` returns the working object.

    `exchanges_in_step`: whether every rank must call `optimizer.step()`, which exchanges.
    `keeps_equal`: whether replicas are equal after every step, not only after `close`.
    """

    exchanges_in_step: ClassVar[bool] = False
    keeps_equal: ClassVar[bool] = True

    @property
    def warm_at(self) -> int:
        return 0

    @property
    @abstractmethod
    def wants(self) -> str:
        """Required optimiser."""

    @abstractmethod
    def check(self, optimiser: Optimizer, missing: Collection[str]) -> None:
        """Raise `AttachError` for an unsuitable optimiser. `missing`: trained tensors not in it."""

    def steps(self, settings: Mapping[str, Any]) -> bool:
        """Return whether it suits tensors with these settings."""
        return True

    def make(self, parameters: list[Tensor], *, lr: float | None, weight_decay: float) -> Optimizer | None:
        """Return a suitable optimiser, with `lr` or a usual rate; None if plain SGD is suitable."""
        return None

    @abstractmethod
    def bind(self, layout: Layout, view: OptimiserView, context: RuleContext) -> BoundRule:
        """Return the working object."""


def refuse_settings(
    optimiser: Optimizer, settings: Iterable[str], what: str, hints: Mapping[str, str] | None = None
) -> None:
    """Raise `AttachError` if the optimiser uses one of these settings. `what`: the rule's action."""
    for group in optimiser.param_groups:
        for setting in settings:
            if group.get(setting):
                raise AttachError(
                    f"this method {what} itself and cannot do {setting}={group[setting]!r}: build the"
                    f" optimiser without {setting}{(hints or {}).get(setting, '')}"
                )


class BoundRule(ABC):
    @abstractmethod
    def step_(self, step: int) -> Iterable[str]:
        """Update tensors instead of the optimiser, and return their names."""

    @abstractmethod
    def close(self) -> None:
        """Make replicas equal, between steps. Call it on every rank."""

    def end_warmup(self) -> None:
        """End an automatic warm-up, for a rehearsal."""
        return

    def follow(self, root: int) -> None:
        """Copy the state of rank `root`, which had more inputs.

        Call it on every rank after `close`, if the rule exchanges in the step.
        """
        raise NotImplementedError(f"{type(self).__name__} does not exchange in the step")

    def state_dict(self) -> dict[str, Tensor]:
        return {}

    def check_state(self, state: Mapping[str, Tensor]) -> None:
        if state:
            raise StateError(f"the saved state has {sorted(state)[0]}, which this method does not use")

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        self.check_state(state)


class OnlyChecks(BoundRule):
    def step_(self, step: int) -> Iterable[str]:
        return ()

    def close(self) -> None:
        """Do nothing."""

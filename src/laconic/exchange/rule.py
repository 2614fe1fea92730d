"""Rule: requirements of a method on the optimiser, and its updates in place of the optimiser's.

Most methods need nothing: they leave a mean gradient for any optimiser. Some are made for one kind of
optimiser (AMSGrad, AdaGrad), and some change the update itself: 1-bit Adam exchanges the momentum inside the
step. The tensors that a rule has updated are hidden
from the optimiser for that step; its parameter groups are never rewritten.
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
    """The optimiser's side of a model, as rules see it."""

    optimiser: Optimizer

    def settings(self, name: str) -> Mapping[str, Any]:
        """The present settings (`lr`, `momentum`, ...) of the group that this tensor is in."""

    def parameter(self, name: str) -> Tensor:
        """Return the model's parameter of this name."""

    def holds(self, name: str) -> bool:
        """Return whether this tensor is currently in a group of the optimiser."""

    def hand_over(self, names: Collection[str], decay: dict[str, Tensor], *, keep: bool) -> Collection[str]:
        """Let this step apply the gradients of these tensors without further momentum.

        Args:
            names: Tensors whose momentum was applied before the exchange.
            decay: Momentum of the weight decay by name, which is updated.
            keep: Whether the optimiser continues their momentum after this step.

        Returns:
            Those that have been stepped already.
        """


class OptimiserSide(Protocol):
    """All optimisers of a model, as an attached exchange sees them."""

    def settings(self, name: str) -> Mapping[str, Any]:
        """The present settings (`lr`, `momentum`, ...) of the group that this tensor is in."""

    def momentum_buffer(self, name: str) -> Tensor | None:
        """The momentum that SGD has gathered of this tensor; None if it has none."""

    def continues_momentum(self, name: str) -> bool:
        """Whether SGD can continue a momentum of this tensor that was gathered elsewhere."""

    def set_momentum_buffer(self, name: str, value: Tensor) -> None:
        """Set SGD's momentum buffer of this tensor to flat `value` (n,)."""

    def why_in_optimizer(self, name: str) -> str | None:
        """Why this tensor's momentum stays in its optimiser, "" if it has none; None if it need not."""

    def held(self, name: str) -> bool:
        """Whether an optimiser holds this tensor, now."""

    def views(self, layout: Layout) -> Iterable[tuple[OptimiserView, Layout]]:
        """Return each optimiser, with the tensors that it may step."""

    def before_steps(self, act: Callable[[OptimiserView], Iterable[str]]) -> None:
        """Call `act` before each step, which then skips the tensors that `act` returns."""

    def on_masters(self) -> AbstractContextManager[None]:
        """Return a context in which master weights replace their parameters, as in a step."""


class Observer(Protocol):
    """Part of an adapter that acts before the optimiser's step."""

    def before_step(self, optimiser: OptimiserView, step: int) -> None:
        """Act before this optimiser's step. Raises if the step is not allowed."""


@dataclass(frozen=True)
class RuleContext:
    """Context of a rule: the group, the seed of its keys, and the clock of its exchanges."""

    comm: Metered
    seed: int
    seconds: Seconds


class Rule(ABC):
    """Configuration of a rule: a frozen dataclass. `bind` returns the working object.

    `exchanges_in_step`: whether it exchanges inside `optimizer.step()`, so that every rank must take every
    step. `keeps_equal`: whether replicas are equal after every step; otherwise they are equal after `close`.
    """

    exchanges_in_step: ClassVar[bool] = False
    keeps_equal: ClassVar[bool] = True

    @property
    def warm_at(self) -> int:
        """The first step after its warm-up; 0 without one."""
        return 0

    @property
    @abstractmethod
    def wants(self) -> str:
        """The required optimiser, as text for messages."""

    @abstractmethod
    def check(self, optimiser: Optimizer, missing: Collection[str]) -> None:
        """Raise `AttachError` unless this optimiser is suitable. `missing`: trained tensors not in it."""

    def steps(self, settings: Mapping[str, Any]) -> bool:
        """Return whether it is made for tensors of a group with these settings; by default for all."""
        return True

    def make(self, parameters: list[Tensor], *, lr: float | None, weight_decay: float) -> Optimizer | None:
        """Return a suitable optimiser, at this or a usual rate; None if plain SGD is suitable."""
        return None

    @abstractmethod
    def bind(self, layout: Layout, view: OptimiserView, context: RuleContext) -> BoundRule:
        """Return the working object for these tensors of the model."""


def refuse_settings(
    optimiser: Optimizer, settings: Iterable[str], what: str, hints: Mapping[str, str] | None = None
) -> None:
    """Raise `AttachError` if a group of the optimiser uses one of these settings.

    `what`: the rule's own action, and `hints`: alternatives to a setting, for the message.
    """
    for group in optimiser.param_groups:
        for setting in settings:
            if group.get(setting):
                raise AttachError(
                    f"this method {what} itself and cannot do {setting}={group[setting]!r}: build the"
                    f" optimiser without {setting}{(hints or {}).get(setting, '')}"
                )


class BoundRule(ABC):
    """A rule bound to tensors."""

    @abstractmethod
    def step_(self, step: int) -> Iterable[str]:
        """Update tensors instead of the optimiser, at its step `step`, and return their names."""

    @abstractmethod
    def close(self) -> None:
        """Make replicas equal before the rule is removed. Call it on every rank, between steps."""

    def end_warmup(self) -> None:
        """End an automatic warm-up, so that a rehearsal measures the phase after it."""
        return

    def follow(self, root: int) -> None:
        """Copy the state of rank `root`, since other ranks have run out of inputs before it.

        Call it on every rank after `close`, if the rule exchanges in the step.
        """
        raise NotImplementedError(f"{type(self).__name__} does not exchange in the step")

    def state_dict(self) -> dict[str, Tensor]:
        """Return the state of this rank, "<kind>/<tensor name>" to a tensor."""
        return {}

    def check_state(self, state: Mapping[str, Tensor]) -> None:
        """Raise `StateError` for a state that is not of this rule."""
        if state:
            raise StateError(f"the saved state has {sorted(state)[0]}, which this method does not use")

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Load the state."""
        self.check_state(state)


class OnlyChecks(BoundRule):
    """A rule that requires a certain optimiser, which does the update."""

    def step_(self, step: int) -> Iterable[str]:
        return ()

    def close(self) -> None:
        """Do nothing: replicas are equal."""

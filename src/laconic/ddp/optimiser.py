"""Optimiser hooks: around `step`, and a view of the optimiser's parameter groups.

Just before `step` the method's rules update their tensors, which are then hidden from the optimiser during
the step. The parameter groups are never rewritten, so schedulers see and set `lr` and the like as always.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from laconic.core.errors import AttachError
from laconic.exchange.rule import BoundRule, Rule


class OptimiserHooks:
    """Hooks on one optimiser. `names` maps each parameter of the model to its name."""

    def __init__(
        self,
        optimiser: Optimizer,
        names: Mapping[Tensor, str],
        before_step: Callable[[], int],
        rules: Sequence[Rule],
    ) -> None:
        self.optimiser = optimiser
        self._before_step = before_step
        self._names = names
        self._parameters = {name: parameter for parameter, name in names.items()}
        self._hidden: list[tuple[Tensor, Tensor]] = []
        self._indexed: list[dict[str, Any]] = []
        self._group_of: dict[str, dict[str, Any]] = {}
        trained = [p for group in optimiser.param_groups for p in group["params"] if p.requires_grad]
        strangers = [p for p in trained if p not in names]
        if strangers:
            raise AttachError(
                f"the optimiser holds a parameter of shape {tuple(strangers[0].shape)} that the model does"
                " not: build the optimiser from model.parameters() of this very model"
            )
        missing = [name for parameter, name in names.items() if not any(parameter is p for p in trained)]
        for rule in rules:
            rule.check(optimiser, missing)
        self._rules: tuple[BoundRule, ...] = ()
        self._hooks: tuple[RemovableHandle, ...] = ()

    def install(self, rules: Sequence[BoundRule]) -> None:
        """Register the hooks; these rules act before each step."""
        self._rules = tuple(rules)
        self._hooks = (
            self.optimiser.register_step_pre_hook(self._before),
            self.optimiser.register_step_post_hook(self._after),
        )

    def parameter(self, name: str) -> Tensor:
        """The model's parameter of this name."""
        return self._parameters[name]

    def settings(self, name: str) -> Mapping[str, Any]:
        """The current settings of this tensor's group, or the defaults if it is in none."""
        groups = self.optimiser.param_groups
        if len(groups) != len(self._indexed) or any(
            a is not b for a, b in zip(groups, self._indexed, strict=True)
        ):
            self._indexed = list(groups)
            pairs = ((p, group) for group in groups for p in group["params"])
            self._group_of = {self._names[p]: group for p, group in pairs if p in self._names}
        found: Mapping[str, Any] = self._group_of.get(name, self.optimiser.defaults)
        return found

    def take_momentum(self, name: str) -> Tensor | None:
        """Take away the tensor's momentum buffer from SGD; None if there is none."""
        state = self.optimiser.state.get(self._parameters[name])
        buffer = None if state is None else state.pop("momentum_buffer", None)
        return buffer if isinstance(buffer, Tensor) else None

    def _before(self, optimiser: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if any(argument is not None for argument in (*args[1:], *kwargs.values())):
            raise AttachError("step(closure) runs backward inside step: call backward() first, then step()")
        step = self._before_step()
        for rule in self._rules:
            for name in rule.step_(step):
                parameter = self._parameters[name]
                if parameter.grad is not None:
                    self._hidden.append((parameter, parameter.grad))
                    parameter.grad = None

    def _after(self, optimiser: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        for parameter, grad in self._hidden:
            parameter.grad = grad
        self._hidden.clear()

    def remove(self) -> None:
        """Remove the hooks."""
        for hook in self._hooks:
            hook.remove()

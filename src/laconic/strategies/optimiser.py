"""The optimiser's side of a compressed exchange: who applies momentum and weight decay, and when.

Where a method applies momentum before the exchange (DGC), `torch.optim.SGD` must not apply it again. Just
before `step` the tensors concerned are updated here and hidden from SGD; all other tensors stay SGD's own,
bit for bit:

    w = w - lr * (G + d)     G: mean of what was sent; d: weight decay * w, with momentum of its own

The parameter groups are never rewritten, so schedulers see and set `lr` and `momentum` as always.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.optim import SGD, Optimizer
from torch.utils.hooks import RemovableHandle

from laconic.core.errors import AttachError, StateError


class OptimiserSide:
    """Hooks on one optimiser. `names` maps each parameter of the model to its name."""

    def __init__(
        self,
        optimiser: Optimizer,
        names: Mapping[Tensor, str],
        before_step: Callable[[], frozenset[str]],
        momentum_of_sgd: bool,
    ) -> None:
        self.optimiser = optimiser
        self._before_step = before_step
        self._names = names
        self._parameters = {name: parameter for parameter, name in names.items()}
        self._hidden: list[tuple[Tensor, Tensor]] = []
        self._indexed: list[dict[str, Any]] = []
        self._group_of: dict[str, dict[str, Any]] = {}
        self._decay: dict[str, Tensor] = {}  # momentum of the weight decay
        trained = [p for group in optimiser.param_groups for p in group["params"] if p.requires_grad]
        strangers = [p for p in trained if p not in names]
        if strangers:
            raise AttachError(
                f"the optimiser holds a parameter of shape {tuple(strangers[0].shape)} that the model does"
                " not: build the optimiser from model.parameters() of this very model"
            )
        if momentum_of_sgd:
            check_sgd(optimiser)
            missing = [name for parameter, name in names.items() if not any(parameter is p for p in trained)]
            if missing:
                raise AttachError(
                    "this method applies the momentum of every trained tensor, but the optimiser does not"
                    f" hold {missing[0]}: give all of model.parameters() to one optimiser"
                )
        self._hooks: tuple[RemovableHandle, ...] = ()

    def install(self) -> None:
        """Put the hooks on the optimiser."""
        self._hooks = (
            self.optimiser.register_step_pre_hook(self._before),
            self.optimiser.register_step_post_hook(self._after),
        )

    def parameter(self, name: str) -> Tensor:
        """The model's parameter of this name."""
        return self._parameters[name]

    def settings(self, name: str) -> Mapping[str, Any]:
        """The present settings of the group that this tensor is in; the defaults where it is in none."""
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
        """The tensor's momentum buffer, which SGD then forgets; None where it has none."""
        state = self.optimiser.state.get(self._parameters[name])
        buffer = None if state is None else state.pop("momentum_buffer", None)
        return buffer if isinstance(buffer, Tensor) else None

    def _before(self, optimiser: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if any(argument is not None for argument in (*args[1:], *kwargs.values())):
            raise AttachError("step(closure) runs backward inside step: call backward() first, then step()")
        owned = self._before_step()
        for group in optimiser.param_groups if owned else ():
            for parameter in group["params"]:
                name = self._names.get(parameter)
                if name in owned and parameter.grad is not None:
                    self._update_(name, parameter, group)
                    self._hidden.append((parameter, parameter.grad))
                    parameter.grad = None

    def _after(self, optimiser: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        for parameter, grad in self._hidden:
            parameter.grad = grad
        self._hidden.clear()

    @torch.no_grad()
    def _update_(self, name: str, parameter: Tensor, group: Mapping[str, Any]) -> None:
        rate = float(group["lr"]) * (-1 if group["maximize"] else 1)
        if group["weight_decay"]:
            sign = -1 if group["maximize"] else 1
            term = parameter * (sign * float(group["weight_decay"]))
            momentum = float(group["momentum"])
            if momentum:
                held = self._decay.get(name)
                held = torch.zeros_like(parameter) if held is None else held
                held.mul_(momentum).add_(term)
                self._decay[name] = held
                term = term.add_(held, alpha=momentum) if group["nesterov"] else held
            parameter.add_(term, alpha=-rate)
        assert parameter.grad is not None
        parameter.add_(parameter.grad, alpha=-rate)

    def state_dict(self) -> dict[str, Tensor]:
        """Momentum of the weight decay: "decay/<name>" to a tensor."""
        return {f"decay/{name}": value.detach().clone() for name, value in self._decay.items()}

    def check_state(self, state: Mapping[str, Tensor]) -> None:
        """Raise `StateError` for a tensor that this model has not."""
        for key, value in state.items():
            parameter = self._parameters.get(key.removeprefix("decay/"))
            if parameter is None or parameter.shape != value.shape:
                raise StateError(
                    f"the saved state has {key} of shape {tuple(value.shape)}, this model has not"
                )

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Take the momentum of the weight decay back."""
        self.check_state(state)
        self._decay = {
            name: value.to(self._parameters[name].device, self._parameters[name].dtype).clone()
            for name, value in ((key.removeprefix("decay/"), value) for key, value in state.items())
        }

    def remove(self) -> None:
        """Take the hooks off: the optimiser is as it was."""
        for hook in self._hooks:
            hook.remove()


def check_sgd(optimiser: Optimizer) -> None:
    """Raise `AttachError` unless this is a `torch.optim.SGD` whose momentum can be continued elsewhere."""
    if not isinstance(optimiser, SGD):
        raise AttachError(
            f"this method continues the momentum of torch.optim.SGD, got {type(optimiser).__name__}; with"
            " another optimiser take plain error feedback, such as 'sampled_topk(density=0.001)'"
        )
    for group in optimiser.param_groups:
        for setting in ("fused", "differentiable", "dampening"):
            if group.get(setting):
                raise AttachError(
                    f"this method applies SGD's momentum itself and cannot do {setting}={group[setting]!r}:"
                    f" build the optimiser without {setting}"
                )

"""Parameters without a gradient on any rank in a backward pass (find_unused_parameters).

DDP exchanges their residuals, but does not write the mean to their gradients. With one optimiser the mean
becomes their gradient at the end of backward; with several, or with master weights, it waits until theirs
steps.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import torch
from torch import Tensor
from torch.utils.hooks import RemovableHandle

from laconic.core.errors import StateError
from laconic.core.layout import Layout
from laconic.core.memory_order import shaped
from laconic.ddp.optimiser import OptimiserHooks


@dataclass(frozen=True)
class Mean:
    """Flat mean of a tensor, times the scaler's scale."""

    view: Tensor
    scale: float

    def as_gradient_of(self, parameter: Tensor, *, scaled: bool = False) -> Tensor:
        grad = (self.view.detach() / (1.0 if scaled else self.scale)).to(parameter.dtype.to_real())
        if parameter.is_complex():
            return shaped(torch.view_as_complex(grad.view(-1, 2)), parameter)
        return shaped(grad, parameter)


class Trainer(Protocol):
    def trains(self, name: str) -> bool:
        """Return whether it steps this parameter."""


class UnusedParameters:
    def __init__(self, names: Mapping[Tensor, str]) -> None:
        self._parameters = {name: parameter for parameter, name in names.items()}
        self._means: dict[str, Tensor] = {}  # unscaled
        self._made: set[str] = set()  # with a gradient of this pass on this rank
        self._given: set[str] = set()  # got a mean in this step: equal on all ranks
        self._watched = {name for name, each in self._parameters.items() if each.requires_grad}
        self._hooks: list[RemovableHandle] = [
            self._parameters[name].register_post_accumulate_grad_hook(  # type: ignore[no-untyped-call]
                partial(_note, self._made, name)
            )
            for name in sorted(self._watched)
        ]

    def clear_stale_(self, buffer: Tensor, layout: Layout) -> None:
        """Zero stale gradients: DDP copies the old gradient of an unused tensor into its bucket."""
        for entry in layout:
            name, old = entry.name, self._parameters[entry.name].grad
            if name not in self._watched or name in self._made or name in self._given:
                continue
            if old is not None and not _share_memory(old, buffer):
                buffer[entry.offset : entry.offset + entry.numel].zero_()

    def note(self, means: Mapping[str, Mean], lone: Trainer | None) -> None:
        """Keep the means that DDP did not write. `lone`: the only optimiser, if it reads `parameter.grad`."""
        unsure = [name for name in means if name not in self._made]  # other ranks may have used these
        self._made.clear()
        for name in unsure:
            parameter, mean = self._parameters[name], means[name]
            if name in self._given:  # contains the mean of an earlier pass
                if parameter.grad is not None or bool(mean.view.any()):
                    parameter.grad = mean.as_gradient_of(parameter, scaled=True)
            elif not bool(mean.view.any()) or _is_gradient_of(parameter, mean):
                continue
            elif lone is not None and lone.trains(name):  # so that the script can clip it
                left = mean.as_gradient_of(parameter, scaled=True)
                parameter.grad = left if parameter.grad is None else parameter.grad + left
                self._given.add(name)
            else:
                left = mean.as_gradient_of(parameter)
                self._means[name] = left.add_(self._means[name]) if name in self._means else left

    def give(self, hooks: OptimiserHooks, scale: float) -> None:
        self._given.clear()
        for name in [*filter(hooks.trains, self._means)]:
            held, left = hooks.parameter(name), self._means.pop(name)
            left = left.to(held.dtype).mul_(scale if hooks.divides else 1.0)
            held.grad = left if held.grad is None else held.grad + left

    def discard(self) -> None:
        self._means.clear()
        self._given.clear()

    def state_dict(self) -> dict[str, Tensor]:
        return {name: mean.clone() for name, mean in self._means.items()}

    def check_state(self, state: Mapping[str, Tensor]) -> None:
        for name, mean in state.items():
            known = self._parameters.get(name)
            if known is None or known.shape != mean.shape:
                raise StateError(f"the saved mean of {name} is of a different model: build the same model")

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        self._means = {
            name: mean.to(self._parameters[name].device, copy=True) for name, mean in state.items()
        }

    def remove(self) -> None:
        for hook in self._hooks:
            hook.remove()


def _note(made: set[str], name: str, parameter: Tensor) -> None:
    made.add(name)


def _share_memory(one: Tensor, other: Tensor) -> bool:
    return one.untyped_storage().data_ptr() == other.untyped_storage().data_ptr()


def _is_gradient_of(parameter: Tensor, mean: Mean) -> bool:
    grad = parameter.grad
    return grad is not None and torch.equal(grad, mean.as_gradient_of(parameter, scaled=True))

"""Hooks around an optimiser's `step`, and a view of its parameter groups.

Before `step` the method's rules update their tensors, and hide their gradients from the optimiser. Groups are
never rewritten, so schedulers work.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.optim import SGD, Optimizer
from torch.utils.hooks import RemovableHandle

from laconic.core.errors import AttachError
from laconic.core.layout import Layout
from laconic.core.memory_order import shaped
from laconic.exchange.method import Method
from laconic.exchange.rule import Rule
from laconic.optim.closure import evaluated
from laconic.optim.hand_over import HandOver, why_in_optimizer
from laconic.optim.master_weights import masters_of
from laconic.optim.masters import Masters
from laconic.optim.unwrapping import after_steps, before_steps, is_skipped, stepping, unwrap_all


class OptimiserHooks:
    def __init__(
        self,
        optimiser: Optimizer,
        names: Mapping[Tensor, str],
        rules: Sequence[Rule],
        others: Sequence[Optimizer] = (),
    ) -> None:
        self.optimiser = stepping(optimiser)
        self._outer = optimiser
        self._hand_over, self._keep = HandOver(self.optimiser), False
        self.masters: Masters | None = None
        self._names = names
        self._parameters = {name: parameter for parameter, name in names.items()}
        self._hidden: list[tuple[Tensor, Tensor]] = []
        self._places: dict[str, tuple[dict[str, Any], int]] = {}
        self._configs = tuple(rules)
        self._checked = [id(group) for group in self.optimiser.param_groups]
        trained, elsewhere = held_by(optimiser), {p for other in others for p in held_by(other)}
        if names and trained.isdisjoint(names):
            raise AttachError(
                f"this {type(optimiser).__name__} holds no parameter of the model: build the optimiser from"
                " model.parameters() of this model"
            )
        self._elsewhere = [names[each] for each in elsewhere if each in names]
        for shared in trained & elsewhere:
            raise AttachError(
                f"two of the optimisers hold {names.get(shared, 'one parameter')}: pass it to only one"
            )
        groups = [group for one in (optimiser, *others) for group in one.param_groups]
        held = {each for group in groups for each in group["params"]}  # frozen or not
        missing = [name for each, name in names.items() if each not in held]
        for rule in rules:
            rule.check(optimiser, missing)
        self._hooks: tuple[RemovableHandle, ...] = ()

    def install(self, act: Callable[[OptimiserHooks], Iterable[str]]) -> None:
        self._hooks = (
            before_steps(self.optimiser, partial(self._before, act)),
            after_steps(self.optimiser, self._after),
        )

    @property
    def scale(self) -> float:
        """Divisor of gradients in this step: a GradScaler leaves it to a fused step."""
        scale = getattr(self.optimiser, "grad_scale", None)
        return 1.0 if scale is None else float(scale)

    def parameter(self, name: str) -> Tensor:
        parameter = self._parameters[name]
        return parameter if self.masters is None else self.masters.now(parameter)

    def settings(self, name: str) -> Mapping[str, Any]:
        group = self._group(name)
        return self.optimiser.defaults if group is None else group

    def holds(self, name: str) -> bool:
        return self._group(name) is not None

    def trains(self, name: str) -> bool:
        return self.holds(name) and self._parameters[name].requires_grad

    @property
    def divides(self) -> bool:
        return getattr(self.optimiser, "grad_scale", None) is not None

    def _group(self, name: str) -> dict[str, Any] | None:
        """Return this tensor's group: scripts change groups in place."""
        held, groups = self.parameter(name), self.optimiser.param_groups
        if name in self._places:
            group, at = self._places[name]
            there = at < len(group["params"]) and group["params"][at] is held
            if there and any(group is each for each in groups):
                return group
            del self._places[name]
        for group in groups:
            for at, each in enumerate(group["params"]):
                if each is held:
                    self._places[name] = group, at
                    return group
        return None

    def _check_settings(self) -> None:
        groups = self.optimiser.param_groups
        if self._configs and [id(each) for each in groups] != self._checked:
            for rule in self._configs:
                rule.check(self.optimiser, ())
            self._checked = [id(each) for each in groups]
        if moved := next((name for name in self._elsewhere if self._configs and self.holds(name)), None):
            raise AttachError(
                f"{moved} was moved to a different optimiser, but the method steps it in the first: call"
                " the handle's remove(), then compress() again"
            )

    def momentum_buffer(self, name: str) -> Tensor | None:
        return self._hand_over.buffer(self.parameter(name))

    def set_momentum_buffer(self, name: str, value: Tensor) -> None:
        self._hand_over.set_buffer(self.parameter(name), value)

    def why_in_optimizer(self, name: str) -> str | None:
        """Return why momentum stays in the optimiser: "" if there is none, None if it is local."""
        if self._outer is not self.optimiser:
            return f"{type(self._outer).__name__} wraps an optimiser"
        return why_in_optimizer(self.optimiser, self.settings(name), self._parameters[name])

    def hand_over(self, names: Collection[str], decay: dict[str, Tensor], *, keep: bool) -> Collection[str]:
        """Replace these gradients in this step, so that the optimiser adds no momentum."""
        tensors = {name: (self.parameter(name), self.settings(name)) for name in names}
        tensors = {name: each for name, each in tensors.items() if each[0].grad is not None}
        changed, stepped = self._hand_over.prepare(tensors, decay, self.scale)
        for parameter, grad in changed.items():
            assert parameter.grad is not None
            self._hidden.append((parameter, parameter.grad))
            parameter.grad = grad
        self._keep = keep
        return stepped

    def _before(
        self,
        act: Callable[[OptimiserHooks], Iterable[str]],
        optimiser: Optimizer,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        self.masters = masters_of(self.optimiser)  # before a closure runs backward
        args, kwargs = evaluated(optimiser, args, kwargs)
        if is_skipped(optimiser):
            return args, kwargs
        self._check_settings()
        for name in act(self):
            parameter = self.parameter(name)
            if parameter.grad is not None:
                self._hidden.append((parameter, parameter.grad))
                parameter.grad = None
        return args, kwargs

    def refine(self, name: str, mean: Tensor) -> None:
        """Replace a master's gradient, rounded to half precision, by the float32 mean."""
        parameter, master = self._parameters[name], self.parameter(name)
        if master is parameter or master.grad is None:
            return
        mean = shaped(mean, parameter)
        if torch.equal(mean.to(parameter.dtype).float(), master.grad):
            master.grad = mean

    def _after(self, optimiser: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._hand_over.finish(keep=self._keep)
        for parameter, grad in self._hidden:
            parameter.grad = grad
        self._hidden.clear()

    def remove(self) -> None:
        for hook in self._hooks:
            hook.remove()
        self.masters = None


class Optimisers:
    def __init__(
        self, optimizer: Optimizer | Sequence[Optimizer], names: Mapping[Tensor, str], rules: Sequence[Rule]
    ) -> None:
        every, _ = unwrap_all(optimizer)
        self.hooks = tuple(
            OptimiserHooks(each, names, rules, [other for other in every if other is not each])
            for each in every
        )

    def of(self, name: str) -> OptimiserHooks:
        if len(self.hooks) == 1:
            return self.hooks[0]
        return next((each for each in self.hooks if each.holds(name)), self.hooks[0])

    def views(self, layout: Layout) -> Iterator[tuple[OptimiserHooks, Layout]]:
        """Yield each optimiser with its tensors and those of no optimiser."""
        free = {name for name in layout.names if not any(each.holds(name) for each in self.hooks)}
        for hooks in self.hooks:
            yield hooks, layout.named([name for name in layout.names if name in free or hooks.holds(name)])

    def before_steps(self, act: Callable[[OptimiserHooks], Iterable[str]]) -> None:
        for each in self.hooks:
            each.install(act)

    def remove(self) -> None:
        for each in self.hooks:
            each.remove()

    def lone(self) -> OptimiserHooks | None:
        return None if len(self.hooks) > 1 or self.have_masters() else self.hooks[0]

    def have_masters(self) -> bool:
        return any(masters_of(each.optimiser) is not None for each in self.hooks)

    @contextmanager
    def on_masters(self) -> Iterator[None]:
        with ExitStack() as stack:
            for each in self.hooks:
                each.masters = masters_of(each.optimiser)
                if each.masters is not None:
                    stack.enter_context(each.masters.inside())
            yield

    def settings(self, name: str) -> Mapping[str, Any]:
        return self.of(name).settings(name)

    def momentum_buffer(self, name: str) -> Tensor | None:
        return self.of(name).momentum_buffer(name)

    def continues_momentum(self, name: str) -> bool:
        return isinstance(self.of(name).optimiser, SGD) and not self.have_masters()

    def set_momentum_buffer(self, name: str, value: Tensor) -> None:
        self.of(name).set_momentum_buffer(name, value)

    def why_in_optimizer(self, name: str) -> str | None:
        return self.of(name).why_in_optimizer(name)

    def held(self, name: str) -> bool:
        return any(each.holds(name) for each in self.hooks)


def held_by(optimiser: Optimizer) -> set[Tensor]:
    return {each for group in optimiser.param_groups for each in group["params"] if each.requires_grad}


def refuse_complex(method: Method, layout: Layout, parameters: Mapping[str, Tensor]) -> None:
    for _, part in method.governed(layout):
        for name in part.names:
            if parameters[name].is_complex():
                raise AttachError(
                    f"{name} is {parameters[name].dtype}, and {method} changes how the optimiser steps, for"
                    " real parameters only: store real pairs, torch.view_as_real(...), or use a method"
                    " that does not change the step, such as 'topk(density=0.01)'"
                )

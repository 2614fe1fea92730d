"""Optimisers as other packages make them: wrappers, subclasses, and state in unusual places."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import SGD, Adam, AdamW, Optimizer


class AcceleratedOptimizer(Optimizer):
    """Accelerate's: no hooks, all attributes are the inner one's."""

    def __init__(self, optimizer: Optimizer, scaler: Any = None) -> None:
        self.optimizer, self.scaler = optimizer, scaler

    state = property(lambda self: self.optimizer.state)  # type: ignore[assignment]
    param_groups = property(lambda self: self.optimizer.param_groups)  # type: ignore[assignment]
    defaults = property(lambda self: self.optimizer.defaults)  # type: ignore[assignment]

    def step(self, closure: Any = None) -> Any:
        return self.optimizer.step(closure)

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.optimizer.zero_grad(set_to_none)


AcceleratedOptimizer.__module__ = "accelerate.optimizer"


class OptimizerWrapper(Optimizer):
    """torchft's."""

    def __init__(self, optim: Optimizer) -> None:
        self.optim = optim

    state = property(lambda self: self.optim.state)  # type: ignore[assignment]
    param_groups = property(lambda self: self.optim.param_groups)  # type: ignore[assignment]

    def step(self, closure: Any = None) -> Any:
        return self.optim.step()

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.optim.zero_grad(set_to_none)


OptimizerWrapper.__module__ = "torchft.optim"


class Around(Optimizer):
    """Base of wrappers that torch hooks too; the subclass names the attribute."""

    name = "optimizer"

    def __init__(self, inner: Optimizer) -> None:
        super().__init__(inner.param_groups, {})
        setattr(self, self.name, inner)
        self.param_groups = inner.param_groups

    @property
    def inside(self) -> Optimizer:
        found: Optimizer = getattr(self, self.name)
        return found

    def step(self, closure: Any = None) -> Any:
        return self.inside.step(closure)


class Lookahead(Around):
    """Slow weights that pull the fast ones back."""

    def __init__(self, inner: Optimizer) -> None:
        super().__init__(inner)
        self.slow = [[p.detach().clone() for p in group["params"]] for group in self.param_groups]

    def step(self, closure: Any = None) -> Any:
        super().step(closure)
        for group, slows in zip(self.param_groups, self.slow, strict=True):
            for p, slow in zip(group["params"], slows, strict=True):
                slow.lerp_(p.detach(), 0.5)
                p.data.copy_(slow)


class SAM(Around):
    """Two backward passes; the script calls first_step and second_step, never step."""

    name = "base_optimizer"

    def __init__(self, inner: Optimizer) -> None:
        super().__init__(inner)
        self.state = inner.state

    @torch.no_grad()
    def first_step(self) -> None:
        for p in (each for group in self.param_groups for each in group["params"]):
            if p.grad is not None:
                self.state[p]["old_p"] = p.clone()
                p.add_(p.grad, alpha=0.01)
        self.zero_grad()

    @torch.no_grad()
    def second_step(self) -> None:
        for p in (each for group in self.param_groups for each in group["params"]):
            if "old_p" in self.state[p]:
                p.copy_(self.state[p].pop("old_p"))
        self.base_optimizer.step()
        self.zero_grad()


class Named(Around):
    name = "_optimizer"


class Short(Around):
    name = "optim"


class Listed(Around):
    """Keeps its optimiser in a list."""

    def __init__(self, inner: Optimizer) -> None:
        super().__init__(inner)
        del self.optimizer
        self.parts = [inner]

    inside = property(lambda self: self.parts[0])  # type: ignore[assignment]


class Outer(Short):
    """A wrapper of a wrapper."""

    def __init__(self, inner: Optimizer) -> None:
        super().__init__(Named(inner))


class Ranger(SGD):
    """Lookahead inside: slow weights in `state` or elsewhere, made at once or at the first step."""

    def __init__(self, parameters: Any, early: bool, beside: bool, **options: Any) -> None:
        super().__init__(parameters, **options)
        self.beside = beside
        self.kept: dict[int, Tensor] = {}
        if early:
            self._make()

    def _make(self) -> None:
        for p in (each for group in self.param_groups for each in group["params"]):
            if self.beside:
                self.kept.setdefault(id(p), p.detach().clone())
            else:
                self.state[p].setdefault("slow_buffer", p.detach().clone())

    def step(self, closure: Any = None) -> Any:
        self._make()
        return super().step(closure)


class NoOptimizer:
    """A plain class around one, as in many tutorials."""

    def __init__(self, inner: Optimizer) -> None:
        self._optimizer = inner

    def step(self) -> None:
        self._optimizer.step()


OPAQUE = (Lookahead, SAM, Named, Short, Listed, Outer)
TRANSPARENT = (
    AcceleratedOptimizer,
    OptimizerWrapper,
    lambda inner: AcceleratedOptimizer(OptimizerWrapper(inner)),
)


class Elsewhere(SGD):
    """Momentum in a list outside of `state`, made at the first step unless `early`."""

    def __init__(self, parameters: Any, early: bool, **options: Any) -> None:
        super().__init__(parameters, **options)
        self.kept: dict[str, Any] = {"buffers": []}
        if early:
            self._make()

    def _make(self) -> None:
        self.kept["buffers"] = [torch.zeros_like(p) for group in self.param_groups for p in group["params"]]

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        if not self.kept["buffers"]:
            self._make()
        held = (p for group in self.param_groups for p in group["params"])
        for p, buffer in zip(held, self.kept["buffers"], strict=True):
            if p.grad is not None:
                p.sub_(buffer.mul_(0.9).add_(p.grad), alpha=0.1)


class SignAdamW(AdamW):
    """Overrides the step."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.sub_(p.grad.sign(), alpha=group["lr"])


class SignAdamW2(SignAdamW):
    """A subclass of the subclass."""


class Negated(SGD):
    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.add_(p.grad, alpha=group["lr"])


class Clipping(SGD):
    """Does something, then its parent's step."""

    def step(self, closure: Any = None) -> Any:
        torch.nn.utils.clip_grad_value_([p for group in self.param_groups for p in group["params"]], 0.1)
        return super().step(closure)


class Nested(SGD):
    """Its parent's step."""

    def step(self, closure: Any = None) -> Any:
        return super().step(closure)


class WithSettings(SGD):
    """Inherits the step."""

    def describe(self) -> str:
        return "plain"


class AdamWithSettings(Adam):
    """Inherits the step."""


class ScheduleFree(SGD):
    """Two sets of weights, swapped by train() and eval(), as schedulefree has."""

    def train(self) -> None: ...

    def eval(self) -> None:
        for p in (each for group in self.param_groups for each in group["params"]):
            if "z" in self.state[p]:
                p.data.lerp_(self.state[p]["z"], 0.5)

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    z = self.state[p].setdefault("z", p.clone())
                    z.sub_(p.grad, alpha=group["lr"])
                    p.lerp_(z, 0.5)


def net(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(12, 24), nn.ReLU(), nn.Linear(24, 4))


def sgd(model: nn.Module, **options: Any) -> SGD:
    return SGD(model.parameters(), **{"lr": 0.1, "momentum": 0.9, **options})


def passed(model: nn.Module, step: int) -> Tensor:
    """A backward pass with the batch of this step."""
    x = torch.randn(16, 12, generator=torch.Generator().manual_seed(step))
    loss = nn.functional.cross_entropy(model(x), x[:, :4].argmax(1))
    loss.backward()  # type: ignore[no-untyped-call]
    return loss.detach()


def train(model: nn.Module, optimizer: Any, steps: range) -> None:
    for step in steps:
        optimizer.zero_grad()
        passed(model, step)
        optimizer.step()

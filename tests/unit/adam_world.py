"""One rank of a model under an Adam rule, on threads as ranks; gradients are drawn, not computed."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.optim import AdamW, Optimizer

from laconic.comm.comm import Comm
from laconic.comm.metered import Metered
from laconic.core.layout import Layout
from laconic.ddp.optimiser import OptimiserHooks
from laconic.exchange.method import lift
from laconic.exchange.rule import BoundRule, Rule, Site
from laconic.exchange.stats import Seconds

SIZE, STEPS, B1, B2, EPS = 3, 14, 0.9, 0.999, 1e-8
Make = Callable[[list[Tensor]], Optimizer]


class World:
    """One rank: a model, its optimiser, and a rule at work on the matrix. Gradients are drawn."""

    def __init__(self, comm: Comm, rule: Rule, make: Make) -> None:
        self.comm = comm
        self.model = nn.Linear(5, 4)
        with torch.no_grad():
            for parameter in self.model.parameters():
                parameter.copy_(torch.linspace(-1, 1, parameter.numel()).view_as(parameter))
        self.step = 0
        self.optimiser = make([*self.model.parameters()])
        names = {parameter: name for name, parameter in self.model.named_parameters()}
        self.side = OptimiserHooks(self.optimiser, names, lambda _: self.step, [rule])
        layout = Layout.of([("weight", (4, 5))])
        self.rule: BoundRule = rule.bind(layout, self.side, Site(Metered(comm), 7, Seconds()))
        self.side.install([self.rule])

    def advance(self, weight_grad: Tensor) -> Tensor:
        self.model.weight.grad = weight_grad.clone()
        self.model.bias.grad = torch.full_like(self.model.bias, 0.1)
        self.optimiser.step()
        self.step += 1
        return self.model.weight.detach().clone()


def drawn(rank: int, step: int) -> Tensor:
    return torch.randn(4, 5, generator=torch.Generator().manual_seed(1000 * rank + step))


def mean_gradient(step: int) -> Tensor:
    return torch.stack([drawn(rank, step) for rank in range(SIZE)]).mean(0)


def rule_of(spec: str) -> Rule:
    (rule,) = lift(spec).rules
    return rule


def adamw(decay: float = 0.1) -> Make:
    return lambda parameters: AdamW(parameters, lr=0.01, weight_decay=decay)


BOUND = (1 - B1) / ((1 - B2) * (1 - B1**2 / B2)) ** 0.5  # by Cauchy and Schwarz
ONE, ZERO = (
    "onebit_adam(warmup_steps=5, codec=dense())",
    "zero_one_adam(freeze_steps=5, kappa=2, codec=dense()",
)

"""ADMM quantisation to a few-bit table, for recurrent language models (Xu et al. 2021, arXiv:2111.14836).

    min F(Theta)  subject to  Theta = G,  G = alpha * q,  q from a table
    Theta  <- steps of the optimiser on F(Theta) + gamma/2 |Theta - G + lambda|^2
    G      <- projection of Theta + lambda      (`projection`)
    lambda <- lambda + Theta - G

A reconstruction: tables, tied scales and the extra-gradient step are the paper's; gamma's schedule, the
interval of G's updates and the tie options are ours.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor, nn
from torch.optim import Optimizer

from laconic.core import arguments
from laconic.core.errors import AttachError, StateError
from laconic.core.inference import outside_inference_mode
from laconic.core.spec import Status
from laconic.lowbit.tables.extragradient import Prediction
from laconic.lowbit.tables.state import read_state
from laconic.lowbit.tables.table_training import TableTraining
from laconic.lowbit.tables.tables import Name, table_of
from laconic.lowbit.tables.weights import Quantised, Tie, dense, project_all, refuse_moved_padding
from laconic.lowbit.training import LowBitTraining
from laconic.transforms.transform import DEFAULT_RUN, Run

FORMAT = 1


@dataclass(frozen=True)
class AdmmSettings:
    """Arguments of `admm`. States contain its `repr`."""

    table: Name = "ternary"
    tie: Tie = "row"
    gamma: float = 1e-3
    growth: float = 1.15
    most: float = 0.1
    every: int = 50
    rounds: int = 5
    start: int = 0
    extragradient: bool = False

    def __post_init__(self) -> None:
        table_of(self.table)
        arguments.choice("tie", self.tie, ("model", "layer", "row"))
        arguments.number("gamma", self.gamma, above=0)
        arguments.number("growth", self.growth, least=1)
        arguments.number("most", self.most, least=self.gamma)
        arguments.whole("every", self.every, 1)
        arguments.whole("rounds", self.rounds, 1)
        arguments.whole("start", self.start, 0)
        arguments.flag("extragradient", self.extragradient)


@dataclass(frozen=True, repr=False)
class AdmmTraining(LowBitTraining, AdmmSettings):
    """Configuration with the arguments of `laconic.lowbit.admm`."""

    paper: ClassVar[str] = "Xu et al. 2021, arXiv:2111.14836"
    status: ClassVar[Status] = "reconstruction"
    examples: ClassVar[tuple[str, ...]] = ("admm()", "admm(table='binary', tie='layer')")

    keep: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        super().__post_init__()
        arguments.names("keep", self.keep, "head")

    def attach(self, model: nn.Module, optimizer: Optimizer | None = None, run: Run = DEFAULT_RUN) -> Admm:
        return Admm(model, optimizer, self, self.keep)


def admm(
    model: nn.Module,
    optimizer: Optimizer,
    table: Name = "ternary",
    tie: Tie = "row",
    *,
    gamma: float = 1e-3,
    growth: float = 1.15,
    most: float = 0.1,
    every: int = 50,
    rounds: int = 5,
    start: int = 0,
    extragradient: bool = False,
    keep: Collection[str] = (),
) -> Admm:
    """Quantise the matrices of Embedding, LSTM, GRU and Linear layers to a table during training.

    Hooks on the optimiser add gamma (Theta - G + lambda) to the gradients before each step, after
    clipping and communication: all ranks of a DistributedDataParallel have the same G. Call this before
    `laconic.compress`, whose hooks must come second.

    Use SGD, as Adam normalises the penalty away. If gamma times the learning rate exceeds 1, the penalty
    overshoots. Memory: 2.25 times the weights. Evaluate in the handle's `quantised()`; end with its
    `finish()` or `pack()`.

    Args:
        model: Float32; may be under DistributedDataParallel.
        optimizer: Optimiser of the matrices, with one gradient per step.
        table: "binary" {-1, 1}, "ternary" {-1, 0, 1}, "quinary" {0, +-1, +-2} or "septenary" {0, +-1, +-2,
            +-4}: 1, 1.6, 3 and 3 bits per weight.
        tie: Entries that share a scale: "row", "layer" (a matrix) or "model".
        gamma: Initial weight of the penalty.
        growth: Factor of gamma, and divisor of lambda, at each update of G.
        most: Limit of gamma.
        every: Steps between updates of G.
        rounds: Alternations in a projection.
        start: Steps before the penalty begins.
        extragradient: Make one step of two calls of `optimizer.step()`: a prediction, then the step from the
            same point with the gradient there. Not for methods with their own momentum, such as `dgc`. Needs
            a much lower learning rate: if rate times curvature is 1, that gradient is 0 and the weights
            drift.
        keep: Modules that stay float32, with children.

    Raises:
        SpecError: An argument is out of range.
        AttachError: The model is unchanged. It has no such layer, or is quantised; matrices are shared, not
            float32, computed by hooks, or not trained by the optimiser; `keep` names no module.

    >>> import torch
    >>> net = nn.Sequential(nn.Embedding(10, 40), nn.Linear(40, 10))
    >>> optimizer = torch.optim.SGD(net.parameters(), lr=0.5)
    >>> handle = admm(net, optimizer, every=10)
    >>> for _ in range(100):
    ...     loss = nn.functional.cross_entropy(net(torch.arange(10)), torch.arange(10).flip(0))
    ...     optimizer.zero_grad()
    ...     loss.backward()
    ...     optimizer.step()
    >>> small = handle.pack()
    >>> bool((small(torch.arange(10)) == handle.finish()(torch.arange(10))).all())
    True
    """
    settings = AdmmSettings(table, tie, gamma, growth, most, every, rounds, start, extragradient)
    return Admm(model, optimizer, settings, keep)


@outside_inference_mode("remove", "state_dict", "load_state_dict")
class Admm(TableTraining):
    """Handle of `laconic.lowbit.admm`. `steps` of the optimiser; `updates` of G; `gamma`: current value."""

    def __init__(
        self, model: nn.Module, optimizer: Optimizer | None, settings: AdmmSettings, keep: Collection[str]
    ) -> None:
        super().__init__(model, optimizer, table_of(settings.table), keep)
        refuse_moved_padding(self._layers, self.table, settings.tie)
        if any(group.get("maximize") for group in self.optimizer.param_groups):
            raise AttachError(
                "this optimiser has maximize=True, which would also maximise the penalty: build it without,"
                " and negate the loss"
            )
        self.settings = settings
        self.steps, self.updates, self.gamma = 0, 0, settings.gamma
        self._near: Quantised = {}  # G
        self._duals: dict[str, Tensor] = {}  # lambda
        self._aims: dict[str, Tensor] = {}  # G - lambda
        self._prediction = Prediction(self.optimizer) if settings.extragradient else None
        self.begin()

    def solution(self) -> Quantised:
        return self._near or self._project(self.weights)

    def before(self) -> None:
        if not self._near and self.steps >= self.settings.start:
            self._near = self._project(self.weights)
            self._duals = {name: weight.new_zeros(weight.shape) for name, weight in self.weights.items()}
            self._aim()
        scale = getattr(self.optimizer, "grad_scale", None)  # a fused step removes GradScaler's factor
        gamma = self.gamma if scale is None else self.gamma * float(scale)
        for name, aim in self._aims.items():
            weight = self.weights[name]
            if weight.grad is not None:
                weight.grad.add_(weight - aim, alpha=gamma)
        if self._prediction is not None:
            self._prediction.before_step()

    def after(self) -> None:
        if self._prediction is not None and not self._prediction.after_step():
            return
        self.steps += 1
        if self._near and (self.steps - self.settings.start) % self.settings.every == 0:
            self._move()

    def remove(self) -> None:
        if self._prediction is not None and self._prediction.ahead:
            self._prediction.back()  # discard half a step
            self._prediction.ahead = False
        super().remove()

    def state_dict(self) -> dict[str, Any]:
        """Return numbers and tensors, equal on all ranks.

        Raises `StateError` between the two halves of an extra-gradient step.
        """
        self._check_whole()
        tensors = {f"lambda/{name}": dual for name, dual in self._duals.items()}
        for name, (alpha, q) in self._near.items():
            tensors |= {f"alpha/{name}": alpha, f"q/{name}": q}
        numbers = {"steps": self.steps, "updates": self.updates, "gamma": self.gamma}
        return {
            "format": FORMAT,
            "settings": repr(self.settings),
            "weights": _shapes(self.weights),
            **numbers,
            "tensors": {key: tensor.clone() for key, tensor in tensors.items()},
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a state. Raise `StateError`, unchanged, for any other."""
        self._check_whole()
        own = {"format": FORMAT, "settings": repr(self.settings), "weights": _shapes(self.weights)}
        numbers, tensors = read_state(state, own, self.weights)
        self.steps, self.updates, self.gamma = numbers
        self._near = {
            name: (tensors[f"alpha/{name}"], tensors[f"q/{name}"]) for name in self.weights if tensors
        }
        self._duals = {name: tensors[f"lambda/{name}"] for name in self.weights if tensors}
        self._aim()

    def _move(self) -> None:
        self._near = self._project({name: w + self._duals[name] for name, w in self.weights.items()})
        before, self.gamma = self.gamma, min(self.settings.most, self.gamma * self.settings.growth)
        for name, g in dense(self._near).items():
            self._duals[name].add_(self.weights[name] - g).mul_(before / self.gamma)
        self._aim()
        self.updates += 1

    def _aim(self) -> None:
        self._aims = {name: g - self._duals[name] for name, g in dense(self._near).items()}

    def _project(self, values: Mapping[str, Tensor]) -> Quantised:
        detached = {name: value.detach() for name, value in values.items()}
        return project_all(detached, self.table, self.settings.tie, self.settings.rounds)

    def _check_whole(self) -> None:
        if self._prediction is not None and self._prediction.ahead:
            raise StateError(
                "an extra-gradient step has two calls of optimizer.step(), and one is missing: save and load"
                " after an even number of calls"
            )


def _shapes(weights: Mapping[str, Tensor]) -> dict[str, list[int]]:
    return {name: list(weight.shape) for name, weight in weights.items()}

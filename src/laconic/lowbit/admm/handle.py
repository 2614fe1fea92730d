"""The handle that `admm` returns: hooks around the optimiser's step, and the state G, lambda and gamma."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from laconic.core.errors import AttachError, StateError
from laconic.core.inference import outside_inference_mode
from laconic.lowbit.admm.extragradient import Prediction
from laconic.lowbit.admm.outcome import Outcome
from laconic.lowbit.admm.saved import read_state
from laconic.lowbit.admm.settings import AdmmSettings
from laconic.lowbit.admm.weights import Quantised, dense, project_all, refuse_moved_padding

FORMAT = 1


@outside_inference_mode("remove", "state_dict", "load_state_dict")
class Admm(Outcome):
    """ADMM at work on one model. Made by `laconic.lowbit.admm`.

    `steps`: of the optimiser, so far; `gamma`: the penalty's weight now; `updates`: how often G has moved.
    """

    def __init__(
        self, model: nn.Module, optimizer: Optimizer, settings: AdmmSettings, keep: Collection[str]
    ) -> None:
        super().__init__(model, optimizer, settings.its_table, keep)
        refuse_moved_padding(self._layers, self.table, settings.tie)
        if any(group.get("maximize") for group in self.optimizer.param_groups):
            raise AttachError(
                "this optimiser has maximize=True, and would climb the penalty too, away from the table:"
                " build it without, and negate the loss"
            )
        self.settings = settings
        self.steps, self.updates, self.gamma = 0, 0, settings.gamma
        self._near: Quantised = {}  # G
        self._duals: dict[str, Tensor] = {}  # lambda
        self._aims: dict[str, Tensor] = {}  # G - lambda, to which the penalty draws Theta
        self._prediction = Prediction(self.optimizer) if settings.extragradient else None
        self.begin()

    def solution(self) -> Quantised:
        """G: what the packed model holds. Before the first step, the nearest to the weights as they are."""
        return self._near or self._projected(self.weights)

    def before(self) -> None:
        """Add the penalty's gradient to the mean gradient: gamma (Theta - G + lambda)."""
        if not self._near and self.steps >= self.settings.start:
            self._near = self._projected(self.weights)
            self._duals = {name: weight.new_zeros(weight.shape) for name, weight in self.weights.items()}
            self._aim()
        scale = getattr(self.optimizer, "grad_scale", None)  # by which a fused step divides, of a GradScaler
        gamma = self.gamma if scale is None else self.gamma * float(scale)
        for name, aim in self._aims.items():
            weight = self.weights[name]
            if weight.grad is not None:
                weight.grad.add_(weight - aim, alpha=gamma)
        if self._prediction is not None:
            self._prediction.before_step()

    def after(self) -> None:
        """Count the step; move G and lambda after every so many."""
        if self._prediction is not None and not self._prediction.after_step():
            return
        self.steps += 1
        if self._near and (self.steps - self.settings.start) % self.settings.every == 0:
            self._move()

    def remove(self) -> None:
        if self._prediction is not None and self._prediction.ahead:
            self._prediction.back()  # half a step is none
            self._prediction.ahead = False
        super().remove()

    def state_dict(self) -> dict[str, Any]:
        """Plain numbers and tensors, the same on all ranks, to be saved beside model and optimiser.

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
        """Go on from a saved state, with the same bits. Raises `StateError`, unchanged, for another one."""
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
        """G, then lambda, then gamma; with gamma the scaled lambda shrinks, so that gamma lambda stays."""
        self._near = self._projected({name: w + self._duals[name] for name, w in self.weights.items()})
        before, self.gamma = self.gamma, min(self.settings.most, self.gamma * self.settings.growth)
        for name, g in dense(self._near).items():
            self._duals[name].add_(self.weights[name] - g).mul_(before / self.gamma)
        self._aim()
        self.updates += 1

    def _aim(self) -> None:
        self._aims = {name: g - self._duals[name] for name, g in dense(self._near).items()}

    def _projected(self, values: Mapping[str, Tensor]) -> Quantised:
        detached = {name: value.detach() for name, value in values.items()}
        return project_all(detached, self.table, self.settings.tie, self.settings.rounds)

    def _check_whole(self) -> None:
        if self._prediction is not None and self._prediction.ahead:
            raise StateError(
                "in the middle of an extra-gradient step, which is two calls of optimizer.step(): save and"
                " load after an even number of calls"
            )


def _shapes(weights: Mapping[str, Tensor]) -> dict[str, list[int]]:
    return {name: list(weight.shape) for name, weight in weights.items()}

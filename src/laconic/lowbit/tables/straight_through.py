"""Straight-through training with a few-bit table: a baseline for ADMM.

    y = f(G),  G the projection of Theta;  Theta <- step of the optimiser with the gradient at G

Bengio et al. 2013, arXiv:1308.3432; "binary" as in Rastegari et al. 2016, arXiv:1603.05279, "ternary" as in
Li et al. 2016, arXiv:1605.04711, but with the scales of `admm`.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor, nn
from torch.optim import Optimizer

from laconic.core import arguments
from laconic.core.errors import NonFiniteError, StateError
from laconic.core.inference import outside_inference_mode
from laconic.core.spec import Status
from laconic.lowbit.tables.table_training import TableTraining
from laconic.lowbit.tables.tables import Name, table_of
from laconic.lowbit.tables.weights import Quantised, Tie, dense, project_all, refuse_moved_padding
from laconic.lowbit.training import LowBitTraining
from laconic.transforms.transform import DEFAULT_RUN, Run


@dataclass(frozen=True, repr=False)
class StraightThroughTraining(LowBitTraining):
    """Configuration with the arguments of `laconic.lowbit.straight_through`."""

    paper: ClassVar[str] = "Bengio et al. 2013, arXiv:1308.3432"
    status: ClassVar[Status] = "recalled"
    examples: ClassVar[tuple[str, ...]] = ("straight_through()", "straight_through(table='binary')")

    table: Name = "ternary"
    tie: Tie = "row"
    rounds: int = 5
    keep: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        arguments.names("keep", self.keep, "head")
        table_of(self.table)
        arguments.choice("tie", self.tie, ("model", "layer", "row"))
        arguments.whole("rounds", self.rounds, 1)

    def attach(
        self, model: nn.Module, optimizer: Optimizer | None = None, run: Run = DEFAULT_RUN
    ) -> StraightThrough:
        return StraightThrough(model, optimizer, self, self.keep)


def straight_through(
    model: nn.Module,
    optimizer: Optimizer,
    table: Name = "ternary",
    tie: Tie = "row",
    *,
    rounds: int = 5,
    keep: Collection[str] = (),
) -> StraightThrough:
    """Train a model with its matrices rounded to a table in each forward pass.

    Args:
        model: Float32; has G between steps. Load a checkpoint before this call.
        optimizer: Optimiser of the matrices, with one gradient per step.
        table, tie, rounds, keep: As for `laconic.lowbit.admm`.

    Raises:
        SpecError: An argument is out of range.
        AttachError: As for `admm`.
        NonFiniteError: A matrix has NaN or Inf. The model is unchanged.

    >>> import torch
    >>> net = nn.Sequential(nn.Linear(6, 4))
    >>> handle = straight_through(net, torch.optim.SGD(net.parameters(), lr=0.1), "binary", "layer")
    >>> net[0].weight.abs().unique().numel()
    1
    """
    return StraightThrough(model, optimizer, StraightThroughTraining(table, tie, rounds), keep)


@outside_inference_mode("remove", "state_dict", "load_state_dict")
class StraightThrough(TableTraining):
    """Handle of `laconic.lowbit.straight_through`."""

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer | None,
        settings: StraightThroughTraining,
        keep: Collection[str],
    ) -> None:
        super().__init__(model, optimizer, table_of(settings.table), keep)
        refuse_moved_padding(self._layers, self.table, settings.tie)
        self._settings = settings
        self.after()
        self.begin()

    def masters(self) -> Mapping[str, Tensor]:
        return self._masters

    def solution(self) -> Quantised:
        return self._near

    def before(self) -> None:
        self._write(self._masters)

    def after(self) -> None:
        self._keep({name: weight.detach().clone() for name, weight in self.weights.items()})

    def remove(self) -> None:
        """Remove the hooks and write Theta to the model."""
        if not self._removed:
            self._write(self._masters)
        super().remove()

    def state_dict(self) -> dict[str, Any]:
        """Return Theta, equal on all ranks."""
        return {"masters": {name: master.clone() for name, master in self._masters.items()}}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        found = state.get("masters") if isinstance(state, Mapping) else None
        if not isinstance(found, Mapping) or found.keys() != self.weights.keys():
            raise StateError("saved for other matrices: attach to the same model, with the same keep=")
        masters = {}
        for name, weight in self.weights.items():
            each = found[name]
            if not isinstance(each, Tensor) or each.dtype is not weight.dtype or each.shape != weight.shape:
                kind = f"{each.dtype} {tuple(each.shape)}" if isinstance(each, Tensor) else repr(each)
                raise StateError(
                    f"{name} must be {weight.dtype} {tuple(weight.shape)}, got {kind}: the state is damaged"
                )
            masters[name] = each.detach().to(weight.device, copy=True)
        try:
            self._keep(masters)
        except NonFiniteError as error:
            raise StateError(f"the state is damaged: {error}") from None

    def _keep(self, masters: dict[str, Tensor]) -> None:
        near = project_all(masters, self.table, self._settings.tie, self._settings.rounds)
        self._masters, self._near = masters, near
        self._write(dense(near))

"""Straight-through training towards a table of few bits: the baseline that ADMM is compared with.

    y = f(G),  G the nearest to Theta;  Theta <- step of the optimiser with the gradient at G

Bengio et al. 2013, arXiv:1308.3432; with "binary" and a scale as in Rastegari et al. 2016, arXiv:1603.05279,
with "ternary" as in Li et al. 2016, arXiv:1605.04711, but with the scales that ADMM has. The model holds G
between steps; during the optimiser's step it holds Theta.
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
    """The arguments of `laconic.lowbit.straight_through`: a table, and what shares a scale."""

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
    """Train a model with its matrices rounded to a table in each forward pass, from now on.

    Args:
        model: Trained as before; its layers do not change, and hold G between steps. Load a checkpoint into
            it before this call.
        optimizer: Trains the matrices, with one gradient a step.
        table: As in `laconic.lowbit.admm`; default: "ternary".
        tie: As there; default: "row".
        rounds: As there; default: 5.
        keep: As there; default: none.

    Returns:
        The handle, with `quantised()`, `finish()` and `pack()` as that of `admm`.

    Raises:
        SpecError: An argument is out of range.
        AttachError: As in `admm`. Nothing has changed then.
        NonFiniteError: A matrix holds NaN or Inf. Nothing has changed then.

    >>> import torch
    >>> net = nn.Sequential(nn.Linear(6, 4))
    >>> handle = straight_through(net, torch.optim.SGD(net.parameters(), lr=0.1), "binary", "layer")
    >>> net[0].weight.abs().unique().numel()
    1
    """
    return StraightThrough(model, optimizer, StraightThroughTraining(table, tie, rounds), keep)


@outside_inference_mode("remove", "state_dict", "load_state_dict")
class StraightThrough(TableTraining):
    """Straight-through training of one model. Made by `laconic.lowbit.straight_through`."""

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
        """Theta."""
        return self._masters

    def solution(self) -> Quantised:
        """G, which is in the model."""
        return self._near

    def before(self) -> None:
        """Put Theta in the model, beside the gradient at G."""
        self._write(self._masters)

    def after(self) -> None:
        """Keep the new Theta, and put the nearest G in the model."""
        self._keep({name: weight.detach().clone() for name, weight in self.weights.items()})

    def remove(self) -> None:
        """Take the hooks off and leave Theta behind. A second call does nothing."""
        if not self._ended:
            self._write(self._masters)
        super().remove()

    def state_dict(self) -> dict[str, Any]:
        """Theta, the same on all ranks, to be saved beside model and optimiser."""
        return {"masters": {name: master.clone() for name, master in self._masters.items()}}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a saved state, with the same bits. Raises `StateError`, unchanged, for another one."""
        found = state.get("masters") if isinstance(state, Mapping) else None
        if not isinstance(found, Mapping) or found.keys() != self.weights.keys():
            raise StateError(
                "saved for other matrices than these: attach to the same model, with the same keep="
            )
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

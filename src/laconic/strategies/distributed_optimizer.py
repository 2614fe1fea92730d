"""The optimiser that `distribute` returns: it steps as the one that it holds, and its ranks talk."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from laconic.core.errors import AttachError, NonFiniteError, StateError
from laconic.strategies.bond import Bond, GradientBond
from laconic.strategies.stats import Stats
from laconic.strategies.strategy import Notes

KEY = "laconic"  # of the strategy's memory, in the state of the optimiser


class DistributedOptimizer(Optimizer):
    """`optimizer`, tied to those of other ranks by `bond`. Made by `laconic.distribute`.

    It has the parameter groups, state and schedules of the optimiser that it holds, and takes a GradScaler.
    A rank whose gradient is not finite skips the update and still talks with the others.
    """

    def __init__(self, optimizer: Optimizer, bond: Bond) -> None:  # no super().__init__: groups are shared
        self.optimizer = optimizer
        self.bond = bond
        self._loss: float | None = None
        self._step_supports_amp_scaling = not isinstance(bond, GradientBond)
        self._share()

    def _share(self) -> None:
        self.defaults = self.optimizer.defaults
        self.state = self.optimizer.state
        self.param_groups = self.optimizer.param_groups

    def __repr__(self) -> str:
        return f"<{self.bond} over {self.optimizer!r}>"

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update by this rank's gradients, and talk as the strategy says. `closure` is run once, before it.

        Raises `NonFiniteError`, with nothing changed, where a gradient is not finite and no GradScaler is
        there to skip the step.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
            self.note_loss(loss)
        told, self._loss = self._loss, None
        if self._step_supports_amp_scaling:
            skip = self._unscale()
            self.bond.step(_nothing if skip else self.optimizer.step, told)
        else:
            self.bond.step(self.optimizer.step, told)
        return loss

    def note_loss(self, loss: Tensor | float) -> None:
        """Tell this step's loss to a strategy that follows leaders; `step(closure)` tells it too."""
        self._loss = loss.item() if isinstance(loss, Tensor) else float(loss)

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.optimizer.zero_grad(set_to_none)

    def averaged(self) -> AbstractContextManager[float]:
        """`with optimizer.averaged() as distance:` the model is the group's exact average inside.

        `distance`: how far the ranks' models were from it, as a share of its norm. Called by all ranks.
        """
        return self.bond.averaged()

    def finish(self) -> None:
        """Every rank takes the group's exact average, by one collective: call it before saving the model."""
        self.bond.finish()

    def stats(self) -> Stats:
        """Bytes and seconds of this rank since the start."""
        return self.bond.stats()

    def notes(self) -> Notes:
        """What there is to tell of the last step: weights, staleness, peers."""
        return self.bond.notes()

    def remove(self) -> None:
        """Untie this rank: model and optimiser are ordinary again. Called by all ranks, between steps."""
        self.bond.remove()

    def state_dict(self) -> dict[str, Any]:
        """The held optimiser's state, with this rank's memory of the strategy. Called by all ranks."""
        return self.optimizer.state_dict() | {KEY: self.bond.state_dict()}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Go on exactly where `state_dict` was taken, of the same rank, group, model and spec.

        Raises `StateError`, with nothing changed, for another's.
        """
        if KEY not in state_dict:
            raise StateError(
                f"this is the state of a plain optimiser: it has no {KEY!r}; load it into the optimiser"
                " before distribute(), or save this one's own state_dict()"
            )
        self.bond.load_state_dict(state_dict[KEY])
        self.optimizer.load_state_dict({key: value for key, value in state_dict.items() if key != KEY})
        self._share()

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        raise AttachError("the parameters are laid out once: add the group before you call distribute()")

    def register_step_pre_hook(self, hook: Any) -> Any:
        return self.optimizer.register_step_pre_hook(hook)

    def register_step_post_hook(self, hook: Any) -> Any:
        return self.optimizer.register_step_post_hook(hook)

    def _unscale(self) -> bool:
        """Whether to skip the update, as a GradScaler has found; gradients are then unscaled."""
        found: Tensor | None = getattr(self, "found_inf", None)
        if found is None:
            self._check_finite()
            return False
        scale: Tensor | None = getattr(self, "grad_scale", None)
        if not bool(found) and scale is not None:
            for grad in self._gradients():
                grad.div_(scale)
        return bool(found)

    def _check_finite(self) -> None:
        largest = torch.nn.utils.get_total_norm(self._gradients(), norm_type=torch.inf)
        if not bool(torch.isfinite(largest)):
            raise NonFiniteError(
                "a gradient is NaN or infinite: nothing was changed; lower the learning rate, clip the"
                " gradients, or use a torch.amp.GradScaler, which skips such steps"
            )

    def _gradients(self) -> Iterable[Tensor]:
        return [p.grad for group in self.param_groups for p in group["params"] if p.grad is not None]


def _nothing() -> None:
    """The update of a step that is skipped."""

"""The optimiser that `distribute` returns: it wraps yours, and communicates at its steps."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from laconic.core.errors import AttachError, NonFiniteError, StateError
from laconic.exchange.stats import Stats
from laconic.strategies.controller import Controller, GradientController
from laconic.strategies.strategy import Notes

KEY = "laconic"  # where the optimiser's state holds the strategy's memory


class DistributedOptimizer(Optimizer):
    """Your optimiser, tied to those of the other ranks. Made by `laconic.distribute`.

    It shares the parameter groups and the state of the wrapped optimiser, so learning rate schedules work,
    and so does a GradScaler. A rank whose gradient holds Inf or NaN skips its update and still communicates:
    no other waits for it.

    Args:
        optimizer: The wrapped optimiser.
        controller: Keeps this rank's replica together with the others.
    """

    def __init__(
        self, optimizer: Optimizer, controller: Controller
    ) -> None:  # no super().__init__: groups are shared
        self.optimizer = optimizer
        self.controller = controller
        self._loss: float | None = None
        self._step_supports_amp_scaling = not isinstance(controller, GradientController)
        self._share()

    def _share(self) -> None:
        self.defaults = self.optimizer.defaults
        self.state = self.optimizer.state
        self.param_groups = self.optimizer.param_groups

    def __repr__(self) -> str:
        return f"<{self.controller} over {self.optimizer!r}>"

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update the parameters by this rank's gradients, and communicate as the strategy says.

        Args:
            closure: Computes the loss again; called once, before the update. Default: none.

        Returns:
            The closure's result, or None.

        Raises:
            NonFiniteError: A gradient is not finite, and no GradScaler skips the step. This rank's update was
                skipped, and the round with the others taken: go on with the next batch.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
            self.note_loss(loss)
        noted_loss, self._loss = self._loss, None
        if not self._step_supports_amp_scaling:
            self.controller.step(self.optimizer.step, noted_loss)
            return loss
        scaled: Tensor | None = getattr(self, "found_inf", None)  # which a GradScaler sets
        skip = not self._finite() if scaled is None else self._unscale(bool(scaled))
        self.controller.step(_nothing if skip else self.optimizer.step, noted_loss)
        if skip and scaled is None:
            raise NonFiniteError(
                "a gradient is NaN or infinite: this rank's update was skipped, and its round with the others"
                " was taken; call optimizer.zero_grad() and go on, lower the learning rate, or use a"
                " torch.amp.GradScaler, which skips such steps by itself"
            )
        return loss

    def note_loss(self, loss: Tensor | float) -> None:
        """Pass on this step's loss, by which `lsgd` elects its leaders; `step(closure)` does that too.

        Args:
            loss: A number, or a tensor of one element.
        """
        self._loss = loss.item() if isinstance(loss, Tensor) else float(loss)

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.optimizer.zero_grad(set_to_none)

    def averaged(self) -> AbstractContextManager[float]:
        """A context, `with optimizer.averaged() as distance:`, in which the model is the group's average.

        Called by all ranks.

        Returns:
            The context. It yields the root mean square distance of the ranks' models from the average, as a
            share of the average's norm.
        """
        return self.controller.averaged()

    def finish(self) -> None:
        """Load the group's exact average on every rank. Call it on all ranks, before you save the model."""
        self.controller.finish()

    def stats(self) -> Stats:
        """Bytes and seconds of this rank since the start."""
        return self.controller.stats()

    def notes(self) -> Notes:
        """Details of the last step for the log, such as weights, staleness and peers."""
        return self.controller.notes()

    def remove(self) -> None:
        """Make model and optimiser ordinary again. Called by all ranks, between steps."""
        self.controller.remove()

    def state_dict(self) -> dict[str, Any]:
        """The wrapped optimiser's state, and this rank's memory of the strategy. Called by all ranks."""
        return self.optimizer.state_dict() | {KEY: self.controller.state_dict()}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Go on exactly where `state_dict` was taken. Called by all ranks, after the same step.

        Args:
            state_dict: The state of the same rank, group size, model, seed and spec.

        Raises:
            StateError: The state is of another rank, group, model, seed or spec. Nothing has changed.
        """
        if KEY not in state_dict:
            raise StateError(
                f"this is the state of a plain optimiser, without {KEY!r}: load it into the optimiser before"
                " distribute(), or save this optimiser's own state_dict()"
            )
        self.controller.load_state_dict(state_dict[KEY])
        self.optimizer.load_state_dict({key: value for key, value in state_dict.items() if key != KEY})
        self._share()

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        raise AttachError("distribute() fixes the parameters: add the group before you call distribute()")

    def register_step_pre_hook(self, hook: Any) -> Any:
        return self.optimizer.register_step_pre_hook(hook)

    def register_step_post_hook(self, hook: Any) -> Any:
        return self.optimizer.register_step_post_hook(hook)

    def _unscale(self, found_inf: bool) -> bool:
        """Undo the GradScaler's scale, unless it found Inf or NaN; returns whether it did."""
        scale: Tensor | None = getattr(self, "grad_scale", None)
        if not found_inf and scale is not None:
            for grad in self._gradients():
                grad.div_(scale)
        return found_inf

    def _finite(self) -> bool:
        """Whether all gradients are."""
        largest = torch.nn.utils.get_total_norm(self._gradients(), norm_type=torch.inf)
        return bool(torch.isfinite(largest))

    def _gradients(self) -> Iterable[Tensor]:
        return [p.grad for group in self.param_groups for p in group["params"] if p.grad is not None]


def _nothing() -> None:
    """The update of a step that is skipped."""

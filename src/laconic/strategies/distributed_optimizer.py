"""Optimiser returned by `distribute`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.join import Join, Joinable, JoinHook
from torch.optim import Optimizer

from laconic.core.errors import AttachError, NonFiniteError, StateError
from laconic.core.inference import outside_inference_mode
from laconic.exchange.stats import Stats
from laconic.optim.closure import evaluate
from laconic.optim.master_weights import masters_of
from laconic.optim.unwrapping import after_steps, before_steps, stepping
from laconic.strategies.controller import Controller, GradientController
from laconic.strategies.gradients import all_finite, gradients, step_unscaled, unscale_
from laconic.strategies.only_through import OnlyThrough
from laconic.strategies.parameter_controller import ParameterController
from laconic.strategies.rounds import Rounds, nothing
from laconic.strategies.several import Several, each_of
from laconic.strategies.strategy import Notes, Update

KEY = "laconic"  # the strategy's memory
ALL = "optimizers"  # the ranks' optimiser states


@outside_inference_mode("finish", "stats", "remove", "discard", "state_dict", "load_state_dict")
class DistributedOptimizer(Optimizer, Joinable):
    """Optimiser connected to those of the other ranks; created by `laconic.distribute`.

    It shares the wrapped one's groups and state, so schedulers and a GradScaler work. A rank whose gradient
    is not finite skips its update but still communicates; with `distribute(scaler=)` all skip it.

    Args:
        optimizer: The wrapped optimiser.
        controller: Synchronises this rank's replica with the others.
        model: The model with the exchanged parameters. Default: None, those of the optimiser.
        group: The process group. Default: all ranks.
    """

    _not_exchanged = (
        "was frozen or unknown when distribute() was called, so ranks do not exchange it: call"
        " optimizer.remove(), then distribute() again with it in the optimiser"
    )

    def __init__(
        self,
        optimizer: Optimizer,
        controller: Controller,
        model: nn.Module | None = None,
        group: dist.ProcessGroup | None = None,
    ) -> None:
        Joinable.__init__(self)  # without Optimizer.__init__: groups are shared with the wrapped optimiser
        self.optimizer = optimizer
        self.controller = controller
        self._replica = controller.replica if isinstance(controller, ParameterController) else None
        self._group = group
        self._loss: float | None = None
        self._only = OnlyThrough(each_of(optimizer) if self._replica else (), controller)
        self._share()
        named = () if model is None else model.named_parameters()
        self._names: dict[Tensor, str] = {each: name for name, each in named}
        held = (each for group in self.param_groups for each in group["params"])
        self._exchanged = {each for each in (*self._names, *held) if each.requires_grad}

    def _share(self) -> None:
        if isinstance(self.optimizer, Several):
            self.optimizer.share()
        self.defaults = self.optimizer.defaults
        self.state = self.optimizer.state
        self.param_groups = self.optimizer.param_groups

    @property
    def _step_supports_amp_scaling(self) -> bool:
        return self._replica is not None or any(map(masters_of, each_of(self.optimizer)))

    def __repr__(self) -> str:
        return f"{self.controller!r} over {self.optimizer!r}"

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise StateError("the optimiser that distribute returns cannot be copied: copy its state_dict()")

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update the parameters with this rank's gradients, and communicate as the strategy requires.

        Args:
            closure: Recomputes the loss; called once, before the update. Default: none.

        Returns:
            The closure's result, or None.

        Raises:
            NonFiniteError: A gradient is not finite, and no GradScaler skips the step: continue with the next
                batch. With a strategy, this rank skipped its update, but took part in the round; under
                `by_machine`, the other ranks of its machine skip theirs without this error. With a method,
                every rank raises it, and nothing has changed.
        """
        self._share()
        loss = evaluate(closure)
        if loss is not None:
            self.note_loss(loss)
        noted_loss, self._loss = self._loss, None
        self._check_exchanged()
        scaled: Tensor | None = getattr(self, "found_inf", None)  # set by a GradScaler
        scale: Tensor | None = getattr(self, "grad_scale", None)
        if scale is not None and self.controller.mixes_scales:
            unscale_(self, scale)
            scale = None
        update = partial(step_unscaled, self.optimizer, scale)
        if self._replica is None:
            if scaled is None or not bool(scaled):
                self.controller.step(update, noted_loss)
            return loss
        Join.notify_join_context(self)
        skip = not all_finite(gradients(self)) if scaled is None else bool(scaled)
        self._round(nothing if skip else partial(self._replica.update, update), noted_loss)
        if skip and scaled is None:
            raise NonFiniteError(
                "a gradient is NaN or infinite: this rank's update was skipped, but it took part in the round"
                " with the others; call optimizer.zero_grad() and continue, lower the learning rate, or use a"
                " torch.amp.GradScaler, which skips such steps"
            )
        return loss

    def note_loss(self, loss: Tensor | float) -> None:
        """Record this step's loss for `lsgd`'s elections, as `step(closure)` does."""
        self._loss = loss.item() if isinstance(loss, Tensor) else float(loss)

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.optimizer.zero_grad(set_to_none)

    @contextmanager
    def averaged(self) -> Iterator[float]:
        """Load the group's average within a context, `with optimizer.averaged() as distance:`.

        Called by all ranks. Training or loading a state inside raises `StateError`.

        Yields:
            The root mean square distance of the ranks' models from the average, relative to its norm.
        """
        with self._as_flat(), self.controller.averaged() as distance:
            yield distance

    def finish(self) -> None:
        """Load the group's exact average on every rank. Call it on all ranks, before you save the model.

        Until the next step each parameter has its own memory: `torch.save` of a part writes only that part.
        """
        with self._as_flat():
            self.controller.finish()
        if self._replica is not None:
            self._replica.detach()

    def stats(self) -> Stats:
        """Return bytes and seconds of this rank's steps, without `averaged()` and `finish()`."""
        return self.controller.stats()

    def notes(self) -> Notes:
        """Return details of the last step, such as weights, staleness and peers."""
        return self.controller.notes()

    def remove(self) -> None:
        """Detach from model and optimiser. Called by all ranks, between steps."""
        self.controller.remove()
        self._only.remove()

    def discard(self) -> None:
        """Drop the residuals of all gradients so far, if the spec is a method. Called by all ranks."""
        self.controller.discard()

    def state_dict(self, *, gather: bool = False) -> dict[str, Any]:
        """Return the wrapped optimiser's state and this rank's memory of the strategy. Called by all ranks.

        Args:
            gather: Whether rank 0 gets the states of all ranks, and the others empty lists. Default: False.

        Returns:
            The optimiser's `state_dict()` with the memory under "laconic". Gathered: the memories of all
            ranks under "laconic", for `laconic.resize`, and their optimisers' states under "optimizers", or
            only one if all are equal.
        """
        with self._as_flat():  # may move the model
            if gather:
                memories, optimizers = self.controller.gathered(self.optimizer.state_dict())
                return {KEY: memories, ALL: optimizers}
            own = self.controller.state_dict()
        return self.optimizer.state_dict() | {KEY: own}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Restore the exact state of `state_dict`. Called by all ranks, after the same step.

        Args:
            state_dict: The state of the same rank, group size, model, seed and spec; or the gathered one.

        Raises:
            StateError: One of these differs; nothing has changed.
        """
        if KEY not in state_dict:
            raise StateError(
                f"this is the state of a plain optimiser, without {KEY!r}: load it into the optimiser before"
                " distribute(), or save this optimiser's own state_dict()"
            )
        plain = {key: value for key, value in state_dict.items() if key != KEY}
        if states := state_dict.get(ALL):
            plain = states[self.controller.rank if len(states) == len(state_dict[KEY]["ranks"]) else 0]
        if isinstance(self.optimizer, Several) and ALL not in plain:
            self.optimizer.check_state(plain)
        with self._as_flat():
            self.controller.load_state_dict(state_dict[KEY])
            self.optimizer.load_state_dict(plain)
        self._share()
        if self._replica is not None:
            self._replica.lay_out_state()

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group of exchanged parameters.

        Raises:
            AttachError: A parameter was frozen at `distribute`, or is not in the model.
        """
        given = param_group["params"]
        held = [given] if isinstance(given, Tensor) else [*given]  # may be a generator
        for each in held:
            self._check(each)
        self.optimizer.add_param_group({**param_group, "params": held})

    def join_hook(self, **kwargs: Any) -> JoinHook:
        """Return a hook for torch's `Join`: a rank without inputs still joins rounds."""
        if isinstance(self.controller, GradientController):
            return self.controller.handle.join_hook_of(self)
        if isinstance(self.controller, ParameterController) and self.controller.shared_scaler is not None:
            raise AttachError(
                "a shared GradScaler needs every rank at every step, and under Join some ranks run out of"
                " inputs: call distribute() without scaler="
            )
        return Rounds(self._round, self._without_inputs)

    @property
    def join_device(self) -> torch.device:
        return torch.device(self.param_groups[0]["params"][0].device)

    @property
    def join_process_group(self) -> Any:
        return self._group or dist.group.WORLD

    def __getattr__(self, name: str) -> Any:
        if name in ("train", "eval"):  # of optimisers with two sets of weights
            return getattr(self.optimizer, name)
        raise AttributeError(name)

    def register_step_pre_hook(self, hook: Any) -> Any:
        return before_steps(stepping(self.optimizer), hook)

    def register_step_post_hook(self, hook: Any) -> Any:
        return after_steps(stepping(self.optimizer), hook)

    def _round(self, update: Update, loss: float | None) -> None:
        with self._only, self._as_flat():
            self.controller.step(update, loss)

    def _without_inputs(self) -> Update:
        if self._replica is None or not self.controller.shares_gradients:
            return nothing
        self.optimizer.zero_grad()
        return partial(self._replica.update, self.optimizer.step)

    def _as_flat(self) -> AbstractContextManager[None]:
        return nullcontext() if self._replica is None else self._replica.as_flat()

    def _check_exchanged(self) -> None:
        for each in (each for group in self.param_groups for each in group["params"]):
            if each.grad is not None:
                self._check(each)

    def _check(self, parameter: Tensor) -> None:
        if parameter not in self._exchanged:
            name = self._names.get(parameter, f"a parameter of shape {tuple(parameter.shape)}")
            raise AttachError(f"{name} {self._not_exchanged}")

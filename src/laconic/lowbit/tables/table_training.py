"""Training towards a table: the model at its quantised weights, and the way out."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from laconic.core.errors import StateError
from laconic.core.inference import outside_inference_mode
from laconic.core.skipped import is_skipped
from laconic.lowbit.tables.packing import Size, packed_copy, size_of
from laconic.lowbit.tables.tables import Table
from laconic.lowbit.tables.weights import Quantised, check_optimizer, dense, treated_layers, treated_weights
from laconic.lowbit.training import LowBitHandle
from laconic.optim.closure import evaluated
from laconic.optim.step_watch import StepWatch
from laconic.optim.unwrapping import after_steps, before_steps, require_plain
from laconic.transforms.transformed import mark_drawn, unmark_drawn


@outside_inference_mode("finish", "pack")
class TableTraining(LowBitHandle):
    """Base of the handles. `weights`: the matrices that are quantised, by name."""

    def __init__(
        self, model: nn.Module, optimizer: Optimizer | None, table: Table, keep: Collection[str]
    ) -> None:
        self.model = model.module if isinstance(model, DistributedDataParallel) else model
        self.table = table
        self._layers = treated_layers(self.model, keep)
        self.weights = treated_weights(self._layers)
        self.optimizer = require_plain(optimizer, "training towards few bits")
        check_optimizer(self.optimizer, self.weights)
        self._watch: StepWatch | None = None
        self._ended = False
        self._last: Quantised | None = None  # the solution that `finish` has written
        self._hooks: list[RemovableHandle] = []

    def begin(self) -> None:
        """Attach to the optimiser, when nothing can fail any more."""
        self._hooks = [
            before_steps(self.optimizer, self._before_step),
            after_steps(self.optimizer, self._after_step),
        ]
        self._watch = StepWatch("training towards few bits", self.optimizer, self.weights.values())
        mark_drawn(self._layers.values())

    @abstractmethod
    def solution(self) -> Quantised:
        """Scale and entries of each matrix as they are now, by name."""

    @abstractmethod
    def before(self) -> None:
        """Just before the optimiser's step, when every gradient is there."""

    @abstractmethod
    def after(self) -> None:
        """Just after the optimiser's step."""

    def masters(self) -> Mapping[str, Tensor]:
        """The float32 matrices that the optimiser trains, Theta, by name."""
        return self.weights

    def residual(self) -> float:
        """Return |Theta - G| / |Theta| over all quantised matrices: the relative primal residual."""
        masters = self.masters()
        apart = sum(
            float((masters[name] - g).detach().square().sum()) for name, g in dense(self.solution()).items()
        )
        return math.sqrt(apart / max(1e-30, sum(float(w.detach().square().sum()) for w in masters.values())))

    @contextmanager
    def quantised(self) -> Iterator[None]:
        """Return a block in which the model has its quantised weights: for an evaluation, not for a step."""
        before = {name: weight.detach().clone() for name, weight in self.weights.items()}
        self._write(dense(self._found()))
        try:
            yield
        finally:
            self._write(before)

    def finish(self) -> nn.Module:
        """Put the quantised weights in the model, and take the hooks off. A second call does nothing.

        Returns:
            The model: float32 as before, and its packed form has the same outputs bit for bit.

        Raises:
            StateError: `remove` was called before.
        """
        last = self._found()
        if not self._ended:
            self.remove()
            self._last = last
            self._write(dense(last))
        return self.model

    def pack(self) -> nn.Module:
        """Return a copy of the model with packed layers, at its quantised weights."""
        return packed_copy(self.model, self._found(), self.table)

    def size(self) -> Size:
        """Return the bytes of the packed model's `state_dict`, and of the same model in float32."""
        return size_of(self.pack(), self.model)

    def remove(self) -> None:
        """Take the hooks off and leave float32 weights behind. A second call does nothing."""
        if self._ended:
            return
        for hook in self._hooks:
            hook.remove()
        if self._watch is not None:
            self._watch.remove()
        unmark_drawn(self._layers.values())
        self._ended = True

    def _found(self) -> Quantised:
        if not self._ended:
            return self.solution()
        if self._last is None:
            raise StateError("removed without finish(), so no weights are quantised: attach and finish again")
        return self._last

    @torch.no_grad()
    def _write(self, values: Mapping[str, Tensor]) -> None:
        for name, value in values.items():
            self.weights[name].copy_(value)

    def _before_step(
        self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments of `step`; a closure has been called, and is replaced by its result."""
        if is_skipped(optimizer):
            return args, kwargs
        args, kwargs = evaluated(optimizer, args, kwargs)
        with torch.no_grad():
            self.before()
        return args, kwargs

    def _after_step(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        assert self._watch is not None
        if is_skipped(optimizer):
            self._watch.skipped()
            return
        self._watch.stepped()
        with torch.no_grad():
            self.after()

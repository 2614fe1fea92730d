"""Base of training with a table."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from laconic.core.errors import StateError
from laconic.core.inference import outside_inference_mode
from laconic.lowbit.tables.packing import Size, packed_copy, size_of
from laconic.lowbit.tables.tables import Table
from laconic.lowbit.tables.weights import Quantised, check_optimizer, dense, select_layers, select_weights
from laconic.lowbit.training import LowBitHandle
from laconic.optim.unwrapping import require_plain
from laconic.transforms.step_callbacks import StepCallbacks
from laconic.transforms.transformed import mark_table_layers, unmark_table_layers

FEATURE = "training towards few bits"


@outside_inference_mode("finish", "pack")
class TableTraining(LowBitHandle):
    """Base of the handles. `weights`: the quantised matrices by name."""

    def __init__(
        self, model: nn.Module, optimizer: Optimizer | None, table: Table, keep: Collection[str]
    ) -> None:
        self.model = model.module if isinstance(model, DistributedDataParallel) else model
        self.table = table
        self._layers = select_layers(self.model, keep)
        self.weights = select_weights(self._layers)
        self.optimizer = require_plain(optimizer, FEATURE)
        check_optimizer(self.optimizer, self.weights)
        self._callbacks: StepCallbacks | None = None
        self._removed = False
        self._last: Quantised | None = None  # written by `finish`

    def begin(self) -> None:
        weights = self.weights.values()
        self._callbacks = StepCallbacks(FEATURE, self.optimizer, weights, self.before, self.after)
        mark_table_layers(self._layers.values())

    @abstractmethod
    def solution(self) -> Quantised:
        """Return the scale and entries of each matrix, by name."""

    @abstractmethod
    def before(self) -> None:
        """Run before the optimiser's step."""

    @abstractmethod
    def after(self) -> None:
        """Run after the optimiser's step."""

    def masters(self) -> Mapping[str, Tensor]:
        return self.weights

    def residual(self) -> float:
        """Return |Theta - G| / |Theta| over all quantised matrices."""
        masters = self.masters()
        apart = sum(
            float((masters[name] - g).detach().square().sum()) for name, g in dense(self.solution()).items()
        )
        return math.sqrt(apart / max(1e-30, sum(float(w.detach().square().sum()) for w in masters.values())))

    @contextmanager
    def quantised(self) -> Iterator[None]:
        """Give the model its quantised weights in a context."""
        before = {name: weight.detach().clone() for name, weight in self.weights.items()}
        self._write(dense(self._current_solution()))
        try:
            yield
        finally:
            self._write(before)

    def finish(self) -> nn.Module:
        """Write the quantised weights to the model, and remove the hooks. A second call does nothing.

        Returns:
            The float32 model, with the outputs of its packed form bit for bit.

        Raises:
            StateError: `remove` was called before.
        """
        last = self._current_solution()
        if not self._removed:
            self.remove()
            self._last = last
            self._write(dense(last))
        return self.model

    def pack(self) -> nn.Module:
        return packed_copy(self.model, self._current_solution(), self.table)

    def size(self) -> Size:
        return size_of(self.pack(), self.model)

    def remove(self) -> None:
        """Remove the hooks and leave the float32 weights. A second call does nothing."""
        if self._removed:
            return
        if self._callbacks is not None:
            self._callbacks.remove()
        unmark_table_layers(self._layers.values())
        self._removed = True

    def _current_solution(self) -> Quantised:
        if not self._removed:
            return self.solution()
        if self._last is None:
            raise StateError(
                "remove() was called without finish(), so no weights are quantised: attach again"
            )
        return self._last

    @torch.no_grad()
    def _write(self, values: Mapping[str, Tensor]) -> None:
        for name, value in values.items():
            self.weights[name].copy_(value)

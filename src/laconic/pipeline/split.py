"""Batches that torch cannot split into micro-batches: the step takes place, and fails on every rank.

Torch raises on the ranks that have the batch, and a rank in the middle would wait for it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from laconic.core.errors import StateError
from laconic.pipeline.step import Step


class Batches:
    """What a schedule's step is given on one rank, to be split into its micro-batches."""

    def __init__(self, schedule: Any, step: Step) -> None:
        self._parts: int = schedule._n_microbatches
        specs = (getattr(schedule, name, None) for name in ("_args_chunk_spec", "_kwargs_chunk_spec"))
        self._sized = not any(specs)  # arguments are split by their first dimension
        self._step = step
        self._rows: dict[bool, int] = {}  # of the last batch in training, and in evaluation

    def whole(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], target: Any, training: bool
    ) -> tuple[tuple[Any, ...], dict[str, Any], Any]:
        """Arguments and target as they are; a short batch repeated, and the step's failure noted."""
        given = [*args, *kwargs.values()] if self._sized else []
        lengths = [len(each) for each in (*given, target) if isinstance(each, Tensor) and each.dim()]
        if not lengths:
            return args, kwargs, target
        if min(lengths) >= self._parts:
            self._rows[training] = lengths[0]
            return args, kwargs, target
        self._step.foresee(too_short(min(lengths), self._parts))
        rows = self._rows.get(training, max(self._rows.values(), default=self._parts))
        if self._sized:
            args = tuple(_repeated(each, rows) for each in args)
            kwargs = {name: _repeated(each, rows) for name, each in kwargs.items()}
        return args, kwargs, _repeated(target, rows)

    def check_ids(self, ids: Tensor | Sequence[int] | None) -> None:
        """Note a failure of the coming step where there are fewer ids than micro-batches."""
        if ids is not None and len(ids) < self._parts:
            self._step.foresee(too_short(len(ids), self._parts))


def too_short(samples: int, parts: int) -> StateError:
    """The error for a batch of so few samples."""
    return StateError(
        f"a batch of {samples} samples cannot be split into {parts} micro-batches: drop a short last batch,"
        " DataLoader(..., drop_last=True), or make a schedule of fewer"
    )


def _repeated(given: Any, rows: int) -> Any:
    """A tensor with so many rows; anything else as it is."""
    if not isinstance(given, Tensor) or not given.dim() or len(given) == rows:
        return given
    if not len(given):
        return given.new_zeros((rows, *given.shape[1:]))
    return given[torch.arange(rows, device=given.device) % len(given)]

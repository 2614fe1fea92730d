"""Batches that torch cannot split into micro-batches: the step fails on every rank.

Torch raises only on the ranks that hold the batch; the others would wait.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

from laconic.core.errors import StateError
from laconic.pipeline.step import Step

WAYS = ("forward", "backward")
INFERRED = tuple(f"_{stages}_{way}_initialized" for stages in ("stage", "stages") for way in WAYS)


class Batches:
    def __init__(self, schedule: Any, step: Step) -> None:
        self._schedule = schedule
        self._parts: int = schedule._n_microbatches
        specs = (getattr(schedule, name, None) for name in ("_args_chunk_spec", "_kwargs_chunk_spec"))
        self._sized = not any(specs)  # split by first dimension
        self._step = step
        self._rows: dict[bool, int] = {}  # rows of the last batch, by training

    def whole(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], target: Any, training: bool
    ) -> tuple[tuple[Any, ...], dict[str, Any], Any]:
        """Return the arguments; repeat a short batch, and record that the step fails."""
        leaves = tree_leaves(((args, kwargs) if self._sized else (), target))
        lengths = [len(each) for each in leaves if isinstance(each, Tensor) and each.dim()]
        if not lengths:
            return args, kwargs, target
        if min(lengths) >= self._parts:
            self._rows[training] = lengths[0]
            return args, kwargs, target
        self._step.foresee(too_short(min(lengths), self._parts))
        rows = self._rows.get(training, max(self._rows.values(), default=self._parts))
        if self._sized:
            args, kwargs = tree_map(partial(_repeated, rows=rows), (args, kwargs))
        return args, kwargs, _repeated(target, rows)

    def failed(self) -> None:
        """Make torch announce shapes again after a short batch."""
        if self._step.short:
            for name in INFERRED:
                if name in vars(self._schedule):
                    setattr(self._schedule, name, False)

    def ended(self) -> None:
        self._step.foreseen = None

    def check_ids(self, ids: Tensor | Sequence[int] | None) -> None:
        if ids is not None and len(ids) < self._parts:
            self._step.foresee(too_short(len(ids), self._parts))


def too_short(samples: int, parts: int) -> StateError:
    return StateError(
        f"a batch of {samples} samples cannot be split into {parts} micro-batches: drop a short last batch,"
        " DataLoader(..., drop_last=True), or make a schedule with fewer micro-batches"
    )


def _repeated(given: Any, rows: int) -> Any:
    if not isinstance(given, Tensor) or not given.dim() or len(given) == rows:
        return given
    if not len(given):
        return given.new_zeros((rows, *given.shape[1:]))
    return given[torch.arange(rows, device=given.device, dtype=torch.int64) % len(given)]

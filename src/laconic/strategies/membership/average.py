"""Agreement of a new group's ranks: average model, most steps, and common memory."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from laconic.comm.comm import Comm
from laconic.comm.gather_text import gather_json
from laconic.strategies.replica import Replica


@dataclass(frozen=True)
class Stand:
    """State of a rank when a new group forms.

    `place`: completed steps, then calls since; `present`: no group formed without it since its last;
    `memory`: equal on all ranks; `up_to_date`: from its last step.
    """

    place: int
    present: bool
    trained: bool
    memory: Mapping[str, Tensor]
    up_to_date: bool = True


@dataclass(frozen=True)
class Agreement:
    """Common state. `place`: the largest. `averaged`: ranks whose models were averaged.

    `memory`: of the averaged rank with the largest place and up-to-date memory, else with any.
    """

    place: int
    averaged: list[int]
    trained: bool
    memory: dict[str, Tensor]


def average_(replica: Replica, model: Tensor, stand: Stand, comm: Comm, keep: bool = False) -> Agreement:
    """Load the ranks' average of model (n,) and of statistics into the replica. Called by all ranks.

    Ranks that missed no group decide; else those with a trained model; else all. `keep`: each averaged rank
    keeps its statistics. If a rank is lost, parameters are unchanged.
    """
    shapes = {key: list(value.shape) for key, value in stand.memory.items()}
    row = [stand.place, stand.present and stand.trained, stand.trained, True, shapes, stand.up_to_date]
    rows = gather_json(comm, row)
    level = next(level for level in (1, 2, 3) if any(row[level] for row in rows))
    averaged = [rank for rank, row in enumerate(rows) if row[level]]
    root = max(averaged, key=lambda rank: (bool(rows[rank][4]), rows[rank][5], rows[rank][0], -rank))
    memory = {}
    for key, shape in sorted(rows[root][4].items()):
        own = stand.memory[key].clone() if comm.rank == root else model.new_empty(shape)
        memory[key] = comm.broadcast(own, root)
    counts = comm.rank in averaged
    mean = comm.all_reduce(_share(model, counts)).div_(len(averaged))
    replica.mean_statistics_(comm, len(averaged), counts, load=not (keep and counts))
    replica.adopt_frozen(comm, root)
    replica.flat.copy_(mean)
    return Agreement(max(row[0] for row in rows), averaged, level < 3, memory)


def _share(x: Tensor, counts: bool) -> Tensor:
    """Return a copy of x, or zeros: a product with 0 would turn infinite entries into NaN."""
    return x.clone() if counts else torch.zeros_like(x)

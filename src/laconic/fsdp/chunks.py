"""Chunks of one module's gradient under `fully_shard`, one per rank."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist

from laconic.comm.partition import Partition, piece
from laconic.core.errors import AttachError
from laconic.core.layout import Entry, Layout

Trained = tuple[bool, ...]  # requires_grad of parameters


def trained_suffix(trained: Trained) -> str:
    """Return the suffix of a memory's name: the trained parameters, or "" for all.

    >>> trained_suffix((True, False, True)), trained_suffix((True, True))
    ('[0.2]', '')
    """
    return "" if all(trained) else f"[{'.'.join(str(i) for i, can in enumerate(trained) if can)}]"


def factor(op: Any, size: int) -> float:
    """Return op's result divided by the mean."""
    if op == dist.ReduceOp.AVG:
        return 1.0
    if op == dist.ReduceOp.SUM:
        return float(size)
    raise AttachError(
        f"a compressed reduce-scatter supports AVG and SUM, got {op}: after set_gradient_divide_factor(...)"
        " call set_force_sum_reduction_for_comms(True)"
    )


def chunks(name: str, n: int, rank: int, size: int) -> Partition:
    whole = Entry(name, (n,), 0)
    each = n // size
    parts = (Layout((piece(whole, each * r, each * (r + 1)),) if each else ()) for r in range(size))
    return Partition.of(Layout((whole,)), parts, rank)

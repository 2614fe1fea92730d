"""Inputs: data pipelines, and each replica's part of their batches."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from laconic.comm.comm import Comm
from laconic.comm.gather_text import gather_text
from laconic.core.errors import DataError, PeerError
from laconic.replicator.deployment import RankContext
from laconic.replicator.leaves import Pytree, Structure, flatten, with_plain_tuples
from laconic.replicator.order import END

Replication = Literal["single", "per_worker", "per_replica"]
SINGLE: Replication = "single"
PER_WORKER: Replication = "per_worker"
PER_REPLICA: Replication = "per_replica"


@dataclass(frozen=True)
class InputContext:
    """Share of an input pipeline, passed to the input function.

    Attributes:
        pipeline: Number of this pipeline, 0 to `pipelines` - 1, over all replicas of the deployment.
        pipelines: Number of pipelines. Each should read its own share, such as `order[pipeline::pipelines]`.
        replicas: Replicas in sync, whose batches together make one update.
        fed: Replicas that split each batch of this pipeline.
    """

    pipeline: int
    pipelines: int
    replicas: int
    fed: int

    def per_replica(self, batch: int) -> int:
        """Return the examples per replica for `batch` per update. Raises `DataError` for a remainder.

        >>> InputContext(pipeline=0, pipelines=2, replicas=4, fed=2).per_replica(64)
        16
        """
        if batch < 1 or batch % self.replicas:
            low = max(1, batch // self.replicas) * self.replicas
            raise DataError(
                f"a batch of {batch} does not divide among {self.replicas} replicas: use {low} or"
                f" {low + self.replicas}"
            )
        return batch // self.replicas

    def per_pipeline(self, batch: int) -> int:
        """Return the examples per batch of this pipeline. Raises `DataError` for a remainder.

        >>> InputContext(pipeline=0, pipelines=2, replicas=4, fed=2).per_pipeline(64)
        32
        """
        return self.per_replica(batch) * self.fed


InputFn = Callable[[InputContext], Iterable[Any]]


def inputs(seat: RankContext, input_fn: InputFn, replication: Replication) -> Iterator[Any]:
    size = seat.comm.size
    shared = size > 1 and (replication == SINGLE or (replication == PER_WORKER and seat.one_process))
    if shared:
        context = InputContext(seat.group, seat.groups, size, size)
    else:
        context = InputContext(seat.group * size + seat.comm.rank, seat.groups * size, size, 1)
    if not shared:
        return iter(input_fn(context))
    return _shared(seat.comm, lambda: iter(input_fn(context)))


def _shared(comm: Comm, begin: Callable[[], Iterator[Any]]) -> Iterator[Any]:
    batches: Iterator[Any] | None = None
    while True:
        parts: list[list[Tensor]] = []
        said, failure = '""', None
        if comm.rank == 0:
            try:
                batches = begin() if batches is None else batches
                batch = next(batches, END)
                said = '["end"]'
                if batch is not END:
                    parts, said = cut(batch, comm.size)
            except Exception as error:
                failure, text = error, f"{type(error).__name__}: {error}"
                said = json.dumps(["data", str(error)] if isinstance(error, DataError) else ["error", text])
        if failure is not None:
            with suppress(PeerError):  # another replica may have ended
                gather_text(comm, said)
            raise failure
        heard = gather_text(comm, said)[0]
        message = json.loads(heard)
        if message[0] == "end":
            return
        if message[0] == "data":
            raise DataError(message[1])
        if message[0] == "error":
            raise PeerError(f"replica {comm.rank}: the input pipeline on replica 0 failed: {message[1]}")
        _, structure, leaves = message
        yield Structure.from_json(structure).rebuilt(_distribute_parts(comm, leaves, parts))


def cut(batch: Pytree, size: int) -> tuple[list[list[Tensor]], str]:
    tensors, structure = flatten(with_plain_tuples(batch), exact=True)
    parts = []
    for each, kind in zip(tensors, (kind for kind in structure.kinds if kind != "none"), strict=True):
        if kind != "tensor":
            parts.append([each] * size)
        elif not each.dim() or each.shape[0] % size:
            raise DataError(
                f"the first dimension of a tensor must be a multiple of {size} to split it among {size}"
                f" replicas, got {tuple(each.shape)}: use context.per_pipeline(batch) in input_fn, and drop a"
                " smaller last batch"
            )
        else:
            parts.append([part.contiguous().cpu() for part in each.chunk(size)])
    leaves = [[str(part[0].dtype).removeprefix("torch."), list(part[0].shape)] for part in parts]
    return parts, json.dumps(["batch", structure.to_json(), leaves])


def _distribute_parts(
    comm: Comm, leaves: Sequence[tuple[str, list[int]]], parts: list[list[Tensor]]
) -> list[Tensor]:
    mine = []
    for i, (dtype, shape) in enumerate(leaves):
        if comm.rank == 0:
            comm.exchange({rank: parts[i][rank] for rank in range(1, comm.size)}, {})
            mine.append(parts[i][0])
        else:
            room = torch.empty(shape, dtype=getattr(torch, dtype), device="cpu")
            comm.exchange({}, {0: room})
            mine.append(room)
    return mine

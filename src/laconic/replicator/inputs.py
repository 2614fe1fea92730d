"""Inputs: how many pipelines read the data, and which part of their batches a replica gets."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from laconic.comm.comm import Comm
from laconic.comm.gather_text import gather_text
from laconic.core.errors import DataError, PeerError
from laconic.replicator.deployment import Seat
from laconic.replicator.leaves import Pytree, Structure, flatten, with_plain_tuples
from laconic.replicator.order import END

Replication = Literal["single", "per_worker", "per_replica"]
SINGLE: Replication = "single"
PER_WORKER: Replication = "per_worker"
PER_REPLICA: Replication = "per_replica"


@dataclass(frozen=True)
class InputContext:
    """What an input function knows of its place.

    Attributes:
        pipeline: The number of this pipeline, 0 to `pipelines` - 1, over all replicas of the deployment.
        pipelines: How many there are. Let each read its own share, such as `order[pipeline::pipelines]`.
        replicas: Replicas in sync, whose batches together make an update's.
        fed: How many of them this pipeline feeds: its batches are cut in so many parts.
    """

    pipeline: int
    pipelines: int
    replicas: int
    fed: int

    def per_replica(self, batch: int) -> int:
        """Examples of a replica, of `batch` in an update. Raises `DataError` where they do not divide.

        >>> InputContext(pipeline=0, pipelines=2, replicas=4, fed=2).per_replica(64)
        16
        """
        if batch < 1 or batch % self.replicas:
            low = max(1, batch // self.replicas) * self.replicas
            raise DataError(
                f"a batch of {batch} does not divide among {self.replicas} replicas: take {low} or"
                f" {low + self.replicas}"
            )
        return batch // self.replicas

    def per_pipeline(self, batch: int) -> int:
        """Examples in a batch of this pipeline. Raises `DataError` where they do not divide.

        >>> InputContext(pipeline=0, pipelines=2, replicas=4, fed=2).per_pipeline(64)
        32
        """
        return self.per_replica(batch) * self.fed


InputFn = Callable[[InputContext], Iterable[Any]]


def inputs(seat: Seat, input_fn: InputFn, replication: Replication) -> Iterator[Any]:
    """This replica's batches. Called by all replicas of a group, which then ask for each batch together."""
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
    """The parts of one pipeline's batches: replica 0 reads them, cuts them and hands them out."""
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
        heard = gather_text(comm, said)[0]
        if failure is not None:
            raise failure
        message = json.loads(heard)
        if message[0] == "end":
            return
        if message[0] == "data":  # its batch: what a replica would say of its own
            raise DataError(message[1])
        if message[0] == "error":
            raise PeerError(f"replica {comm.rank}: the input pipeline on replica 0 failed: {message[1]}")
        _, structure, leaves = message
        yield Structure.from_json(structure).rebuilt(_handed_out(comm, leaves, parts))


def cut(batch: Pytree, size: int) -> tuple[list[list[Tensor]], str]:
    """Each tensor cut for the replicas along its first dimension, on the host; and the message about them.

    Numbers go to all replicas as they are. Raises `DataError` where a tensor does not divide.
    """
    tensors, structure = flatten(with_plain_tuples(batch), exact=True)
    parts = []
    for each, kind in zip(tensors, (kind for kind in structure.kinds if kind != "none"), strict=True):
        if kind != "tensor":
            parts.append([each] * size)
        elif not each.dim() or each.shape[0] % size:
            raise DataError(
                f"a batch that is cut among {size} replicas has tensors whose first dimension divides, got"
                f" {tuple(each.shape)}: let input_fn ask context.per_pipeline(batch), and drop the last batch"
                " where it is smaller"
            )
        else:
            parts.append([part.contiguous().cpu() for part in each.chunk(size)])
    leaves = [[str(part[0].dtype).removeprefix("torch."), list(part[0].shape)] for part in parts]
    return parts, json.dumps(["batch", structure.to_json(), leaves])


def _handed_out(
    comm: Comm, leaves: Sequence[tuple[str, list[int]]], parts: list[list[Tensor]]
) -> list[Tensor]:
    """This replica's part of each tensor, sent by replica 0."""
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

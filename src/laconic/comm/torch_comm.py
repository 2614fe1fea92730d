"""TorchComm: a process group of torch.distributed, with any backend.

Long sums and broadcasts are the backend's own; other collectives are sends and receives that every rank
posts at once. On gloo, all_gather and all_to_all of lists refuse unequal sizes, and other ways are slower.
NCCL fuses the posts into one launch.

On gloo, three or more ranks do a short sum in two rounds, with as many messages and bytes as the 2 (N - 1)
rounds of gloo's ring: on shared cores each round waits until every rank has been scheduled.
"""

from __future__ import annotations

import collections
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor

from laconic.comm.at_exit import close_at_exit
from laconic.comm.comm import ReduceOp
from laconic.comm.counter import Counter, StoreCounter
from laconic.comm.naming import (
    backend_of,
    backends_of,
    destroy,
    host_or,
    in_store,
    named_group,
    not_split_off,
    wire_device,
)
from laconic.comm.posted import OPS, Message, PostedComm
from laconic.comm.waiting import ATTACHING, log_if_slow
from laconic.comm.wire_model import is_direct
from laconic.core.errors import AttachError, PeerError

CHILDREN: collections.Counter[str] = collections.Counter()
COUNTERS: WeakKeyDictionary[dist.ProcessGroup, int] = WeakKeyDictionary()


class TorchComm(PostedComm):
    """Ranks of a process group. On a GPU, gloo copies through the host.

    A collective raises `PeerError` if a peer dies or leaves; the group is unusable after that. Groups
    created here also accept small host tensors.

    Args:
        group: A process group with any backend; default: all ranks.

    Raises:
        AttachError: There is no process group yet.
    """

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        group = group or dist.group.WORLD
        if group is None:
            raise AttachError(
                "there is no process group yet: call torch.distributed.init_process_group first"
            )
        self._group: dist.ProcessGroup | None = group
        self.ranks = dist.get_process_group_ranks(group)  # rank here -> rank in the world
        self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)
        self.backends = backends_of(group)
        self._waits = self.timeout
        self._original_ranks: Sequence[int] = range(self.size)
        self._original_size = self.size
        self._parts: list[TorchComm] = []
        self._by_name = self.size < dist.get_world_size()  # parts are then created by name

    @classmethod
    def among(cls, members: Sequence[int], name: str, like: TorchComm) -> TorchComm:
        """Return a new group of these ranks of `like`, with its backend and timeout. Only they call this.

        `name`: new for these processes.
        """
        with like._peers("new_group"):
            ranks = [like.ranks[member] for member in members]
            comm = cls(named_group(name, ranks, backend_of(like.backends), like._waits))
        comm._original_ranks, comm._original_size = members, like.size
        comm._by_name = True
        return close_at_exit(comm)

    @classmethod
    def own(cls, group: dist.ProcessGroup | None = None, timeout: timedelta | None = None) -> TorchComm:
        """Return a new process group of the same ranks, safe from other code's collectives.

        Call it on all ranks of `group`, and `close` it. `timeout`: of a collective; default: `group`'s.
        """
        comm = cls(group)
        with log_if_slow(comm.rank, ATTACHING):
            return close_at_exit(cls(comm._new_group(comm.ranks, timeout or comm.timeout)))

    @property
    def group(self) -> dist.ProcessGroup:
        """The process group. Raises `PeerError` if this rank has left it."""
        if self._group is None:
            raise PeerError(f"rank {self.rank} of {self.size} has left this group")
        return self._group

    @property
    def original_ranks(self) -> Sequence[int]:
        return self._original_ranks

    @property
    def original_size(self) -> int:
        return self._original_size

    @property
    def timeout(self) -> timedelta:
        device = torch.device(next(iter(self.backends)))
        waits: timedelta = self.group._get_backend(device).options._timeout
        return waits

    def close(self) -> None:
        """Free a process group and its parts. gloo wakes peers when the last reference is dropped."""
        group, self._group = self._group, None
        if group is not None:
            for part in self._parts:
                part.close()
            destroy(group)

    def all_reduce(self, x: Tensor, op: ReduceOp = "sum") -> Tensor:
        return self._begin_all_reduce(x, op)()

    def begin_all_reduce(self, x: Tensor) -> Callable[[], Tensor]:
        """Start a sum, in the background; of a sum in two rounds only the first."""
        return self._begin_all_reduce(x, "sum")

    def _begin_all_reduce(self, x: Tensor, op: ReduceOp) -> Callable[[], Tensor]:
        if x.dtype == torch.int16 and self.backends.get(x.device.type) == "gloo":
            raise ValueError(f"rank {self.rank}: gloo cannot reduce int16; use int32")
        if self.size == 1 or not x.numel():
            return lambda: x
        flat = x.contiguous()
        if op == "sum" and is_direct(x.nbytes, self.size) and self._on_gloo(x):
            wait = self._begin_sum_(flat.view(-1))
        else:
            with self._peers("all_reduce"):
                work = dist.all_reduce(flat, OPS[op], group=self.group, async_op=True)
            wait = partial(self._wait, "all_reduce", [work])

        def end() -> Tensor:
            wait()
            return x if flat is x else x.copy_(flat)

        return end

    def _on_gloo(self, x: Tensor) -> bool:
        return not x.is_cuda and self.backends.get("cpu") == "gloo"

    def broadcast(self, x: Tensor, root: int = 0) -> Tensor:
        if self.size > 1 and x.numel():
            flat = x.contiguous()
            with self._peers("broadcast"):
                dist.broadcast(flat, src=self.ranks[root], group=self.group)
            if flat is not x:
                x.copy_(flat)
        return x

    def split(self, color: int) -> TorchComm:
        mine = torch.tensor([color], device=self._small, dtype=torch.int64)
        colors = torch.cat(self.all_gather(mine)).tolist()
        pairs = list(zip(colors, self.ranks, strict=True))
        # torch requires all ranks of the world to create all parts. If this group is smaller or recreated,
        # only its ranks can: torch names groups by a count that is lower in a process that joined later.
        for made in [color] if self._by_name else sorted(set(colors)):
            part = self._new_group([rank for each, rank in pairs if each == made], self.timeout)
            if made == color:
                self._parts.append(TorchComm(part))
                self._parts[-1]._by_name = self._by_name
        return self._parts[-1]

    def counter(self) -> Counter:
        # counted by group, not by name, which earlier groups of this process may have had
        COUNTERS[self.group] = COUNTERS.get(self.group, 0) + 1
        store = dist.distributed_c10d._get_default_store()
        return StoreCounter(store, f"{in_store(self.group.group_name)}/counter/{COUNTERS[self.group]}")

    @property
    def _small(self) -> torch.device:
        return torch.device("cpu" if "cpu" in self.backends else next(iter(self.backends)))

    def _home(self, x: Tensor) -> torch.device:
        return host_or(x.device, self.backends)

    def _start(self, sends: Sequence[Message], recvs: Sequence[Message]) -> Sequence[dist.Work]:
        def post(operation: Callable[..., Any], messages: Sequence[Message]) -> list[dist.P2POp]:
            return [dist.P2POp(operation, x, self.ranks[peer], self.group) for peer, x in messages]

        # receives first: otherwise gloo sends in one direction at a time, at half the rate
        works: list[dist.Work] = dist.batch_isend_irecv(post(dist.irecv, recvs) + post(dist.isend, sends))
        return works

    def _new_group(self, ranks: list[int], timeout: timedelta) -> dist.ProcessGroup:
        backend = backend_of(self.backends)
        with self._peers("new_group"):
            if self._by_name:
                parent = self.group.group_name
                number = torch.tensor([CHILDREN[parent] + 1], device=self._small, dtype=torch.int64)
                CHILDREN[parent] = int(self.all_reduce(number, "max"))
                return named_group(f"{parent}/{CHILDREN[parent]}/{ranks[0]}", ranks, backend, timeout)
            with not_split_off():
                made: dist.ProcessGroup = dist.new_group(ranks, timeout=timeout, backend=backend)
        return made

    def _wire_device(self, x: Tensor) -> torch.device:
        return wire_device(x.device, self.backends)

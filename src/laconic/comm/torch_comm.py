"""TorchComm: a process group of torch.distributed, with any backend.

Long sums and broadcasts are the backend's own. All other collectives are sends and receives that every rank
posts at once, because the alternatives fail with ragged sizes or are slower. On gloo, all_gather and
all_to_all of lists refuse unequal sizes, and all_to_all_single needs a copy of one's own message for each
rank. At 1 MB and 2 ranks, sends and receives take 0.6 ms, broadcasts by each rank in turn 0.8,
all_to_all_single 2.0, all_gather padded to the longest 3.0; at 10 MB 7, 11, 82 and 74 ms. NCCL fuses the
posts into one launch, as in its own all-to-all.

A group that we make takes tensors on the host, over gloo, whatever device its backend is for: lengths,
agreements and weights are control messages of a few bytes, and NCCL has no place for them.

On gloo, a short sum among three or more ranks is our own. gloo's ring is 2 (N - 1) messages one after the
other; here every rank adds up one piece and sends it to all, in two rounds with as many messages and bytes.
On shared cores each round waits until every rank has had its turn.

Messages, for N ranks: all_gather sends m bytes to each of N-1 ranks, all_to_all and reduce_scatter one chunk
to each. Before all_gather and all_to_all each rank sends the length to each other rank, in 8 bytes.
"""

from __future__ import annotations

import collections
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor

from laconic.comm.at_exit import close_at_exit
from laconic.comm.comm import Comm, ReduceOp
from laconic.comm.counter import Counter, StoreCounter
from laconic.comm.naming import backend_of, destroy, in_store, named_group
from laconic.comm.two_rounds import begin_scatter, begin_sum_
from laconic.comm.wire_model import is_direct
from laconic.core.errors import PeerError

CHILDREN: collections.Counter[str] = collections.Counter()  # groups made of each group's ranks, by its name
COUNTERS: WeakKeyDictionary[dist.ProcessGroup, int] = WeakKeyDictionary()  # counters made in each group
OPS = {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX, "min": dist.ReduceOp.MIN}


class TorchComm(Comm):
    """The ranks of a process group. Tensors stay on their device; on a GPU, gloo copies through the host.

    A collective raises `PeerError` if a peer dies or leaves; the group is unusable after that.

    Args:
        group: A process group with any backend; default: all ranks.

    Raises:
        ValueError: There is no process group yet.
    """

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        group = group or dist.group.WORLD
        if group is None:
            raise ValueError("there is no process group yet: call torch.distributed.init_process_group first")
        self._group: dist.ProcessGroup | None = group
        self.ranks = dist.get_process_group_ranks(group)  # rank here -> rank in the world
        self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)
        config = str(dist.get_backend_config(group))  # such as cpu:gloo,cuda:nccl
        self.backends = dict(pair.split(":") for pair in config.split(","))
        self._waits = self.timeout
        self._original_ranks: Sequence[int] = range(self.size)
        self._original_size = self.size
        self._parts: list[TorchComm] = []  # made by `split`
        self._by_name = self.size < dist.get_world_size()  # its parts have names, and are made by their ranks

    @classmethod
    def among(cls, members: Sequence[int], name: str, like: TorchComm) -> TorchComm:
        """A new process group of these ranks of `like`, with its backend and timeout; only they call this.

        `name`: one that no group of these processes has had before.
        """
        with like._peers("new_group"):
            ranks = [like.ranks[member] for member in members]
            comm = cls(named_group(name, ranks, backend_of(like.backends), like._waits))
        comm._original_ranks, comm._original_size = members, like.size
        comm._by_name = True
        return close_at_exit(comm)

    @classmethod
    def own(cls, group: dist.ProcessGroup | None = None, timeout: timedelta | None = None) -> TorchComm:
        """A new process group of the same ranks, so that other code's collectives cannot interfere.

        Called by all ranks of `group`, by default all. Call `close` at the end. `timeout`: how long a
        collective may wait; default: as in `group`.
        """
        comm = cls(group)
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
        """How long a collective of this group waits for its peers."""
        device = torch.device(next(iter(self.backends)))
        waits: timedelta = self.group._get_backend(device).options._timeout
        return waits

    def close(self) -> None:
        """Free the process group and those split off it. Only for groups made by `own`, `among` or `split`.

        gloo closes its connections, and so wakes peers that wait, once nothing refers to the group; after
        this call this object does not. Python's end closes the rest.
        """
        group, self._group = self._group, None
        if group is not None:
            for part in self._parts:
                part.close()
            destroy(group)

    def all_reduce(self, x: Tensor, op: ReduceOp = "sum") -> Tensor:
        return self._begin_all_reduce(x, op)()

    def begin_all_reduce(self, x: Tensor) -> Callable[[], Tensor]:
        """The backend's own sum runs in the background; of a sum in two rounds the first round does."""
        return self._begin_all_reduce(x, "sum")

    def _begin_all_reduce(self, x: Tensor, op: ReduceOp) -> Callable[[], Tensor]:
        if x.dtype == torch.int16 and self.backends.get(x.device.type) == "gloo":
            raise ValueError(f"rank {self.rank}: gloo cannot reduce int16; use int32")
        if self.size == 1 or not x.numel():
            return lambda: x
        flat = x.contiguous()
        if op == "sum" and is_direct(x.nbytes, self.size) and self._on_gloo(x):
            wait = begin_sum_("all_reduce", flat.view(-1), self.size, self.rank, self._post)
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

    def reduce_scatter(self, chunks: Sequence[Tensor]) -> Tensor:
        self._check(chunks)
        return begin_scatter("reduce_scatter", chunks, self.rank, self._post)()

    def all_gather(self, x: Tensor) -> list[Tensor]:
        """Every rank's x (m_r,), in rank order. This rank's is `x` itself, so do not write to them."""
        lengths = self._lengths([x.numel()] * self.size, x.device)
        received = [x if rank == self.rank else x.new_empty(length) for rank, length in enumerate(lengths)]
        others = [rank for rank in range(self.size) if rank != self.rank]
        going = x.contiguous().to(self._wire_device(x))
        self._swap("all_gather", dict.fromkeys(others, going), {rank: received[rank] for rank in others})
        return received

    def all_to_all(self, chunks: Sequence[Tensor]) -> list[Tensor]:
        self._check(chunks)
        lengths = self._lengths([chunk.numel() for chunk in chunks], chunks[0].device)
        received = [chunks[0].new_empty(length) for length in lengths]
        self._swap("all_to_all", dict(enumerate(chunks)), dict(enumerate(received)))
        return received

    def broadcast(self, x: Tensor, root: int = 0) -> Tensor:
        if self.size > 1 and x.numel():
            flat = x.contiguous()
            with self._peers("broadcast"):
                dist.broadcast(flat, src=self.ranks[root], group=self.group)
            if flat is not x:
                x.copy_(flat)
        return x

    def exchange(self, sends: Mapping[int, Tensor], recvs: Mapping[int, Tensor]) -> None:
        self._swap("exchange", sends, recvs)

    def split(self, color: int) -> TorchComm:
        colors = torch.cat(self.all_gather(torch.tensor([color], device=self._home))).tolist()
        pairs = list(zip(colors, self.ranks, strict=True))
        # torch wants all ranks of the world to make all parts. If this group is smaller, or was made anew,
        # only its own ranks can: a process that joined later has counted fewer groups, and torch names groups
        # by that count.
        for made in [color] if self._by_name else sorted(set(colors)):
            part = self._new_group([rank for each, rank in pairs if each == made], self.timeout)
            if made == color:
                self._parts.append(TorchComm(part))
                self._parts[-1]._by_name = self._by_name
        return self._parts[-1]

    def counter(self) -> Counter:
        """In the store of the default process group."""
        COUNTERS[self.group] = (
            COUNTERS.get(self.group, 0) + 1
        )  # by name, a process's earlier groups would count
        store = dist.distributed_c10d._get_default_store()  # torch has no public name for it
        return StoreCounter(store, f"{in_store(self.group.group_name)}/counter/{COUNTERS[self.group]}")

    @property
    def _home(self) -> torch.device:
        """The device of this group's small tensors: the host, if the backend allows it."""
        return torch.device("cpu" if "cpu" in self.backends else next(iter(self.backends)))

    def _new_group(self, ranks: list[int], timeout: timedelta) -> dist.ProcessGroup:
        backend = backend_of(self.backends)
        with self._peers("new_group"):
            if self._by_name:
                parent = self.group.group_name
                number = torch.tensor([CHILDREN[parent] + 1], device=self._home)
                CHILDREN[parent] = int(self.all_reduce(number, "max"))
                return named_group(f"{parent}/{CHILDREN[parent]}/{ranks[0]}", ranks, backend, timeout)
            made: dist.ProcessGroup = dist.new_group(ranks, timeout=timeout, backend=backend)
        return made

    def _lengths(self, going: list[int], device: torch.device) -> list[int]:
        """How many elements each rank will send here, if this rank sends going[r] elements to rank r."""
        home = "cpu" if "cpu" in self.backends else device  # on the host nothing waits for the GPU
        out, into = torch.tensor(going, device=home), torch.tensor(going, device=home)
        peers = range(self.size)
        self._swap("lengths", {r: out[r : r + 1] for r in peers}, {r: into[r : r + 1] for r in peers})
        coming: list[int] = into.tolist()
        return coming

    def _swap(self, name: str, sends: Mapping[int, Tensor], recvs: Mapping[int, Tensor]) -> None:
        """Post all sends and receives at once, and wait for them."""
        self._post(name, sends, recvs)()

    def _post(
        self, name: str, sends: Mapping[int, Tensor], recvs: Mapping[int, Tensor]
    ) -> Callable[[], None]:
        """Post all sends and receives at once; the returned function waits for them.

        A message to oneself is copied. Messages between two ranks arrive in the order in which they were
        posted, so several may be pending.
        """
        sending: list[dist.P2POp] = []
        receiving: list[dist.P2POp] = []
        copies: list[tuple[Tensor, Tensor]] = []
        if self.rank in recvs:
            recvs[self.rank].copy_(sends[self.rank])
        for distance in range(1, self.size):  # starting with the next rank: no link is idle
            to, source = (self.rank + distance) % self.size, (self.rank - distance) % self.size
            if to in sends and sends[to].numel():
                going = sends[to].contiguous().to(self._wire_device(sends[to]))
                sending.append(dist.P2POp(dist.isend, going, self.ranks[to], self.group))
            if source in recvs and recvs[source].numel():
                room = coming = recvs[source]
                device = self._wire_device(room)
                if not room.is_contiguous() or room.device != device:
                    coming = torch.empty(room.shape, dtype=room.dtype, device=device)
                    copies.append((room, coming))
                receiving.append(dist.P2POp(dist.irecv, coming, self.ranks[source], self.group))
        # receives first: otherwise gloo sends in one direction after the other, at half the rate
        posts = receiving + sending
        with self._peers(name):
            works = dist.batch_isend_irecv(posts) if posts else []

        def end() -> None:
            self._wait(name, works)
            for room, coming in copies:
                room.copy_(coming)

        return end

    def _wait(self, name: str, works: Sequence[dist.Work]) -> None:
        with self._peers(name):
            for work in works:
                work.wait()

    def _wire_device(self, x: Tensor) -> torch.device:
        """The device that a tensor is sent from: gloo sends from the host only."""
        return torch.device("cpu") if self.backends.get(x.device.type) == "gloo" else x.device

    @contextmanager
    def _peers(self, name: str) -> Iterator[None]:
        try:
            yield
        except RuntimeError as error:
            why = str(error).partition("This is typically")[0].rstrip(". ")  # without gloo's advice
            raise PeerError(
                f"a peer of rank {self.rank} died, left or was late: {name} of {self.size} ranks: {why}"
            ) from error

    def _check(self, chunks: Sequence[Tensor]) -> None:
        if len(chunks) != self.size:
            raise ValueError(f"rank {self.rank}: chunks must be {self.size}, one a rank, got {len(chunks)}")

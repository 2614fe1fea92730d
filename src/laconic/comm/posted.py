"""Collectives from sends and receives that every rank posts at once (`torch_comm.py` states why).

With NCCL a wait makes the GPU's stream wait, not the host. So a dead peer is detected in the round of
lengths on gloo, or NCCL's watchdog ends this process, without a `PeerError`.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from laconic.comm.comm import Comm, ReduceOp
from laconic.core.errors import PeerError

OPS: dict[ReduceOp, Any] = {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX, "min": dist.ReduceOp.MIN}
Message = tuple[int, Tensor]  # a peer, and the tensor to send or to receive into


class PostedComm(Comm):
    @abstractmethod
    def _start(self, sends: Sequence[Message], recvs: Sequence[Message]) -> Sequence[dist.Work]:
        """Start all messages; those between two ranks arrive in order."""

    def _wire_device(self, x: Tensor) -> torch.device:
        return x.device

    def _home(self, x: Tensor) -> torch.device:
        """Return the device of lengths: the host, if possible, to avoid GPU waits."""
        return torch.device("cpu")

    def reduce_scatter(self, chunks: Sequence[Tensor]) -> Tensor:
        self._check(chunks)
        return self._begin_scatter("reduce_scatter", chunks)()

    def all_gather(self, x: Tensor) -> list[Tensor]:
        """Return every rank's x (m_r,). On a CPU this rank's is `x` itself."""
        lengths = self._lengths([x.numel()] * self.size, self._home(x))
        received = rooms(x, lengths)
        if x.is_cpu:
            received[self.rank] = x
        else:
            received[self.rank].copy_(x)
        others = [rank for rank in range(self.size) if rank != self.rank]
        going = x.contiguous().to(self._wire_device(x))
        self._swap("all_gather", dict.fromkeys(others, going), {rank: received[rank] for rank in others})
        return received

    def all_to_all(self, chunks: Sequence[Tensor]) -> list[Tensor]:
        self._check(chunks)
        lengths = self._lengths([chunk.numel() for chunk in chunks], self._home(chunks[0]))
        received = rooms(chunks[0], lengths)
        self._swap("all_to_all", dict(enumerate(chunks)), dict(enumerate(received)))
        return received

    def exchange(self, sends: Mapping[int, Tensor], recvs: Mapping[int, Tensor]) -> None:
        self._swap("exchange", sends, recvs)

    def _begin_scatter(self, name: str, chunks: Sequence[Tensor]) -> Callable[[], Tensor]:
        received = [torch.empty_like(chunks[self.rank]) for _ in chunks]
        wait = self._post(name, dict(enumerate(chunks)), dict(enumerate(received)))

        def total() -> Tensor:
            wait()
            for chunk in received[1:]:
                received[0].add_(chunk)
            return received[0]

        return total

    def _begin_sum_(self, x: Tensor) -> Callable[[], None]:
        """Sum x (n,) over ranks, in place: each rank sums one piece and sends it to all.

        The returned function does the second round.
        """
        pieces = torch.tensor_split(x, self.size)
        total = self._begin_scatter("all_reduce", pieces)

        def end() -> None:
            own = total()
            others = [rank for rank in range(self.size) if rank != self.rank]
            self._swap("all_reduce", dict.fromkeys(others, own), {rank: pieces[rank] for rank in others})
            pieces[self.rank].copy_(own)

        return end

    def _lengths(self, going: list[int], home: torch.device) -> list[int]:
        out = torch.tensor(going, device=home, dtype=torch.int64)
        into = torch.empty_like(out)
        peers = range(self.size)
        self._swap("lengths", {r: out[r : r + 1] for r in peers}, {r: into[r : r + 1] for r in peers})
        coming: list[int] = into.tolist()
        return coming

    def _swap(self, name: str, sends: Mapping[int, Tensor], recvs: Mapping[int, Tensor]) -> None:
        self._post(name, sends, recvs)()

    def _post(
        self, name: str, sends: Mapping[int, Tensor], recvs: Mapping[int, Tensor]
    ) -> Callable[[], None]:
        """Post all sends and receives at once; the returned function waits for them.

        Messages between two ranks arrive in order, so several may be pending.
        """
        sending: list[Message] = []
        receiving: list[Message] = []
        copies: list[tuple[Tensor, Tensor]] = []
        if self.rank in recvs:
            recvs[self.rank].copy_(sends[self.rank])
        for distance in range(1, self.size):  # from the next rank on, so that no link is idle
            to, source = (self.rank + distance) % self.size, (self.rank - distance) % self.size
            if to in sends and sends[to].numel():
                sending.append((to, sends[to].contiguous().to(self._wire_device(sends[to]))))
            if source in recvs and recvs[source].numel():
                room = coming = recvs[source]
                device = self._wire_device(room)
                if not room.is_contiguous() or room.device != device:
                    coming = torch.empty(room.shape, dtype=room.dtype, device=device)
                    copies.append((room, coming))
                receiving.append((source, coming))
        with self._peers(name):
            works = self._start(sending, receiving) if sending or receiving else ()

        def end() -> None:
            self._wait(name, works)
            for room, coming in copies:
                room.copy_(coming)

        return end

    def _wait(self, name: str, works: Sequence[dist.Work]) -> None:
        with self._peers(name):
            for work in works:
                work.wait()

    @contextmanager
    def _peers(self, name: str) -> Iterator[None]:
        try:
            yield
        except RuntimeError as error:
            if "Duplicate GPU" in str(error):
                raise PeerError(
                    f"rank {self.rank} and another rank use one GPU, which NCCL refuses: call"
                    " torch.cuda.set_device(local_rank) before the first collective, or use the gloo backend"
                ) from error
            why = str(error).partition("This is typically")[0].rstrip(". ")  # without gloo's advice
            raise PeerError(
                f"a peer of rank {self.rank} died, left or was late: {name} of {self.size} ranks: {why}"
            ) from error


def rooms(x: Tensor, lengths: Sequence[int]) -> list[Tensor]:
    """Return empty tensors like x; on a GPU in one buffer, for one kernel."""
    if x.is_cpu:
        return [x.new_empty(length) for length in lengths]
    return list(torch.split(x.new_empty(sum(lengths)), list(lengths)))

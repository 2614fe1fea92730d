"""Metered: counts the bytes and seconds of any Comm.

Payload is what the caller hands over or gets, once, whatever the collective makes of it:

    collective       payload sent            payload received           messages of rank r (see `link`)
    all_reduce       x                       the result                 2(N-1)/N of x each way
    all_gather       x                       the others' x              x to each other rank
    reduce_scatter   chunks for others       the result                 one chunk to each other rank
    all_to_all       chunks for others       the others' chunks         one chunk to each other rank
    broadcast        x on the root           x elsewhere                x to its children in a tree
    exchange         what goes to others     what comes from others     one to each peer

all_gather and all_to_all also tell 8 bytes of length to each other rank. Wire is the messages on a TCP/IP
link, with headers and acknowledgements: those of `TorchComm` on gloo, also where another Comm is wrapped.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import reduce

from torch import Tensor

from laconic.comm import link
from laconic.comm.comm import Comm, ReduceOp
from laconic.comm.counter import Counter
from laconic.comm.link import Link, Messages


@dataclass(frozen=True)
class Tally:
    """Calls, bytes and seconds of one kind of collective."""

    calls: int = 0
    payload_sent: int = 0
    payload_received: int = 0
    wire_sent: int = 0
    wire_received: int = 0
    seconds: float = 0.0

    def plus(self, other: Tally) -> Tally:
        """The sum of both."""
        return Tally(
            self.calls + other.calls,
            self.payload_sent + other.payload_sent,
            self.payload_received + other.payload_received,
            self.wire_sent + other.wire_sent,
            self.wire_received + other.wire_received,
            self.seconds + other.seconds,
        )


@dataclass(frozen=True)
class Meter(Tally):
    """The sum of all collectives; `parts` has each by (phase, collective)."""

    parts: Mapping[tuple[str, str], Tally] = field(default_factory=dict)


class Metered(Comm):
    """`comm`, counted. The groups that `split` makes are counted here too; making them is not.

    >>> import torch
    >>> from laconic.comm.loopback import Loopback
    >>> alone = Metered(Loopback.world(1)[0])
    >>> alone.all_reduce(torch.ones(25)).numel(), alone.snapshot().payload_sent
    (25, 100)
    """

    def __init__(
        self, comm: Comm, clock: Callable[[], float] = time.perf_counter, link: Link | None = None
    ) -> None:
        self.comm, self.rank, self.size = comm, comm.rank, comm.size
        self._books = _Books(clock, link or Link())

    @property
    def seats(self) -> Sequence[int]:
        return self.comm.seats

    @property
    def began(self) -> int:
        return self.comm.began

    def snapshot(self) -> Meter:
        """What was counted so far. Any thread may ask."""
        with self._books.lock:
            parts = dict(self._books.parts)
        return Meter(**vars(reduce(Tally.plus, parts.values(), Tally())), parts=parts)

    def reset(self) -> None:
        """Start again from nothing."""
        with self._books.lock:
            self._books.parts.clear()

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Count the collectives inside under this name. For the thread that communicates; they nest."""
        outer, self._books.phase = self._books.phase, name
        try:
            yield
        finally:
            self._books.phase = outer

    def mark(self) -> None:
        """From here on counts what `since_mark` tells."""
        self._books.first, self._books.busy = None, 0.0

    def since_mark(self) -> tuple[float | None, float]:
        """When the first collective after the mark began, if any did, and the seconds spent in all."""
        return self._books.first, self._books.busy

    def all_reduce(self, x: Tensor, op: ReduceOp = "sum") -> Tensor:
        began, n = self._books.clock(), x.nbytes
        result = self.comm.all_reduce(x, op)
        self._books.enter("all_reduce", began, n, n, link.all_reduce(n, self.size))
        return result

    def begin_all_reduce(self, x: Tensor) -> Callable[[], Tensor]:
        """Counted when it ends, with the seconds that its end takes."""
        wait = self.comm.begin_all_reduce(x)

        def end() -> Tensor:
            began, n = self._books.clock(), x.nbytes
            result = wait()
            self._books.enter("all_reduce", began, n, n, link.all_reduce(n, self.size))
            return result

        return end

    def reduce_scatter(self, chunks: Sequence[Tensor]) -> Tensor:
        began = self._books.clock()
        result = self.comm.reduce_scatter(chunks)
        going = self._others(chunks)
        messages = link.direct(going, [result.nbytes] * (self.size - 1))
        self._books.enter("reduce_scatter", began, sum(going), result.nbytes, messages)
        return result

    def all_gather(self, x: Tensor) -> list[Tensor]:
        began = self._books.clock()
        came = self.comm.all_gather(x)
        coming = self._others(came)
        messages = link.direct([x.nbytes] * (self.size - 1), coming, lengths=self.size - 1)
        self._books.enter("all_gather", began, x.nbytes, sum(coming), messages)
        return came

    def all_to_all(self, chunks: Sequence[Tensor]) -> list[Tensor]:
        began = self._books.clock()
        came = self.comm.all_to_all(chunks)
        going, coming = self._others(chunks), self._others(came)
        messages = link.direct(going, coming, lengths=self.size - 1)
        self._books.enter("all_to_all", began, sum(going), sum(coming), messages)
        return came

    def broadcast(self, x: Tensor, root: int = 0) -> Tensor:
        began, n = self._books.clock(), x.nbytes
        self.comm.broadcast(x, root)
        place = (self.rank - root) % self.size
        messages = link.broadcast(n, self.size, place)
        self._books.enter("broadcast", began, n * (place == 0), n * (place != 0), messages)
        return x

    def exchange(self, sends: Mapping[int, Tensor], recvs: Mapping[int, Tensor]) -> None:
        began = self._books.clock()
        self.comm.exchange(sends, recvs)
        going, coming = (
            [x.nbytes for peer, x in tensors.items() if peer != self.rank] for tensors in (sends, recvs)
        )
        self._books.enter("exchange", began, sum(going), sum(coming), link.direct(going, coming))

    def split(self, color: int) -> Metered:
        return self.over(self.comm.split(color))

    def counter(self) -> Counter:
        """The Comm's own: what its questions cost is not counted."""
        return self.comm.counter()

    def over(self, comm: Comm) -> Metered:
        """Another Comm that is counted here too."""
        other = Metered(comm)
        other._books = self._books
        return other

    def _others(self, chunks: Sequence[Tensor]) -> list[int]:
        """Bytes of each rank's chunk but this one's."""
        return [chunk.nbytes for rank, chunk in enumerate(chunks) if rank != self.rank]


class _Books:
    """What a Metered and the groups split off it write into."""

    def __init__(self, clock: Callable[[], float], link: Link) -> None:
        self.clock, self.link = clock, link
        self.lock = threading.Lock()
        self.parts: dict[tuple[str, str], Tally] = {}
        self.phase = ""
        self.first: float | None = None
        self.busy = 0.0

    def enter(self, name: str, began: float, sent: int, received: int, messages: Messages) -> None:
        """One call that is done."""
        seconds = self.clock() - began
        if self.first is None:
            self.first = began
        self.busy += seconds
        tally = Tally(1, sent, received, self.link.sent(messages), self.link.received(messages), seconds)
        key = (self.phase, name)
        with self.lock:
            self.parts[key] = self.parts.get(key, Tally()).plus(tally)

"""Metered: counts the bytes and seconds of any Comm.

Payload is the tensors that the caller sends or receives, counted once:

    collective       payload sent            payload received           messages of rank r (see `wire_model`)
    all_reduce       x                       the result                 2(N-1)/N of x each way
    all_gather       x                       the others' x              x to each other rank
    reduce_scatter   chunks for others       the result                 one chunk to each other rank
    all_to_all       chunks for others       the others' chunks         one chunk to each other rank
    broadcast        x on the root           x elsewhere                x to its children in a tree
    exchange         tensors for others      tensors from others       one to each peer

all_gather and all_to_all also send 8 bytes of length to each other rank. Bare bytes count every copy of a
message; network bytes also headers and acknowledgements on TCP/IP.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from operator import add
from typing import Any

import torch
from torch import Tensor
from torch.cuda import Event

from laconic.comm import wire_model as link
from laconic.comm.comm import Comm, ReduceOp
from laconic.comm.counter import Counter
from laconic.comm.wire_model import Messages, PacketModel


@dataclass(frozen=True)
class Tally:
    calls: int = 0
    payload_sent: int = 0
    payload_received: int = 0
    network_sent: int = 0
    network_received: int = 0
    bare_sent: int = 0
    seconds: float = 0.0


@dataclass(frozen=True)
class Meter(Tally):
    """Sum of all collectives; `parts` holds each one by (phase, collective)."""

    parts: Mapping[tuple[str, str], Tally] = field(default_factory=dict)

    @classmethod
    def of(cls, parts: Mapping[tuple[str, str], Tally]) -> Meter:
        totals = {name: sum(vars(part)[name] for part in parts.values()) for name in vars(Tally())}
        return cls(**totals, parts=parts)


class StreamClock:
    """Clock of events on a GPU's current stream, cached because the lookup takes longer."""

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.current_stream(device)

    def now(self) -> Event:
        event = Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record(self._stream)
        return event


class Metered(Comm):
    """Wrapper of a Comm that counts its traffic, also in groups made by `split`, but not the split itself.

    Args:
        comm: The wrapped Comm.
        clock: Returns seconds; default: `time.perf_counter`.
        link: The packets of the link; default: Ethernet with an MTU of 1500 bytes.

    >>> import torch
    >>> from laconic.comm.loopback import Loopback
    >>> alone = Metered(Loopback.world(1)[0])
    >>> alone.all_reduce(torch.ones(25)).numel(), alone.snapshot().payload_sent
    (25, 100)
    """

    def __init__(
        self, comm: Comm, clock: Callable[[], float] = time.perf_counter, link: PacketModel | None = None
    ) -> None:
        self.comm, self.rank, self.size = comm, comm.rank, comm.size
        self._books = _Books(clock, link or PacketModel())

    @property
    def original_ranks(self) -> Sequence[int]:
        return self.comm.original_ranks

    @property
    def original_size(self) -> int:
        return self.comm.original_size

    def snapshot(self) -> Meter:
        with self._books.lock:
            parts = {key: Tally(*fields) for key, fields in self._books.parts.items()}
        return Meter.of(parts)

    def dense_sent(self, nbytes: int) -> int:
        """Return the network bytes that this rank would send to all-reduce `nbytes`."""
        return self._books.link.sent(link.all_reduce(nbytes, self.size))

    def dense_scattered(self, nbytes: int) -> int:
        """Return the network bytes that this rank would send to reduce-scatter `nbytes`."""
        chunks = [-(-nbytes // self.size)] * (self.size - 1)
        return self._books.link.sent(link.direct(chunks, chunks))

    def reset(self) -> None:
        with self._books.lock:
            self._books.parts.clear()

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Count the collectives inside `with` under this name. For the communicating thread; phases nest."""
        outer, self._books.phase = self._books.phase, name
        try:
            yield
        finally:
            self._books.phase = outer

    def mark(self, clock: StreamClock | None = None) -> None:
        """Start the interval of `since_mark` and, with a `clock`, of `events_since_mark`."""
        self._books.first, self._books.busy = None, 0.0
        self._books.stream_clock, self._books.events = clock, []

    def since_mark(self) -> tuple[float | None, float]:
        """Return the start of the first collective after the mark, or None, and the total seconds."""
        return self._books.first, self._books.busy

    def events_since_mark(self) -> list[tuple[Event, Event]]:
        return self._books.events

    def all_reduce(self, x: Tensor, op: ReduceOp = "sum") -> Tensor:
        return self._sum(x, lambda: self.comm.all_reduce(x, op))

    def begin_all_reduce(self, x: Tensor) -> Callable[[], Tensor]:
        """Start a sum, counted at its end with the seconds of waiting."""
        return partial(self._sum, x, self.comm.begin_all_reduce(x))

    def _sum(self, x: Tensor, end: Callable[[], Tensor]) -> Tensor:
        start, n = self._books.start(), x.nbytes
        result = end()
        self._books.enter("all_reduce", start, n, n, link.all_reduce(n, self.size))
        return result

    def reduce_scatter(self, chunks: Sequence[Tensor]) -> Tensor:
        start = self._books.start()
        result = self.comm.reduce_scatter(chunks)
        going = self._others(chunks)
        messages = link.direct(going, [result.nbytes] * (self.size - 1))
        self._books.enter("reduce_scatter", start, sum(going), result.nbytes, messages)
        return result

    def all_gather(self, x: Tensor) -> list[Tensor]:
        start = self._books.start()
        received = self.comm.all_gather(x)
        coming = self._others(received)
        messages = link.direct([x.nbytes] * (self.size - 1), coming, lengths=self.size - 1)
        self._books.enter("all_gather", start, x.nbytes, sum(coming), messages)
        return received

    def all_to_all(self, chunks: Sequence[Tensor]) -> list[Tensor]:
        start = self._books.start()
        received = self.comm.all_to_all(chunks)
        going, coming = self._others(chunks), self._others(received)
        messages = link.direct(going, coming, lengths=self.size - 1)
        self._books.enter("all_to_all", start, sum(going), sum(coming), messages)
        return received

    def broadcast(self, x: Tensor, root: int = 0) -> Tensor:
        start, n = self._books.start(), x.nbytes
        self.comm.broadcast(x, root)
        place = (self.rank - root) % self.size
        messages = link.broadcast(n, self.size, place)
        self._books.enter("broadcast", start, n * (place == 0), n * (place != 0), messages)
        return x

    def exchange(self, sends: Mapping[int, Tensor], recvs: Mapping[int, Tensor]) -> None:
        start = self._books.start()
        self.comm.exchange(sends, recvs)
        going, coming = (
            [x.nbytes for peer, x in tensors.items() if peer != self.rank] for tensors in (sends, recvs)
        )
        self._books.enter("exchange", start, sum(going), sum(coming), link.direct(going, coming))

    def split(self, color: int) -> Metered:
        return self.over(self.comm.split(color))

    def counter(self) -> Counter:
        return self.comm.counter()

    def over(self, comm: Comm) -> Metered:
        other = Metered(comm)
        other._books = self._books
        return other

    def _others(self, chunks: Sequence[Tensor]) -> list[int]:
        return [chunk.nbytes for rank, chunk in enumerate(chunks) if rank != self.rank]


class _Books:
    def __init__(self, clock: Callable[[], float], link: PacketModel) -> None:
        self.clock, self.link = clock, link
        self.lock = threading.Lock()
        self.parts: dict[tuple[str, str], list[Any]] = {}  # the fields of a Tally
        self.phase = ""
        self.first: float | None = None
        self.busy = 0.0
        self.stream_clock: StreamClock | None = None
        self.events: list[tuple[Event, Event]] = []
        self._begun: Event | None = None

    def start(self) -> float:
        if self.stream_clock is not None:
            self._begun = self.stream_clock.now()
        return self.clock()

    def enter(self, name: str, start: float, sent: int, received: int, messages: Messages) -> None:
        seconds = self.clock() - start
        if self.first is None:
            self.first = start
        self.busy += seconds
        if self.stream_clock is not None and self._begun is not None:
            self.events.append((self._begun, self.stream_clock.now()))
        network = (self.link.sent(messages), self.link.received(messages))
        fields = (1, sent, received, *network, sum(messages.sent), seconds)
        key = (self.phase, name)
        with self.lock:
            before = self.parts.get(key)
            self.parts[key] = [*fields] if before is None else [*map(add, before, fields)]

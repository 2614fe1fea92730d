"""A rehearsal: a method exchanges gradients in small groups of threads, and what it does is written down.

No formula is kept for any method: its messages are counted where it hands them over, its seconds where it
computes, and `Growth` carries both to any number of workers. So a method of a user's own is planned for like
ours. Seconds are those that a rank's thread computes, so a busy machine makes them no longer; and only one
rank computes at a time, so that the others do not take its caches.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import TypeVar

import torch

from laconic.comm.loopback import Loopback
from laconic.comm.metered import Metered
from laconic.core.errors import SpecError
from laconic.core.layout import Layout
from laconic.plan.growth import Growth
from laconic.plan.stage import Gradients, InTurn, StandIn, Watch
from laconic.strategies.exchange import Exchange
from laconic.strategies.method import Method

SIZES = (2, 4, 8)
STEPS = 3  # in each group; the first is not counted
MOST = 1 << 23  # elements of the model that rehearses: a larger one sends some of its tensors
CLOCK = 0.3  # how far measured seconds may be from the growth that is read into them

T = TypeVar("T")


@dataclass(frozen=True)
class Traffic:
    """One kind of collective in a step: how often it is called, and wire bytes of the fuller direction."""

    calls: Growth
    nbytes: Growth


@dataclass(frozen=True)
class Rehearsed:
    """What an exchange of a whole model asks of one worker, for any number of workers.

    `traffic` by collective; `encode_s` before the first message, `decode_s` between and after messages.
    """

    spec: str
    traffic: Mapping[str, Traffic]
    encode_s: Growth
    decode_s: Growth

    def nbytes(self, size: int) -> float:
        """Bytes on the wire, a step and worker."""
        return sum(each.nbytes.at(size) for each in self.traffic.values())


def rehearse(methods: Iterable[Method], layout: Layout, sizes: Sequence[int] = SIZES) -> Iterator[Rehearsed]:
    """Play each method on gradients of this layout, once warm; on this machine, a thread a worker.

    Raises `SpecError` for one that decides on the link itself.
    """
    methods, part = list(methods), excerpt(layout)
    if adaptive := next((method for method in methods if method.adaptive), None):
        raise SpecError(
            f"{adaptive} decides on the link itself, so no rehearsal tells what it will send: leave it out;"
            " the advice given here is its own policy, with one way for all buckets"
        )
    gradients = Gradients(part)
    for method in methods:
        played = {size: costliest(play(method, part, size, gradients)) for size in sizes}
        yield _learnt(method, played, layout.numel / part.numel)


def _learnt(method: Method, played: Mapping[int, Played], scale: float) -> Rehearsed:
    """How a rank's figures grow, of a model `scale` times as large as the one that was played."""
    kinds = sorted({kind for each in played.values() for kind in each.calls})
    traffic = {
        kind: Traffic(
            Growth.learnt({size: each.calls.get(kind, 0.0) for size, each in played.items()}),
            Growth.learnt({size: each.nbytes.get(kind, 0.0) for size, each in played.items()}) * scale,
        )
        for kind in kinds
    }
    encode_s = Growth.learnt({size: each.encode_s for size, each in played.items()}, CLOCK)
    decode_s = Growth.learnt({size: each.decode_s for size, each in played.items()}, CLOCK)
    return Rehearsed(repr(method), traffic, encode_s * scale, decode_s * scale)


def excerpt(layout: Layout, most: int = MOST) -> Layout:
    """A layout of at most `most` elements: the first and the last tensor, and of the others every so many.

    >>> excerpt(Layout.of((f"w{i}", (10, 10)) for i in range(9)), most=500).numel
    500
    """
    if layout.numel <= most:
        return layout
    entries = list(layout)
    for stride in range(2, len(entries) + 1):
        kept = [*entries[:-1:stride], entries[-1]]
        if sum(entry.numel for entry in kept) <= most:
            return Layout.of((entry.name, entry.shape) for entry in kept)
    return Layout.of((entry.name, (1, min(entry.numel, most // 2))) for entry in (entries[0], entries[-1]))


@dataclass(frozen=True)
class Played:
    """Figures of one rank in one group, a step."""

    calls: Mapping[str, float]
    nbytes: Mapping[str, float]
    encode_s: float
    decode_s: float


def costliest(ranks: Sequence[Played]) -> Played:
    """The largest of each figure."""

    def largest(figures: Sequence[Mapping[str, float]]) -> dict[str, float]:
        kinds = {kind for each in figures for kind in each}
        return {kind: max(each.get(kind, 0.0) for each in figures) for kind in kinds}

    return Played(
        largest([each.calls for each in ranks]),
        largest([each.nbytes for each in ranks]),
        max(each.encode_s for each in ranks),
        max(each.decode_s for each in ranks),
    )


def play(method: Method, layout: Layout, size: int, gradients: Gradients) -> list[Played]:
    """Every rank's figures in one group of threads."""
    baton = threading.Lock()

    def alone(comm: Loopback) -> Played:
        with baton:
            return _one(method, layout, InTurn(comm, baton, Watch()), gradients)

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        return Loopback.run(size, alone, timeout_s=600.0)
    finally:
        torch.set_num_threads(threads)


def _one(method: Method, layout: Layout, inner: InTurn, gradients: Gradients) -> Played:
    comm, watch = Metered(inner), inner.watch
    exchange = Exchange(method, layout, comm, StandIn())
    exchange.step = method.warm_at
    bucket = torch.empty(layout.numel)
    encode_s, decode_s = [], []
    for step in range(STEPS):
        gradients.write_(bucket, comm.rank, step)
        if step == 1:
            comm.reset()
        watch.start()
        exchange.begin()
        exchange.mean_(bucket, layout)
        exchange.end()
        watch.stop()
        encode_s.append(watch.before_s)
        decode_s.append(watch.after_s)
    calls: dict[str, float] = {}
    nbytes: dict[str, float] = {}
    for (_, kind), tally in comm.snapshot().parts.items():
        counted = STEPS - 1
        calls[kind] = calls.get(kind, 0.0) + tally.calls / counted
        nbytes[kind] = nbytes.get(kind, 0.0) + max(tally.wire_sent, tally.wire_received) / counted
    return Played(calls, nbytes, median(encode_s[1:]), median(decode_s[1:]))

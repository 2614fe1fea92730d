"""Rehearsal of the boundary of two stages: a micro-batch is coded forward and backward.

A coding that stores samples is rehearsed at a first and a later visit, between which activations change by a
tenth.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import median

import torch
from torch import Tensor

from laconic.codecs.dense import Dense
from laconic.comm.wire_model import PacketModel
from laconic.data.memory import InRam
from laconic.pipeline.changes import channel_of
from laconic.pipeline.channel import Channel, Visit
from laconic.pipeline.crossing import Crossing
from laconic.pipeline.message import HEADER
from laconic.tools.plan.pipeline import Crossed

PACKETS = PacketModel()
PLAYS = 3  # of each message, after an uncounted one
CHANGED = 0.1  # of the standard deviation, between visits
MAX_ELEMENTS = 1 << 22  # a larger micro-batch rehearses with some of its samples


@dataclass(frozen=True)
class Visited:
    """Cost of a micro-batch that crosses. `up`, `down`: bytes without packet headers.

    `first`: samples are new to the coding.
    """

    up: int
    down: int
    encode_s: float = 0.0
    decode_s: float = 0.0
    first: bool = False

    @property
    def wire(self) -> Crossed:
        return Crossed(PACKETS.forth(self.up), PACKETS.forth(self.down), self.encode_s, self.decode_s)

    def sent(self, micro_batches: int) -> tuple[int, int]:
        """Return the network bytes of the earlier and the later worker in a step.

        >>> Visited(up=1_000_000, down=0).sent(1)
        (1045948, 23178)
        """
        forth, back = PACKETS.forth, PACKETS.back
        return (
            micro_batches * (forth(self.up) + back(self.down)),
            micro_batches * (forth(self.down) + back(self.up)),
        )


def rehearse_crossing(crossing: Crossing, shape: Sequence[int]) -> list[Visited]:
    """Return a micro-batch's costs, at later visits and at first ones. `shape`: samples first.

    >>> from laconic.pipeline.crossing import crossing
    >>> [visited.up for visited in rehearse_crossing(crossing("ac_sgd(4, 8)"), (4, 64, 128))]
    [65560, 18456]
    """
    if crossing.dense:  # torch sends no header
        nbytes = 4 * torch.Size(shape).numel()
        return [Visited(nbytes, nbytes)]
    rows = min(shape[0], max(1, MAX_ELEMENTS // max(1, torch.Size(shape[1:]).numel())))
    part = torch.Size((rows, *shape[1:]))
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        up = _Way(crossing, part, forward=True)
        down = _Way(crossing, part, forward=False)
        back = down.later()
        visits = [(up.first(), True), (up.later(), False)] if crossing.remembers else [(up.later(), False)]
    finally:
        torch.set_num_threads(threads)
    scale = shape[0] / rows
    return [
        Visited(
            HEADER.size + round(scale * there.nbytes),
            HEADER.size + round(scale * back.nbytes),
            scale * (there.encode_s + back.encode_s) / 2,
            scale * (there.decode_s + back.decode_s) / 2,
            first,
        )
        for there, first in visits
    ]


@dataclass(frozen=True)
class _Message:
    nbytes: float
    encode_s: float
    decode_s: float


class _Way:
    def __init__(self, crossing: Crossing, shape: torch.Size, *, forward: bool) -> None:
        self._rng = torch.Generator("cpu").manual_seed(0)
        self._x = torch.randn(shape, generator=self._rng, dtype=torch.float32, device="cpu")
        self._out, self._ids = (
            torch.empty(shape, dtype=torch.float32, device="cpu"),
            torch.arange(shape[0], dtype=torch.int64, device="cpu"),
        )
        coding = crossing.forward if forward else crossing.backward
        rows = partial(_in_ram, shape[0])
        self._make = partial(channel_of, coding, "0>1:0", shape, torch.float32, 0, Dense(), shape[0], rows)
        self._sides = self._make(), self._make()
        self._step = 0

    def first(self) -> _Message:
        return self._played(lambda: (self._make(), self._make()))

    def later(self) -> _Message:
        return self._played(lambda: self._sides)

    def _played(self, sides: Callable[[], tuple[Channel, Channel]]) -> _Message:
        plays = [self._once(*sides()) for _ in range(PLAYS + 1)][1:]
        return _Message(
            median(play.nbytes for play in plays),
            median(play.encode_s for play in plays),
            median(play.decode_s for play in plays),
        )

    def _once(self, sender: Channel, receiver: Channel) -> _Message:
        self._x += CHANGED * torch.randn(
            self._x.shape, generator=self._rng, dtype=torch.float32, device="cpu"
        )
        self._step += 1
        visit = Visit(self._step, 0, self._ids)
        began = time.thread_time()
        body: Tensor = sender.encode(self._x, visit)
        encoded = time.thread_time()
        receiver.decode_(body, self._out, visit)
        return _Message(body.numel(), encoded - began, time.thread_time() - encoded)


def _in_ram(samples: int, name: str, nbytes: int) -> InRam:
    return InRam(samples, nbytes)

"""Dealing tensors to ranks: which rank serves which, and a bucket's messages to each."""

from __future__ import annotations

import heapq
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from laconic.core.codec import Codec
from laconic.core.layout import Layout
from laconic.core.turn import Turn
from laconic.reducers.reducer import Sent, SentMessage


def homes(layout: Layout, size: int) -> dict[str, int]:
    """The rank that serves each tensor: the largest first, each to the rank with the fewest elements.

    >>> homes(Layout.of([("a", (6,)), ("b", (5,)), ("c", (4,)), ("d", (2,))]), size=2)
    {'a': 0, 'b': 1, 'c': 1, 'd': 0}
    """
    loads = [(0, rank) for rank in range(size)]
    dealt: dict[str, int] = {}
    for entry in sorted(layout, key=lambda entry: (-entry.numel, entry.name)):
        load, rank = loads[0]
        heapq.heapreplace(loads, (load + entry.numel, rank))
        dealt[entry.name] = rank
    return dealt


@dataclass(frozen=True)
class Dealt(Sent):
    """A share in parts: one message to each rank, and what needs none."""

    messages: tuple[Sent, ...]

    def add_to_(self, x: Tensor, alpha: float = 1.0) -> Tensor:
        for message in self.messages:
            message.add_to_(x, alpha)
        return x

    def clear_(self, memory: Tensor) -> Tensor:
        for message in self.messages:
            message.clear_(memory)
        return memory


@dataclass(frozen=True)
class Deal:
    """The tensors of one bucket, dealt to the ranks that serve them."""

    bucket: Layout
    served: tuple[Layout, ...]  # by each rank, at the bucket's offsets
    home: Layout  # by this rank, one after the other from offset 0

    @classmethod
    def of(cls, bucket: Layout, homes: Mapping[str, int], rank: int, size: int) -> Deal:
        """The bucket dealt by these homes, as `rank` of `size` sees it."""
        names: list[list[str]] = [[] for _ in range(size)]
        for name in bucket.names:
            names[homes[name]].append(name)
        served = tuple(bucket.named(each) for each in names)
        return cls(bucket, served, Layout.of((entry.name, entry.shape) for entry in served[rank]))

    def encode(self, x: Tensor, codec: Codec, turn: Turn) -> list[Tensor]:
        """Flat x in the bucket's coordinates as one message to each rank, as `message` makes it."""
        return [message(x, part, codec, turn) for part in self.served]

    def share(self, wires: list[Tensor], codec: Codec) -> Dealt:
        """What these messages are of this rank's x."""
        parts = zip(wires, self.served, strict=True)
        return Dealt(tuple(SentMessage(codec, wire, part.segments) for wire, part in parts if part.numel))


def message(x: Tensor, layout: Layout, codec: Codec, turn: Turn) -> Tensor:
    """Wire of these tensors of flat x: one byte where none has an element, empty where there is none."""
    if not layout.numel:
        return x.new_zeros(min(1, len(layout)), dtype=torch.uint8)
    return codec.encode_layout(x, layout, turn)

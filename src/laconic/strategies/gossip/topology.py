"""Topology: who sends to whom at each step, a pure function that every rank evaluates alike.

Nothing is agreed on by messages: from (size, step) each rank knows the whole graph, and so its own peers.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable
from functools import lru_cache
from typing import NamedTuple

from laconic.core import arguments
from laconic.core.errors import SpecError
from laconic.core.spec import Spec

ENDLESS = 100  # steps that stand for a period, of a topology that never repeats
Arrow = tuple[int, int]  # (from, to)


class Peers(NamedTuple):
    """The ranks that a rank sends to at a step, and those it receives from: others, each once, ascending."""

    out: tuple[int, ...]
    into: tuple[int, ...]


class Topology(Spec):
    """A directed graph over the ranks for each step.

    >>> from laconic.core.spec import parse
    >>> ring = parse("ring()")
    >>> ring.check(4)
    >>> ring.peers(rank=0, size=4, step=7)
    Peers(out=(1, 3), into=(1, 3))
    """

    @abstractmethod
    def arrows(self, size: int, step: int) -> Iterable[Arrow]:
        """Every message of a step below the period. Repeated ones, and those to oneself, do not count."""

    def period(self, size: int) -> int | None:
        """Steps after which it repeats; None: never."""
        return 1

    @property
    def symmetric(self) -> bool:
        """Whether, at every step and size, those who send to a rank are those that it sends to."""
        return False

    def fits(self, size: int) -> None:
        """Raises `SpecError` for a number of ranks, 2 or more, that it is not made for."""

    def peers(self, rank: int, size: int, step: int) -> Peers:
        """Whom this rank sends to and receives from at this step, among so many ranks that pass `check`."""
        period = self.period(size)
        return graph_at(self, size, step % period if period else step)[rank]

    def span(self, size: int) -> range:
        """The steps of one period; the first ENDLESS ones where it never repeats."""
        return range(self.period(size) or ENDLESS)

    def check(self, size: int) -> None:
        """Raises `SpecError` unless so many ranks can gossip: what one knows reaches all within periods."""
        way_out = "gossip is between workers: start more of them"
        arguments.whole(f"{self!r}: the number of ranks", size, least=2, way_out=way_out)
        self.fits(size)
        graphs = [graph_at(self, size, step) for step in self.span(size)]
        sends = [{to for graph in graphs for to in graph[rank].out} for rank in range(size)]
        hears = [{source for graph in graphs for source in graph[rank].into} for rank in range(size)]
        for reached, path in (
            (reach(sends), "from rank 0 to rank {}"),
            (reach(hears), "from rank {} to rank 0"),
        ):
            if lost := sorted(set(range(size)) - reached):
                raise SpecError(
                    f"{self!r} does not connect {size} ranks: no path leads {path.format(lost[0])};"
                    " add edges until every rank reaches every other, or take ring() or exponential()"
                )


@lru_cache(maxsize=64)
def graph_at(topology: Topology, size: int, step: int) -> tuple[Peers, ...]:
    """The peers of every rank at a step below the period, in rank order."""
    out: list[set[int]] = [set() for _ in range(size)]
    into: list[set[int]] = [set() for _ in range(size)]
    for source, to in topology.arrows(size, step):
        if source != to:
            out[source].add(to)
            into[to].add(source)
    return tuple(Peers(tuple(sorted(a)), tuple(sorted(b))) for a, b in zip(out, into, strict=True))


def reach(neighbours: list[set[int]]) -> set[int]:
    """All that can be reached from 0, with 0 itself.

    >>> reach([{1}, {0}, {1}])
    {0, 1}
    """
    found, new = {0}, [0]
    while new:
        fresh = neighbours[new.pop()] - found
        found |= fresh
        new += fresh
    return found

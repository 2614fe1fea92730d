"""Topology: senders and receivers of each step, a pure function of (size, step)."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Iterator
from functools import lru_cache
from typing import NamedTuple

from laconic.core import arguments
from laconic.core.errors import SpecError
from laconic.core.spec import Spec

ENDLESS = 100  # steps that stand for an endless period
Arrow = tuple[int, int]  # (from, to)


class Peers(NamedTuple):
    """Ranks that a rank sends to and receives from in a step: without itself, unique, ascending."""

    out: tuple[int, ...]
    into: tuple[int, ...]


class Topology(Spec):
    """Directed graph over the ranks for each step.

    >>> from laconic.core.spec import parse
    >>> ring = parse("ring()")
    >>> ring.check(4)
    >>> ring.peers(rank=0, size=4, step=7)
    Peers(out=(1, 3), into=(1, 3))
    """

    @abstractmethod
    def arrows(self, size: int, step: int) -> Iterable[Arrow]:
        """Return all messages of a step below the period; repetitions and messages to oneself are ignored."""

    def period(self, size: int) -> int | None:
        """Return the steps after which the graph repeats; None: never."""
        return 1

    @property
    def symmetric(self) -> bool:
        """Whether edges go both ways at every step and size."""
        return False

    def check_fits(self, size: int) -> None:
        """Raise `SpecError` if the graph is not defined for this many ranks, 2 or more."""

    def peers(self, rank: int, size: int, step: int) -> Peers:
        period = self.period(size)
        return graph_at(self, size, step % period if period else step)[rank]

    def span(self, size: int) -> range:
        return range(self.period(size) or ENDLESS)

    def check(self, size: int) -> None:
        """Raise `SpecError` unless paths connect every two ranks in both directions."""
        hint = "gossip is between workers: start more of them"
        arguments.whole(f"{self!r}: the number of ranks", size, least=2, hint=hint)
        self.check_fits(size)
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
                    " add edges until every rank reaches every other, or use ring() or exponential()"
                )


@lru_cache(maxsize=64)
def graph_at(topology: Topology, size: int, step: int) -> tuple[Peers, ...]:
    out: list[set[int]] = [set() for _ in range(size)]
    into: list[set[int]] = [set() for _ in range(size)]
    for source, to in topology.arrows(size, step):
        if source != to:
            out[source].add(to)
            into[to].add(source)
    return tuple(Peers(tuple(sorted(a)), tuple(sorted(b))) for a, b in zip(out, into, strict=True))


def reach(neighbours: list[set[int]]) -> set[int]:
    """Return all ranks reachable from 0, including 0.

    >>> reach([{1}, {0}, {1}])
    {0, 1}
    """
    found, new = {0}, [0]
    while new:
        fresh = neighbours[new.pop()] - found
        found |= fresh
        new += fresh
    return found


class Shifts(Topology):
    """Graph whose ranks all send to the same distances ahead."""

    @abstractmethod
    def distances(self, size: int, step: int) -> Iterable[int]:
        """Return distances ahead, modulo size; negative is behind."""

    def arrows(self, size: int, step: int) -> Iterator[Arrow]:
        for distance in self.distances(size, step):
            for rank in range(size):
                yield rank, (rank + distance) % size


class Undirected(Topology):
    @abstractmethod
    def links(self, size: int, step: int) -> Iterable[Arrow]:
        """Return the two ends of each link."""

    @property
    def symmetric(self) -> bool:
        return True

    def arrows(self, size: int, step: int) -> Iterator[Arrow]:
        for one, other in self.links(size, step):
            yield one, other
            yield other, one


def powers(base: int, size: int) -> list[int]:
    """Return 1, base, base^2, ... below size, in integers, as log(243, 3) is 4.999... in floats.

    >>> powers(2, 8), powers(3, 244)
    ([1, 2, 4], [1, 3, 9, 27, 81, 243])
    """
    found = [1]
    while found[-1] * base < size:
        found.append(found[-1] * base)
    return found

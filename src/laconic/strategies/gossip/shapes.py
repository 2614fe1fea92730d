"""Two shapes that most topologies have: the same shifts at every rank, and links that go both ways."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Iterator

from laconic.strategies.gossip.topology import Arrow, Topology


class Shifts(Topology):
    """Every rank sends to those at the same distances ahead of it: as many in-peers as out-peers, for all."""

    @abstractmethod
    def distances(self, size: int, step: int) -> Iterable[int]:
        """How far ahead, modulo size; negative is behind. A multiple of size is oneself, and skipped."""

    def arrows(self, size: int, step: int) -> Iterator[Arrow]:
        for distance in self.distances(size, step):
            for rank in range(size):
                yield rank, (rank + distance) % size


class Undirected(Topology):
    """Every link goes both ways at once, so it is symmetric."""

    @abstractmethod
    def links(self, size: int, step: int) -> Iterable[Arrow]:
        """The two ends of each link, in any order."""

    @property
    def symmetric(self) -> bool:
        return True

    def arrows(self, size: int, step: int) -> Iterator[Arrow]:
        for one, other in self.links(size, step):
            yield one, other
            yield other, one


def powers(base: int, size: int) -> list[int]:
    """1, base, base^2, ... below size: whole numbers throughout, as log(243, 3) is 4.999... in floats.

    >>> powers(2, 8), powers(3, 244)
    ([1, 2, 4], [1, 3, 9, 27, 81, 243])
    """
    found = [1]
    while found[-1] * base < size:
        found.append(found[-1] * base)
    return found

"""Graph: custom edges, at every step."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from laconic.core import arguments
from laconic.core.errors import SpecError
from laconic.core.spec import Status
from laconic.strategies.gossip.topologies import Arrow, Topology


@dataclass(frozen=True, repr=False)
class Graph(Topology):
    """Graph with custom edges.

    Args:
        edges: Pairs of ranks that exchange.
        directed: Whether only the first rank of a pair sends, to the second; default: False.

    >>> Graph(edges=((0, 1), (1, 2), (2, 0)), directed=True).peers(rank=0, size=3, step=0)
    Peers(out=(1,), into=(2,))
    """

    status: ClassVar[Status] = "own"

    edges: tuple[Arrow, ...]
    directed: bool = False

    examples: ClassVar[tuple[str, ...]] = (
        "graph(edges=((0, 1), (1, 2), (2, 3), (3, 0), (0, 2)))",
        "graph(edges=((0, 1), (1, 2), (2, 0)), directed=True)",
    )

    def __post_init__(self) -> None:
        given: Any = self.edges
        if not isinstance(given, (tuple, list)) or not given or not all(map(_pair, given)):
            raise SpecError(
                "graph: edges must be pairs of two different ranks, such as ((0, 1), (1, 2)),"
                f" got {arguments.shown(given)}"
            )
        object.__setattr__(self, "edges", tuple((one, other) for one, other in given))
        arguments.flag("graph: directed", self.directed)
        seen: set[Arrow] = set()
        for one, other in self.edges:
            if (one, other) in seen or (not self.directed and (other, one) in seen):
                raise SpecError(f"graph: edges must be different, got {(one, other)} again; omit one")
            seen.add((one, other))

    @property
    def symmetric(self) -> bool:
        return not self.directed or {(other, one) for one, other in self.edges} == set(self.edges)

    def check_fits(self, size: int) -> None:
        for edge in self.edges:
            if max(edge) >= size:
                raise SpecError(
                    f"graph: edges must name ranks in 0..{size - 1} among {size} ranks, got {edge};"
                    f" omit it, or start {max(map(max, self.edges)) + 1} workers"
                )

    def arrows(self, size: int, step: int) -> tuple[Arrow, ...]:
        back = () if self.directed else tuple((other, one) for one, other in self.edges)
        return (*self.edges, *back)


def _pair(edge: Any) -> bool:
    return (
        isinstance(edge, (tuple, list))
        and len(edge) == 2
        and all(type(rank) is int and 0 <= rank <= arguments.MOST for rank in edge)
        and edge[0] != edge[1]
    )

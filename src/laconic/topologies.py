"""Topologies by name: `topologies.exponential(peers=2)` is the topology that the spec string makes."""

from __future__ import annotations

from typing import TYPE_CHECKING

from laconic.core.lazy import name_makers

if TYPE_CHECKING:
    from laconic.strategies.gossip.topologies.bipartite_exponential import (
        BipartiteExponential as bipartite_exponential,
    )
    from laconic.strategies.gossip.topologies.complete import Complete as complete
    from laconic.strategies.gossip.topologies.directed_exponential import (
        DirectedExponential as directed_exponential,
    )
    from laconic.strategies.gossip.topologies.exponential import Exponential as exponential
    from laconic.strategies.gossip.topologies.graph import Graph as graph
    from laconic.strategies.gossip.topologies.linear import Linear as linear
    from laconic.strategies.gossip.topologies.random_matching import RandomMatching as random_matching
    from laconic.strategies.gossip.topologies.ring import Ring as ring
    from laconic.strategies.gossip.topologies.static_exponential import (
        StaticExponential as static_exponential,
    )
    from laconic.strategies.gossip.topologies.torus import Torus as torus

__all__ = [
    "bipartite_exponential",
    "complete",
    "directed_exponential",
    "exponential",
    "graph",
    "linear",
    "random_matching",
    "ring",
    "static_exponential",
    "torus",
]

name_makers(__name__)

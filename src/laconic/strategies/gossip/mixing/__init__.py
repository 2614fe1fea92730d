"""Mixing weights: the share of its values that a rank keeps, and the shares it sends to its peers.

As a matrix W with entry [to, from], one step of gossip is x <- W x. If its columns sum to 1, the sum of all
values is kept, which suffices for PushSum. If its rows do too, equal values stay equal.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction

import torch
from torch import Tensor

from laconic.core.errors import SpecError
from laconic.strategies.gossip.topologies import Topology

ROUNDING = 1e-12


@dataclass(frozen=True)
class Weights:
    """Shares of a rank in a step: it keeps `own`, sends `out[j]` to j, and receives `into[i]` from i."""

    own: float
    out: dict[int, float]
    into: dict[int, float]


Mixing = Callable[[Topology, int, int, int], Weights]  # (topology, rank, size, step)


def uniform(topology: Topology, rank: int, size: int, step: int) -> Weights:
    """Return shares of 1 / (1 + out-degree): columns sum to 1 on any graph.

    >>> from laconic.core.spec import parse
    >>> uniform(parse("exponential()"), rank=0, size=8, step=1)
    Weights(own=0.5, out={2: 0.5}, into={6: 0.5})
    """
    out, into = topology.peers(rank, size, step)
    share = {i: 1 / (1 + len(topology.peers(i, size, step).out)) for i in (rank, *into)}
    return Weights(share[rank], dict.fromkeys(out, share[rank]), {i: share[i] for i in into})


def metropolis(topology: Topology, rank: int, size: int, step: int) -> Weights:
    """Return shares of 1 / (1 + the larger degree), the rest kept: rows and columns sum to 1.

    Raises `SpecError` unless the graph is symmetric. Xiao and Boyd 2004 (recalled).

    >>> from laconic.core.spec import parse
    >>> metropolis(parse("linear()"), rank=0, size=3, step=0)
    Weights(own=0.6666666666666667, out={1: 0.3333333333333333}, into={1: 0.3333333333333333})
    """
    if not topology.symmetric:
        raise SpecError(
            f"metropolis weights need edges that go both ways at every step, but those of {topology!r} do"
            " not; use ring(), torus() or bipartite_exponential(), or uniform weights"
        )
    neighbours = topology.peers(rank, size, step).out
    most = {j: max(len(neighbours), len(topology.peers(j, size, step).out)) for j in neighbours}
    shares = {j: 1 / (1 + most[j]) for j in neighbours}
    return Weights(1 - sum(shares.values()), shares, dict(shares))


def matrix(weights: Mixing, topology: Topology, size: int, step: int) -> Tensor:
    mixed = torch.zeros(size, size, dtype=torch.float64, device="cpu")
    for rank in range(size):
        own = weights(topology, rank, size, step)
        mixed[rank, rank] = own.own
        for to, share in own.out.items():
            mixed[to, rank] = share
    return mixed


def check_column_stochastic(mixed: Tensor) -> None:
    _check_sums(mixed, 0, "the shares that rank {} keeps and sends")


def check_row_stochastic(mixed: Tensor) -> None:
    _check_sums(mixed, 1, "the shares that rank {} keeps and receives")


def is_regular(topology: Topology, size: int) -> bool:
    """Return whether uniform mixing is exactly doubly stochastic at every step: then w stays 1."""
    for step in topology.span(size):
        graph = [topology.peers(rank, size, step) for rank in range(size)]
        share = [Fraction(1, 1 + len(each.out)) for each in graph]
        if any(share[rank] + sum(share[i] for i in graph[rank].into) != 1 for rank in range(size)):
            return False
    return True


def _check_sums(mixed: Tensor, dim: int, what: str) -> None:
    if bool((mixed < 0).any()):
        to, source = (mixed < 0).nonzero()[0].tolist()
        raise SpecError(
            f"weights must be 0 or more, got {mixed[to, source]:g} from rank {source} to rank {to}"
        )
    sums = mixed.sum(dim)
    off = (sums - 1).abs() > ROUNDING * mixed.shape[0]
    if bool(off.any()):
        rank = int(off.nonzero()[0])
        raise SpecError(f"{what.format(rank)} must sum to 1, got {sums[rank]:.12g}; divide by that sum")

"""Speed of gossip: the step after which all ranks agree, or the rate at which disagreement decays.

k steps of uniform mixing give P x with weights w = P 1; every rank estimates the mean as (P x)_i / w_i. All
are exact when E = P - w 1^T / n = P (I - 1 1^T / n) is zero.
"""

from __future__ import annotations

from math import ceil, log
from typing import NamedTuple

import torch

from laconic.strategies.gossip.mixing import matrix, uniform
from laconic.strategies.gossip.topologies import Topology

NOTHING = 1e-12  # relative to the disagreement of the step before


class Averaging(NamedTuple):
    """Steps after which all agree, or None, and the remaining share of disagreement per step."""

    exact: int | None
    kept: float

    def steps_to(self, share: float) -> int:
        return self.exact or ceil(log(share) / log(self.kept))


def averaging(topology: Topology, size: int) -> Averaging:
    """Return the convergence of uniform mixing on this graph.

    `kept` is |second eigenvalue of P|^(1 / steps), over one period or the first steps.

    >>> from laconic.core.spec import parse
    >>> averaging(parse("exponential()"), 16)
    Averaging(exact=4, kept=0.0)
    >>> averaging(parse("ring()"), 16).steps_to(0.01)
    89
    """
    span = topology.span(size)
    weight = torch.ones(size, dtype=torch.float64, device="cpu")
    left = torch.eye(size, dtype=torch.float64, device="cpu") - 1 / size
    for step in span:
        mixed = matrix(uniform, topology, size, step)
        before = float(left.abs().max())
        weight, left = mixed @ weight, mixed @ left
        left -= weight.outer(left.sum(0)) / size  # removes rounding errors
        if float(left.abs().max()) <= NOTHING * before:
            return Averaging(step + 1, 0.0)
    return Averaging(None, float(torch.linalg.eigvals(left).abs().max()) ** (1 / len(span)))

"""Asynchronous: every replica at its own pace, parameters on servers; a string may say `async`.

Workers push gradients and pull parameters, and nobody waits for a worker (Dean et al. 2012, "Large scale
distributed deep networks"; the groups of one replica of TF-Replicator, Buchlovsky et al. 2019,
arXiv:1902.00465, whose code is not public: the messages and the bound are ours).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from laconic.core import arguments
from laconic.replicator.deployment import Deployment, Seat, Terms
from laconic.replicator.deployments.groups import served

T = TypeVar("T")


@dataclass(frozen=True, repr=False)
class Asynchronous(Deployment):
    """Servers on the first ranks, which hold a share of the tensors each; workers on the others.

    A gradient is applied as it comes. Its staleness is the number of updates since its parameters were
    pulled; where that is above the bound, the server refuses it, and the worker goes on from fresh
    parameters. So nobody waits, unlike under the bound of Ho et al. 2013 (SSP), where fast workers do; and a
    worker that is slower than `staleness` updates of the others adds nothing. A lost worker is left behind.

    Args:
        servers: Ranks that hold parameters and train nothing, 1 or more; default: 1.
        staleness: The bound, 0 or more; default: 16. With 0 a gradient counts only where no other came first.

    Raises:
        SpecError: An argument is out of range.
    """

    servers: int = 1
    staleness: int = 16

    def __post_init__(self) -> None:
        arguments.whole("async: servers", self.servers, 1)
        arguments.whole("async: staleness", self.staleness, 0)

    def launch(self, play: Callable[[Seat], T], terms: Terms) -> list[T]:
        return served(self, 1, self.servers, self.staleness, play, terms)

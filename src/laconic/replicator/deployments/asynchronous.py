"""Asynchronous: replicas run at their own pace, with parameters on servers. In a string also `async`.

Dean et al. 2012, "Large scale distributed deep networks"; groups of one replica in TF-Replicator (Buchlovsky
et al. 2019, arXiv:1902.00465), whose code is not public: messages and bound are ours.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar, TypeVar

from laconic.core import arguments
from laconic.core.spec import Status
from laconic.replicator.deployment import Deployment, LaunchOptions, RankContext
from laconic.replicator.deployments.groups import served

T = TypeVar("T")


@dataclass(frozen=True, repr=False)
class Asynchronous(Deployment):
    """Servers on the first ranks, each with a part of the tensors; workers on the others.

    A gradient is applied on arrival. Its staleness is the number of updates since its parameters were pulled;
    above the bound the server rejects it, and the worker continues with new parameters. Unlike in SSP (Ho et
    al. 2013), no worker waits: one slower than `staleness` updates contributes nothing. Training continues
    without lost workers.

    Args:
        servers: Ranks with parameters and no training, at least 1; default: 1.
        staleness: The bound, at least 0; default: 16. With 0 a gradient counts only if no other came first.

    Raises:
        SpecError: An argument is out of range.
    """

    paper: ClassVar[str] = "Buchlovsky et al. 2019, arXiv:1902.00465"
    status: ClassVar[Status] = "reconstruction"

    servers: int = 1
    staleness: int = 16

    def __post_init__(self) -> None:
        arguments.whole("async: servers", self.servers, 1)
        arguments.whole("async: staleness", self.staleness, 0)

    def launch(self, play: Callable[[RankContext], T], terms: LaunchOptions) -> list[T]:
        return served(self, 1, self.servers, self.staleness, play, terms)

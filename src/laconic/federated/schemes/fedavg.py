"""FedAvg: clients train locally, and the server averages their models."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from laconic.core.spec import Status
from laconic.federated.schemes import Scheme


@dataclass(frozen=True, repr=False)
class FedAvg(Scheme):
    """w = sum over clients k of n_k / n * w_k, with n_k examples each.

    McMahan et al. 2017, arXiv:1602.05629. The whole model is sent in both directions: 4 bytes per parameter.
    """

    name: ClassVar[str] = "fedavg"
    paper: ClassVar[str] = "McMahan et al. 2017, arXiv:1602.05629"
    status: ClassVar[Status] = "recalled"
    examples: ClassVar[tuple[str, ...]] = ("fedavg()",)

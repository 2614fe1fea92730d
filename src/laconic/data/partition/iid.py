"""IID: every client's examples are a random sample of all, in equal numbers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from laconic.core.spec import Status
from laconic.data.draws import order
from laconic.data.partition import Partition, ascending, even_cuts


@dataclass(frozen=True, repr=False)
class IID(Partition):
    """Examples are shuffled and cut into equal parts; sizes differ by at most one.

    >>> from laconic.core.spec import parse
    >>> [len(share) for share in parse("iid()").deal([0] * 7, clients=3)]
    [3, 2, 2]
    """

    paper: ClassVar[str] = "McMahan et al. 2017, arXiv:1602.05629"
    status: ClassVar[Status] = "verified"
    code: ClassVar[str] = "AshwinRJ/Federated-Learning-PyTorch"

    def shares(self, kinds: Tensor, clients: int, seed: int) -> list[Tensor]:
        shuffled = order(self.key(seed), len(kinds))
        return [ascending([part]) for part in shuffled.tensor_split(even_cuts(len(kinds), clients))]

"""Label shards: examples sorted by label and cut into shards, a few for each client.

McMahan et al. 2017, arXiv:1602.05629: MNIST in 200 shards of 300 for 100 clients, most with only two digits.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from laconic.core import arguments
from laconic.core.errors import SpecError
from laconic.core.spec import Status
from laconic.data.draws import order
from laconic.data.partition import Partition, ascending, even_cuts


@dataclass(frozen=True, repr=False)
class LabelShards(Partition):
    """clients * `per_client` shards of consecutive examples, sorted by label and index, assigned at random.

    Shard sizes differ by at most one. A shard may span labels.

    Args:
        per_client: Shards per client, 1 or more.

    >>> from laconic.core.spec import parse
    >>> labels = [0] * 6 + [1] * 6
    >>> sorted(share.tolist() for share in parse("label_shards(1)").deal(labels, clients=2))
    [[0, 1, 2, 3, 4, 5], [6, 7, 8, 9, 10, 11]]
    """

    per_client: int = 2

    paper: ClassVar[str] = "McMahan et al. 2017, arXiv:1602.05629"
    status: ClassVar[Status] = "verified"
    code: ClassVar[str] = "AshwinRJ/Federated-Learning-PyTorch"
    examples: ClassVar[tuple[str, ...]] = ("label_shards()", "label_shards(per_client=1)")

    def __post_init__(self) -> None:
        arguments.whole("label_shards: per_client", self.per_client, least=1)

    def check_fits(self, kinds: Tensor, clients: int) -> None:
        if clients * self.per_client > len(kinds):
            raise SpecError(
                f"{self!r}: {clients} clients need {clients * self.per_client} shards, but there are"
                f" {len(kinds)} examples; use at most {len(kinds) // clients} shards per client"
            )

    def shares(self, kinds: Tensor, clients: int, seed: int) -> list[Tensor]:
        count = clients * self.per_client
        shards = kinds.argsort(stable=True).tensor_split(even_cuts(len(kinds), count))
        dealt = order(self.key(seed), count).view(clients, self.per_client).tolist()
        return [ascending([shards[shard] for shard in own]) for own in dealt]

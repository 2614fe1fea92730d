"""Classes per client: each client holds a few labels, and sizes may vary by a factor gamma.

    size_i = floor(n * (0.1 / N + 0.9 * gamma^(N-1-i) / sum_j gamma^j))   for client i of N

With gamma 1 it is floor(n / N). Sattler et al. 2019, arXiv:1903.02891 (STC), as in their code.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from laconic.core import arguments
from laconic.core.errors import SpecError
from laconic.core.spec import Status
from laconic.data.draws import order
from laconic.data.partition import Partition, ascending, classes


@dataclass(frozen=True, repr=False)
class ClassesPerClient(Partition):
    """Each client takes size / `classes` examples of a random class, then of the next, and so on.

    An exhausted class is skipped, so the last clients may hold more classes, as may those whose size is no
    multiple of `classes`. Fewer than N examples stay unassigned.

    Args:
        classes: Labels per client, 1 up to the number of labels.
        gamma: Approximate ratio of the sizes of consecutive clients, in (0, 1].

    >>> from laconic.core.spec import parse
    >>> deal = parse("classes_per_client(2, gamma=0.5)").over([0, 1, 2, 3] * 250, clients=4)
    >>> deal.sizes
    [85, 145, 265, 505]
    """

    classes: int = 2
    gamma: float = 1.0

    complete: ClassVar[bool] = False
    paper: ClassVar[str] = "Sattler et al. 2019, arXiv:1903.02891"
    status: ClassVar[Status] = "verified"
    code: ClassVar[str] = "felisat/federated-learning"
    examples: ClassVar[tuple[str, ...]] = (
        "classes_per_client()",
        "classes_per_client(classes=4, gamma=0.95)",
    )

    def __post_init__(self) -> None:
        arguments.whole("classes_per_client: classes", self.classes, least=1)
        arguments.number("classes_per_client: gamma", self.gamma, above=0, most=1, hint="1.0: equal sizes")

    def check_fits(self, kinds: Tensor, clients: int) -> None:
        number = len(classes(kinds)[0])
        if self.classes > number:
            raise SpecError(
                f"{self!r}: classes must be in 1..{number}, the number of labels, got {self.classes}"
            )
        if min(sizes(len(kinds), clients, self.gamma)) == 0:
            raise SpecError(
                f"{self!r} leaves a client without any of {len(kinds)} examples among {clients} clients;"
                " use fewer clients, or a gamma closer to 1"
            )

    def shares(self, kinds: Tensor, clients: int, seed: int) -> list[Tensor]:
        found, place = classes(kinds)
        shuffled = order(self.key(seed), len(kinds))
        piles = [shuffled[place[shuffled] == kind] for kind in range(len(found))]
        dealt = []
        for client, size in enumerate(sizes(len(kinds), clients, self.gamma)):
            kind, own = self.key(seed, client) % len(found), []
            per_class = max(1, size // self.classes)
            while size:
                take = min(per_class, size, len(piles[kind]))
                own.append(piles[kind][:take])
                piles[kind], size = piles[kind][take:], size - take
                kind = (kind + 1) % len(found)
            dealt.append(ascending(own))
        return dealt


def sizes(n: int, clients: int, gamma: float) -> list[int]:
    """Return the number of each client's examples, ascending; the sum is at most n.

    In integers: gamma is a / b, and a^i b^(N-1-i) stands for gamma^i.

    >>> sizes(100, 3, 1.0), sizes(1500, 4, 0.5)
    ([33, 33, 33], [127, 217, 397, 757])
    """
    if gamma == 1.0:
        return [n // clients] * clients
    total = sum(powers(gamma, clients))
    found = [n * (total + 9 * clients * power) // (10 * clients * total) for power in powers(gamma, clients)]
    return found[::-1]


def powers(gamma: float, count: int) -> Iterator[int]:
    """Yield 1, gamma, gamma^2, ..., scaled to integers.

    >>> [*powers(0.75, 3)]
    [16, 12, 9]
    """
    a, b = gamma.as_integer_ratio()
    power = b ** (count - 1)
    for _ in range(count):
        yield power
        power = power // b * a

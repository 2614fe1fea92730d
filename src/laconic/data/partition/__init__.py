"""Partition: assignment of a data set's examples to clients, a pure function of (seed, client)."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar, Literal

import numpy as np
import torch
from torch import Tensor

from laconic.core import arguments
from laconic.core.errors import SpecError
from laconic.core.spec import Spec
from laconic.core.turn import mix, name_key

Kinds = Tensor | Sequence[int]
KINDS = "kinds (labels or speakers)"


class Partition(Spec):
    """Rule that assigns examples to clients by their kinds: labels or speakers.

    >>> from laconic.core.spec import parse
    >>> shares = parse("label_shards(per_client=1)").deal([0, 1, 0, 1, 1, 0], clients=2, seed=0)
    >>> sorted(share.tolist() for share in shares)
    [[0, 2, 5], [1, 3, 4]]

    `complete`: whether every example is assigned. `deals_by`: the kinds it is meant for.
    """

    complete: ClassVar[bool] = True
    deals_by: ClassVar[Literal["labels", "speakers"]] = "labels"

    def deal(self, kinds: Kinds, clients: int | None = None, seed: int = 0) -> list[Tensor]:
        """Return each client's examples: ascending indices, int64, disjoint.

        Args:
            kinds: The kind of each example, integers (n,): a tensor, an array or a list.
            clients: Number of clients, at most n. None: the number that the kinds imply, if any.
            seed: Seed, 0 or more.

        Raises:
            SpecError: The kinds are not integers (n,), or cannot be assigned to this many clients.
        """
        return self.over(kinds, clients, seed).shares

    def over(self, kinds: Kinds, clients: int | None = None, seed: int = 0) -> Deal:
        """Return a `Deal`, computed at its first use. Raises like `deal`, immediately."""
        arguments.whole("seed", seed)
        checked = integers(kinds)
        found = self.number(checked, clients)
        self.check_fits(checked, found)
        return Deal(self, checked, found, seed)

    def number(self, kinds: Tensor, clients: int | None) -> int:
        if clients is None:
            raise SpecError(f"{self!r} works for any number of clients: pass one, as in clients=100")
        hint = "each needs an example: use fewer clients, or more data"
        arguments.whole("clients", clients, 1, len(kinds), hint)
        return clients

    def check_fits(self, kinds: Tensor, clients: int) -> None:
        """Raise `SpecError` if these kinds cannot be assigned to this many clients."""

    @abstractmethod
    def shares(self, kinds: Tensor, clients: int, seed: int) -> list[Tensor]:
        """Return `deal` of int64 (n,), after all checks."""

    def key(self, seed: int, *parts: int) -> int:
        return mix(seed, name_key(self.name), *parts)


@dataclass(frozen=True, eq=False)
class Deal:
    """Partition of one data set, `partition.over(kinds, clients, seed)`, computed at its first use.

    >>> from laconic.core.spec import parse
    >>> deal = parse("iid()").over(kinds=[7, 7, 8, 8, 8], clients=2)
    >>> deal.sizes
    [3, 2]
    >>> sorted(deal.indices(0).tolist() + deal.indices(1).tolist())
    [0, 1, 2, 3, 4]
    """

    partition: Partition
    kinds: Tensor  # int64 (n,)
    clients: int
    seed: int

    @cached_property
    def shares(self) -> list[Tensor]:
        return self.partition.shares(self.kinds, self.clients, self.seed)

    def indices(self, client: int) -> Tensor:
        """Return this client's examples. Raises `SpecError` for an unknown client."""
        arguments.whole("client", client, 0, self.clients - 1, hint=f"there are {self.clients} clients")
        return self.shares[client]

    @property
    def sizes(self) -> list[int]:
        return [len(share) for share in self.shares]

    def counts(self, kinds: Kinds | None = None) -> Tensor:
        """Count the examples of each kind and client, int64 (clients, number of kinds).

        Args:
            kinds: Other kinds of the same examples. None: the partition's. Columns are the kinds that occur,
                ascending.
        """
        found, column = classes(self.kinds if kinds is None else integers(kinds))
        return torch.stack([torch.bincount(column[share], minlength=len(found)) for share in self.shares])


def integers(kinds: Kinds) -> Tensor:
    try:
        given: Any = torch.as_tensor(
            np.asarray(kinds) if not isinstance(kinds, Tensor) else kinds, dtype=None, device="cpu"
        )
    except (TypeError, ValueError):
        raise SpecError(f"{KINDS} must be integers (n,), got {arguments.shown(kinds)}") from None
    if not len(given.shape):
        raise SpecError(f"{KINDS} must be integers (n,), one per example, got {arguments.shown(kinds)}")
    if given.numel() == 0:
        raise SpecError(f"{KINDS} must hold one integer per example, got none; load the data set first")
    if given.is_floating_point() or given.is_complex() or given.dtype == torch.bool:
        raise SpecError(f"{KINDS} must be integers, got {given.dtype}; pass class numbers, as y.long() does")
    if given.dim() != 1:
        raise SpecError(
            f"{KINDS} must be integers (n,), one per example, got shape {tuple(given.shape)};"
            " for one-hot rows use argmax(-1)"
        )
    whole: Tensor = given.detach().cpu().long()
    return whole


def classes(kinds: Tensor) -> tuple[Tensor, Tensor]:
    """Return the kinds that occur, ascending (k,), and each example's index among them, int64 (n,).

    >>> classes(torch.tensor([9, 4, 9]))
    (tensor([4, 9]), tensor([1, 0, 1]))
    """
    found, place = np.unique(kinds.numpy(), return_inverse=True)
    return torch.from_numpy(found), torch.from_numpy(place)


def even_cuts(n: int, parts: int) -> list[int]:
    """Return cuts of n into parts whose sizes differ by at most one, larger ones first.

    >>> even_cuts(8, 3)
    [3, 6]
    """
    small, larger = divmod(n, parts)
    return [small * part + min(part, larger) for part in range(1, parts)]


def ascending(parts: Sequence[Tensor]) -> Tensor:
    return torch.cat([*parts, torch.empty(0, dtype=torch.int64, device="cpu")]).sort().values

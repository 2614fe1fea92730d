"""Sampling of a round's clients: a function of (seed, round) alone."""

from __future__ import annotations

from abc import abstractmethod

import torch

from laconic.core.errors import SpecError
from laconic.core.spec import Spec
from laconic.core.turn import COMMON, mix

LEAST = 2  # a single update could be read from the next model


class Sampling(Spec):
    """Choice of the clients of each round."""

    @abstractmethod
    def fraction(self, number: int) -> float:
        """Return the share of clients, in (0, 1], in round `number`, from 1."""

    def count(self, number: int, clients: int) -> int:
        """Return a round's number of clients: at least two if possible."""
        return min(clients, max(LEAST, round(self.fraction(number) * clients)))

    def chosen(self, number: int, clients: int, seed: int) -> list[int]:
        """Return a round's clients, ascending, without replacement."""
        if clients < 1:
            raise SpecError(f"a round needs at least 1 client, got {clients}")
        rng = torch.Generator("cpu").manual_seed(mix(seed, number, COMMON) >> 1)
        order = torch.randperm(clients, generator=rng, dtype=torch.int64, device="cpu")
        return sorted(order[: self.count(number, clients)].tolist())

"""How many clients take part in a round, and which: a function of (seed, round) alone."""

from __future__ import annotations

from abc import abstractmethod

import torch

from laconic.core.errors import SpecError
from laconic.core.spec import Spec
from laconic.core.turn import COMMON, mix

LEAST = 2  # clients of a round: with one alone its update could be read from the next model


class Sampling(Spec):
    """Which clients take part."""

    @abstractmethod
    def fraction(self, number: int) -> float:
        """The share of all clients that round `number`, from 1, asks; in (0, 1]."""

    def count(self, number: int, clients: int) -> int:
        """How many of so many clients round `number` asks: two at least, if there are two."""
        return min(clients, max(LEAST, round(self.fraction(number) * clients)))

    def chosen(self, number: int, clients: int, seed: int) -> list[int]:
        """The clients of round `number`, ascending, drawn without replacement; fresh in each round.

        Raises:
            SpecError: There is no client.
        """
        if clients < 1:
            raise SpecError(f"a round needs a client, got {clients}")
        rng = torch.Generator("cpu").manual_seed(mix(seed, number, COMMON) >> 1)
        order = torch.randperm(clients, generator=rng, dtype=torch.int64, device="cpu")
        return sorted(order[: self.count(number, clients)].tolist())

"""The outer step: how far every rank has come since they were last alike, and the mean of that.

Any method of `compress` carries it, with its memory, as if it were a gradient: a week of local steps and an
8-bit update is one string.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from laconic.comm.metered import Metered
from laconic.core.errors import NonFiniteError, SpecError
from laconic.strategies.exchange import Exchange
from laconic.strategies.method import Method, lift
from laconic.strategies.replica import Replica
from laconic.strategies.stats import Seconds


def carrier(update: Any) -> Method:
    """The method that carries outer updates. Raises `SpecError` for one that changes the optimiser."""
    method = lift(update)
    if method.rules:
        raise SpecError(
            f"{method!r} takes the optimiser's place, and an outer update has none: take a codec, a selector,"
            " a reducer, or a method that only exchanges gradients"
        )
    return method


class NoOptimiser:
    """What a feedback sees where no optimiser is: an outer update has no momentum of its own."""

    def settings(self, name: str) -> Mapping[str, Any]:
        """No settings."""
        return {}

    def take_momentum(self, name: str) -> Tensor | None:
        """No momentum."""
        return None


class Outer:
    """`anchor` float32 (n,): where all ranks were last alike. `carrier` carries their ways from there."""

    def __init__(self, replica: Replica, comm: Metered, update: Any, seed: int, seconds: Seconds) -> None:
        self.replica = replica
        self.anchor = replica.flat.clone()
        self._exchange = Exchange(carrier(update), replica.layout, comm, NoOptimiser(), seed, seconds)

    def mean_way(self) -> Tensor:
        """Mean over ranks of anchor - x, float32 (n,), as the carrier sends it: equal on all ranks."""
        way = self.anchor - self.replica.flat
        self._exchange.begin()
        if not self._exchange.mean_(way, self.replica.layout):
            raise NonFiniteError(f"an outer update is not finite: {self._exchange.void} has diverged")
        self._exchange.end()
        return way

    def restart_(self, model: Tensor) -> None:
        """All ranks are alike again, at this model (n,)."""
        self.anchor.copy_(model)
        self.replica.flat.copy_(model)

    def state_dict(self) -> dict[str, Tensor]:
        """Anchor and the carrier's memory."""
        return {"anchor": self.anchor} | self._exchange.state_dict()

    def load_state_dict(self, state: Mapping[str, Tensor], rounds: int) -> None:
        """Take both back, after so many outer steps."""
        self.anchor.copy_(state["anchor"])
        memory = {key: value for key, value in state.items() if key.startswith("route")}
        self._exchange.load_state_dict(memory, rounds)

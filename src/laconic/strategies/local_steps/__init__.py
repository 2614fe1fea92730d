"""Outer step: the mean of the ranks' changes since their models were last equal."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from laconic.comm.metered import Metered
from laconic.core.errors import NonFiniteError, SpecError
from laconic.core.layout import Layout
from laconic.exchange.attached import Attached
from laconic.exchange.gathers import warn_of_gathers
from laconic.exchange.method import Method, lift
from laconic.exchange.no_optimiser import NoOptimiser
from laconic.exchange.stopwatch import Seconds
from laconic.strategies.replica import Replica


def outer_method(compressor: Any) -> Method:
    method = lift(compressor)
    if method.rules:
        raise SpecError(
            f"{method!r} changes the optimiser, but an outer step has none: use a codec, a selector, a"
            " reducer, or a method that only exchanges gradients"
        )
    return method


class Outer:
    """Exchange of outer gradients. `anchor` float32 (n,): the model at which all ranks were last equal."""

    def __init__(self, replica: Replica, comm: Metered, compressor: Any, seed: int, seconds: Seconds) -> None:
        self.replica = replica
        self.anchor = replica.flat.clone()
        method = outer_method(compressor)
        if comm.rank == 0:
            warn_of_gathers(method, replica.layout, comm.size)
        self._exchange = Attached(method, replica.layout, comm, NoOptimiser(), seed, seconds)

    def mean_outer_gradient(self) -> Tensor:
        """Return the mean of anchor - x over ranks, float32 (n,)."""
        return self.mean_(self.anchor - self.replica.flat, self.replica.layout)

    def mean_(self, gradient: Tensor, layout: Layout) -> Tensor:
        self._exchange.begin()
        if not self._exchange.mean_(gradient, layout):
            raise NonFiniteError(
                f"an outer gradient is not finite: {self._exchange.skip_reason} has diverged"
            )
        self._exchange.end()
        return gradient

    def restart_(self, model: Tensor) -> None:
        self.anchor.copy_(model)
        self.replica.flat.copy_(model)

    def state_dict(self) -> dict[str, Tensor]:
        return {"anchor": self.anchor} | self._exchange.state_dict()

    def load_state_dict(self, state: Mapping[str, Tensor], rounds: int) -> None:
        self.anchor.copy_(state["anchor"])
        memory = {key: value for key, value in state.items() if key.startswith("route")}
        self._exchange.load_state_dict(memory, rounds)

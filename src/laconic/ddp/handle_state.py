"""State of a handle: memory of its exchange, and means that wait for the optimiser."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from laconic.ddp.buckets import Buckets
from laconic.exchange.attached import Attached
from laconic.exchange.gathered import own_part
from laconic.exchange.state import (
    Identity,
    RankState,
    check_has,
    identity,
    label,
    under,
    unlabel,
    without,
)

WAITING = "left/"


class HandleState:
    def __init__(self, exchange: Attached, buckets: Buckets) -> None:
        self._exchange, self._buckets = exchange, buckets

    def state_dict(self) -> RankState:
        tensors = self._exchange.state_dict()
        if (unused_parameters := self._buckets.unused_parameters) is not None:
            tensors |= {f"{WAITING}{name}": mean for name, mean in unused_parameters.state_dict().items()}
        identity = self._identity()
        return RankState(**identity, step=self._exchange.step, tensors=label(tensors, identity["rank"]))

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        comm = self._exchange.comm
        check_has(state, ())
        state = own_part(state, comm.rank, comm.size)
        tensors = unlabel(state, self._identity())
        if unused_parameters := self._buckets.unused_parameters:
            unused_parameters.check_state(under(WAITING, tensors))
        self._exchange.load_state_dict(without((WAITING,), tensors), step=int(state["step"]))
        if unused_parameters:
            unused_parameters.load_state_dict(under(WAITING, tensors))

    def _identity(self) -> Identity:
        exchange = self._exchange
        return identity(
            exchange.method, exchange.layout, exchange.comm.rank, exchange.comm.size, exchange.seed
        )

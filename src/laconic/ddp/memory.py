"""Memory of a handle: that of its exchange, of its rules, and means that wait for the optimiser."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from laconic.ddp.buckets import Buckets
from laconic.exchange.attached import Attached
from laconic.exchange.gathered import own_part
from laconic.exchange.rule import BoundRule
from laconic.exchange.state import FORMAT, Identity, RankState, check_has, label, model_digest, unlabel
from laconic.optim.inner import under

WAITING = "left/"  # keys of means that wait for the optimiser


class Memory:
    """This rank's memory as a state that is saved between steps."""

    def __init__(self, exchange: Attached, rules: Sequence[BoundRule], buckets: Buckets) -> None:
        self._exchange, self._rules, self._buckets = exchange, rules, buckets

    def state_dict(self) -> RankState:
        """Return this rank's memory, with the rank in every key."""
        tensors = self._exchange.state_dict()
        for i, rule in enumerate(self._rules):
            tensors |= {f"rule{i}/{key}": value for key, value in rule.state_dict().items()}
        if (left_out := self._buckets.left_out) is not None:
            tensors |= {f"{WAITING}{name}": mean for name, mean in left_out.state_dict().items()}
        identity = self._identity()
        return RankState(**identity, step=self._exchange.step, tensors=label(tensors, identity["rank"]))

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load this rank's state, or its part of gathered ones. Raises `StateError` with nothing changed."""
        comm = self._exchange.comm
        check_has(state, ())
        state = own_part(state, comm.rank, comm.size)
        tensors = unlabel(state, self._identity())
        parts = [under(f"rule{i}/", tensors) for i in range(len(self._rules))]
        for rule, part in zip(self._rules, parts, strict=True):
            rule.check_state(part)
        if left_out := self._buckets.left_out:
            left_out.check_state(under(WAITING, tensors))
        own = {key: value for key, value in tensors.items() if not key.startswith(("rule", WAITING))}
        self._exchange.load_state_dict(own, step=int(state["step"]))
        for rule, part in zip(self._rules, parts, strict=True):
            rule.load_state_dict(part)
        if left_out:
            left_out.load_state_dict(under(WAITING, tensors))

    def _identity(self) -> Identity:
        exchange = self._exchange
        return Identity(
            format=FORMAT,
            spec=repr(exchange.method),
            model=model_digest(exchange.layout),
            rank=exchange.comm.rank,
            size=exchange.comm.size,
            seed=exchange.seed,
        )

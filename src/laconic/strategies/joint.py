"""Joint calls of a strategy's ranks: each makes them after the same step, unless ranks share a step count.

If only some ranks make a call, all raise `PeerError`; with heartbeats, only until a rank is lost.
"""

from __future__ import annotations

from contextlib import suppress
from functools import partial

from laconic.comm.joint_calls import Proof
from laconic.core.errors import NonFiniteError
from laconic.strategies.membership import Membership
from laconic.strategies.membership.generations import Generations
from laconic.strategies.strategy import BoundStrategy, Strategy

FINISH = "finish()"


def make_jointly(call: str, bound: BoundStrategy, strategy: Strategy, membership: Membership) -> None:
    """Wait until every rank makes this call; "" is one that a rank may make alone. Raises `PeerError`."""
    calls, heartbeats = membership.joint_calls, membership.heartbeats
    if not call or calls is None or (call == FINISH and heartbeats is not None):  # heartbeats announce it
        return
    calls.make(
        call,
        proof_of(call, strategy),
        serve=partial(_serve, bound, membership) if strategy.counts_together else (lambda: None),
        interrupted=partial(_others_finish, heartbeats) if heartbeats is not None else str,
    )


def call_if_it_drains(call: str, bound: BoundStrategy) -> str:
    return "" if type(bound).drain is BoundStrategy.drain else call


def proof_of(call: str, strategy: Strategy) -> Proof:
    """Return which step of another rank proves that it does not make this call.

    >>> from laconic.core.spec import parse
    >>> [proof_of("averaged()", parse(spec)) for spec in ("sgp()", "adpsgd()", "lsgd(count='total')")]
    ['begun', 'begun', 'none']
    >>> [proof_of("finish()", parse(spec)) for spec in ("sgp()", "adpsgd()", "lsgd(count='total')")]
    ['waits', 'none', 'none']
    """
    if strategy.counts_together:
        return "none"
    if call != FINISH:
        return "begun"
    return "none" if strategy.clocked else "waits"


def _others_finish(heartbeats: Generations) -> str:
    with suppress(RuntimeError):  # the store is gone
        if waiting := sorted(heartbeats.finishers.places(heartbeats.members).keys() - {heartbeats.rank}):
            return f"ranks {waiting} wait in finish()"
    return ""


def _serve(bound: BoundStrategy, membership: Membership) -> None:
    with suppress(NonFiniteError):  # the call itself raises it, unless it loads a state
        bound.drain(membership.side_comm)

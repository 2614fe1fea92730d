"""Finish: all ranks load the group's model, once no rank has steps left.

With heartbeats, a rank that has finished waits without delaying the others:

1. It writes to the store that it waits, and its number of steps.
2. If every rank of its group waits after the same number of steps, they load the model of this group.
3. If another rank starts a further step, this rank leaves the group. The others form a new one without it.
4. When the last rank finishes, all form a group together, load their average, and continue with step 2.

A rank whose heartbeats end, or that begins no step within the timeout of the process group, is left out.

Without heartbeats, all ranks wait for each other. If one waits in a step for a rank in `finish()`, all raise
`PeerError` (`laconic.comm.joint_calls`). Where ranks go at their own pace, they wait for its remaining steps.
"""

from __future__ import annotations

from torch import Tensor

from laconic.core.errors import PeerError
from laconic.strategies.alone import BoundAlone
from laconic.strategies.membership import Membership
from laconic.strategies.strategy import BoundStrategy, Strategy


def adopt_consensus(bound: BoundStrategy, membership: Membership, strategy: Strategy) -> Tensor:
    """Load the group's model into the strategy, and return it, float32 (n,). Called by all ranks."""
    heartbeats = membership.heartbeats
    if heartbeats is not None:
        why = heartbeats.wait_to_finish(
            bound.steps,
            clocked=strategy.clocked,
            shared=strategy.counts_together,
            apart=isinstance(bound, BoundAlone),
        )
        if why:
            raise PeerError(why)
    side = membership.side_comm
    bound.drain(side)
    model = bound.consensus(side)
    side.all_reduce(model.new_zeros(1))  # a consensus may be local, such as a leader's model
    if heartbeats is not None:
        heartbeats.end_finish()
    bound.adopt_(model)
    side.all_reduce(model.new_zeros(1))  # no rank sends while another loads the model
    return model

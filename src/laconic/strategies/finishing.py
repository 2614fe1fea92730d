"""Finish: all ranks load the group's model, once none of them has steps left.

With heartbeats a rank that has finished waits beside the others, and holds none of them up:

1. It writes to the store that it waits, and after how many steps.
2. If every rank of its group waits after as many steps, they load the model of this group.
3. If another rank begins a further step, this rank leaves the group. The others form a new one without it.
4. When the last rank is there too, all form a group together, load their average, and take step 2.

A rank that dies meanwhile is left out, as its heartbeats end, and one that begins no step within the timeout
of the process group.

Without heartbeats all ranks wait for each other in step 2. If one of them waits in a step for a rank that is
there, all raise `PeerError` (`laconic.comm.joint_calls`). Where a strategy lets ranks go at their own pace,
and for a rank that is only slow, the wait lasts until the timeout of the process group.
"""

from __future__ import annotations

from torch import Tensor

from laconic.core.errors import PeerError
from laconic.strategies.alone import BoundAlone
from laconic.strategies.membership import Membership
from laconic.strategies.strategy import BoundStrategy, Strategy


def adopt_consensus(bound: BoundStrategy, membership: Membership, strategy: Strategy) -> Tensor:
    """Load the group's model into the strategy. Called by all ranks.

    Returns:
        The group's model, float32 (n,).

    Raises:
        PeerError: A rank is lost, or the ranks need a new group first.
    """
    heartbeats = membership.heartbeats
    if heartbeats is not None:
        why = heartbeats.wait_to_finish(
            bound.steps,
            clocked=strategy.clocked,
            shared=strategy.clocked and not strategy.overlaps,
            apart=isinstance(bound, BoundAlone),
        )
        if why:
            raise PeerError(why)
    side = membership.side_comm
    bound.drain(side)
    model = bound.consensus(side)
    side.all_reduce(model.new_zeros(1))  # a consensus may be local, as a leader's: all meet
    if heartbeats is not None:
        heartbeats.end_finish()
    bound.adopt_(model)
    side.all_reduce(model.new_zeros(1))  # nobody sends while another still adopts
    return model

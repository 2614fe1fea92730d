"""Finish: all ranks load the group's model, once no rank has steps left.

With heartbeats, a rank that has finished writes its number of steps to the store. If every rank of its group
waits after the same number, they load this group's model. If another rank starts a further step, this rank
leaves the group, and the others form a new one; when the last rank finishes, all form a group and load their
average. A rank whose heartbeats end, or that begins no step within the group's timeout, is left out.

Without heartbeats, all ranks wait for each other. If one waits in a step for a rank in `finish()`, all raise
`PeerError` (`laconic.comm.joint_calls`); where ranks go at their own pace, they wait for its remaining steps.
"""

from __future__ import annotations

from torch import Tensor

from laconic.core.errors import PeerError
from laconic.strategies.alone import BoundAlone
from laconic.strategies.membership import Membership
from laconic.strategies.strategy import BoundStrategy, Strategy


def adopt_consensus(bound: BoundStrategy, membership: Membership, strategy: Strategy) -> Tensor:
    heartbeats = membership.heartbeats
    if heartbeats is not None:
        why = heartbeats.wait_to_finish(
            bound.steps,
            clocked=strategy.clocked,
            shared=strategy.counts_together,
            independent=isinstance(bound, BoundAlone),
        )
        if why:
            raise PeerError(why)
    side = membership.side_comm
    bound.drain(side)
    model = bound.consensus(side)
    side.all_reduce(model.new_zeros(1))  # a barrier: the consensus may involve no communication
    if heartbeats is not None:
        heartbeats.end_finish()
    bound.adopt_(model)
    side.all_reduce(model.new_zeros(1))  # no rank sends while another loads
    return model

"""Communication among the current replicas of a torchft process group."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torchft import ProcessGroupGloo

from laconic.comm.comm import ReduceOp
from laconic.comm.counter import Counter
from laconic.comm.posted import OPS, Message, PostedComm
from laconic.core.errors import AttachError


class ReplicaComm(PostedComm):
    """Comm among the replicas of `group`, until it is reconfigured."""

    def __init__(self, group: ProcessGroupGloo) -> None:
        self._group = group  # not its inner group: gloo wakes peers once nothing references that
        self.rank, self.size = group.parent.rank(), group.parent.size()

    def all_reduce(self, x: Tensor, op: ReduceOp = "sum") -> Tensor:
        if self.size == 1 or not x.numel():
            return x
        flat, options = x.contiguous(), dist.AllreduceOptions()
        options.reduceOp = OPS[op]
        with self._peers("all_reduce"):
            self._group.allreduce([flat], options).wait()
        return x if flat is x else x.copy_(flat)

    def broadcast(self, x: Tensor, root: int = 0) -> Tensor:
        if self.size == 1 or not x.numel():
            return x
        flat, options = x.contiguous(), dist.BroadcastOptions()
        options.rootRank = root
        with self._peers("broadcast"):
            self._group.broadcast([flat], options).wait()
        return x if flat is x else x.copy_(flat)

    def split(self, color: int) -> ReplicaComm:
        raise AttachError("replicas join and leave: they form no subgroups")

    def counter(self) -> Counter:
        raise AttachError("replicas join and leave: they share no counter")

    def _start(self, sends: Sequence[Message], recvs: Sequence[Message]) -> Sequence[dist.Work]:
        # receives first: otherwise gloo sends in one direction at a time
        works = [self._group.recv([x], peer, 0) for peer, x in recvs]
        return works + [self._group.send([x], peer, 0) for peer, x in sends]

    def _wire_device(self, x: Tensor) -> torch.device:
        return torch.device("cpu")

"""Whether a backward pass counts: the same on all shards of all machines.

A gradient that is not finite shows in the shards that hold it. If the others did not know, they would keep
what was left of their gradients, and a rank with nothing of that module would step.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.tensor import DTensor

from laconic.comm.comm import Comm


class Verdict:
    """The modules of one backward pass, and the ranks that share their parameters."""

    def __init__(self, comm: Comm) -> None:
        self._comm = comm
        self._groups: dict[int, Any] = {}  # FSDP2's param groups

    def begin(self) -> None:
        """Start a backward pass."""
        self._groups.clear()

    def add(self, group: Any) -> None:
        """Add the param group of a module that has a gradient in this pass."""
        self._groups[id(group)] = group

    @property
    def device(self) -> torch.device:
        """The device of the shards; the CPU without any."""
        parts = (part for group in self._groups.values() for part in group.fsdp_params)
        part = next(parts, None)
        return torch.device("cpu") if part is None else part.sharded_param.device

    def is_skipped(self, skipped: bool) -> bool:
        """Return whether a rank skips this pass. All ranks call it. Wire: 4 bytes, which nobody counts."""
        flag = torch.tensor([skipped], dtype=torch.int32, device=self.device)
        return bool(self._comm.all_reduce(flag, "max"))

    def spoil(self) -> None:
        """Make the gradients of these modules NaN on this rank, so that it skips the step, too."""
        for group in self._groups.values():
            for parameter in group.fsdp_params:
                grad = parameter.sharded_param.grad
                if grad is not None:
                    local = grad.to_local() if isinstance(grad, DTensor) else grad
                    with torch.no_grad():
                        local.fill_(torch.nan)

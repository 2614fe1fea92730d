"""GradScaler with a shared overflow check, without which the scales of the ranks would diverge."""

from __future__ import annotations

from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor
from torch.optim import Optimizer

from laconic.comm.comm import Comm
from laconic.comm.joint_calls import Exchanging, unwatched
from laconic.core.errors import AttachError
from laconic.strategies.strategy import Strategy

_shared: WeakSet[torch.amp.GradScaler] = WeakSet()


def check_scaler(scaler: torch.amp.GradScaler, strategy: Strategy, patience_s: float | None) -> None:
    if scaler in _shared:
        raise AttachError(
            "this GradScaler is already shared by the ranks of another model: omit"
            " scaler=, or call the other optimizer's remove() first"
        )
    if strategy.clocked:
        raise AttachError(
            f"{strategy!r} lets ranks step at their own pace, and a shared GradScaler would make each wait"
            " for all at every step: omit scaler=, so that each rank skips by its own, or train in"
            " bfloat16, which needs none"
        )
    if patience_s is not None:
        raise AttachError(
            "a shared GradScaler needs every rank at every step, and with patience_s= ranks may be lost:"
            " omit scaler=, so that each rank skips by its own, or train in bfloat16, which needs none"
        )


class SharedScaler:
    """Scaler whose check for Inf and NaN is the maximum over the ranks of `comm`, until `remove`.

    Every rank must check every step, in an all-reduce of 4 bytes.
    """

    def __init__(self, scaler: torch.amp.GradScaler, comm: Comm, exchanging: Exchanging = unwatched) -> None:
        self._scaler = scaler
        check = scaler._unscale_grads_  # private to torch, and the only place where it checks

        def shared(
            optimizer: Optimizer, inv_scale: Tensor, found_inf: Tensor, allow_fp16: bool
        ) -> dict[torch.device, Tensor]:
            found = check(optimizer, inv_scale, found_inf, allow_fp16)
            own = [float(each) for each in found.values()]
            flag = torch.tensor([max(own, default=0.0)], device=found_inf.device, dtype=torch.float32)
            with exchanging("the GradScaler's check of a step"):
                worst = float(comm.all_reduce(flag, "max"))
            for each in found.values():
                each.fill_(worst)
            return found or {found_inf.device: found_inf.fill_(worst)}

        patched: Any = scaler
        patched._unscale_grads_ = shared
        _shared.add(scaler)
        self._live = True

    def remove(self) -> None:
        if self._live:
            self._live = False
            del self._scaler._unscale_grads_
            _shared.discard(self._scaler)

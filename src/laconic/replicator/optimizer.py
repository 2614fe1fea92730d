"""Optimiser that `wrap_optimizer` returns."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.optim import Optimizer

from laconic.core.errors import AttachError
from laconic.optim.closure import evaluate
from laconic.replicator.order import Order
from laconic.replicator.stats import ReplicatorStats
from laconic.strategies.controller import Controller
from laconic.strategies.distributed_optimizer import DistributedOptimizer


class ReplicatedOptimizer(DistributedOptimizer):
    """Optimiser with the parameter groups of the wrapped one, for learning rate schedules.

    Hooks of `register_step_pre_hook` see the exchanged gradients: clip there. In `async` and `groups` servers
    step, and no hook is called.

    Attributes:
        name: Name among the optimisers of a script.
    """

    _not_exchanged = (
        "was frozen or unknown when wrap_optimizer() was called, so replicas do not exchange it: add it to"
        " the optimiser before wrap_optimizer(), with requires_grad"
    )

    def __init__(self, optimizer: Optimizer, controller: Controller, name: str, order: Order) -> None:
        super().__init__(optimizer, controller)
        self.name = name
        self._order = order

    @property
    def _step_supports_amp_scaling(self) -> bool:
        """Whether a GradScaler leaves skipping to `step`, so that no replica skips alone."""
        return True

    @property
    def updates(self) -> int:
        """Number of updates of the parameters, by all groups together."""
        return self.stats().updates

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Make one step with the other replicas, and return the closure's result.

        Raises:
            NonFiniteError: A gradient is NaN or infinite on one replica; it changed no parameter.
            AttachError: A GradScaler is in use.
            PeerError: A replica or a server is gone.
        """
        if getattr(self, "found_inf", None) is not None:
            raise AttachError(
                "a replicated optimiser does not support GradScaler: use bfloat16 under torch.autocast, or"
                " laconic.compress(model, optimizer, spec, scaler=scaler)"
            )
        loss = evaluate(closure)
        self._order.check(self._order.note("step of {!r}", self.name))
        super().step()
        return loss

    def stats(self) -> ReplicatorStats:
        """Return bytes, seconds, updates and staleness of this replica."""
        return ReplicatorStats.over(self.controller.stats())

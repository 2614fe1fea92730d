"""Exchange inside an optimiser's step, and its state."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from laconic.core.codec import Codec
from laconic.core.errors import NonFiniteError
from laconic.core.layout import Layout
from laconic.exchange.attached import Attached
from laconic.exchange.method import Method, Route, everything, matrices
from laconic.exchange.no_optimiser import NoOptimiser
from laconic.exchange.rule import RuleContext
from laconic.feedback.error_feedback import ErrorFeedback
from laconic.reducers.server import Server
from laconic.reducers.sum import Sum


def both_ways(codec: Codec) -> Method:
    """Return the method that sends matrices by `codec`, with feedback, both ways."""
    feedback = ErrorFeedback(momentum="optimizer")
    parts = Route(matrices, Server(codec, codec), feedback), Route(everything, Sum())
    return Method(f"server({codec!r}, down={codec!r})", parts)


class Inner:
    def __init__(self, method: Method, layout: Layout, context: RuleContext) -> None:
        self.exchange = Attached(method, layout, context.comm, NoOptimiser(), context.seed, context.seconds)
        self._parts: dict[tuple[str, ...], Layout] = {}

    def mean(self, tensors: Mapping[str, Tensor], step: int) -> dict[str, Tensor]:
        part = self._parts.setdefault(tuple(tensors), self.exchange.layout.named(tensors))
        some = next(iter(tensors.values()), torch.empty(0, dtype=torch.float32, device="cpu"))
        flat = torch.empty(part.segments.end, dtype=torch.float32, device=some.device)
        views = dict(zip(part.names, part.segments.views(flat), strict=True))
        if tensors:
            torch._foreach_copy_([views[name] for name in tensors], list(tensors.values()))
        self.exchange.step = step
        self.exchange.begin()
        finite = self.exchange.mean_(flat, part)
        self.exchange.end()
        if not finite:
            raise NonFiniteError(
                f"the momentum of step {step} is not finite ({self.exchange.skip_reason}), though its"
                " gradients were: training has diverged; go back to a checkpoint and lower the learning rate"
            )
        return views

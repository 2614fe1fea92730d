"""The exchange that a rule keeps inside the optimiser's step, and the state of it."""

from __future__ import annotations

from collections.abc import Collection, Mapping

import torch
from torch import Tensor

from laconic.core.codec import Codec
from laconic.core.errors import NonFiniteError
from laconic.core.layout import Layout
from laconic.feedback.error_feedback import ErrorFeedback
from laconic.reducers.server import Server
from laconic.reducers.sum import Sum
from laconic.strategies.exchange import Exchange
from laconic.strategies.method import Method, Route, everything, matrices, routes
from laconic.strategies.rule import OptimiserView, Site


def both_ways(what: Codec) -> Method:
    """Matrices by `what` with feedback, to servers and back; tensors of one dimension summed as they are."""
    return routes(Route(matrices, Server(what, what), ErrorFeedback()), Route(everything, Sum()))


class Inner:
    """A method at work on any of a layout's tensors: those that take part may change from step to step."""

    def __init__(self, method: Method, layout: Layout, view: OptimiserView, site: Site) -> None:
        self.exchange = Exchange(method, layout, site.comm, view, site.seed, site.seconds)
        self._parts: dict[tuple[str, ...], Layout] = {}

    def mean(self, tensors: Mapping[str, Tensor], step: int) -> dict[str, Tensor]:
        """The group's mean of each of these, float32 (n,); every rank brings the same ones."""
        part = self._parts.setdefault(tuple(tensors), self.exchange.layout.named(tensors))
        some = next(iter(tensors.values()), torch.empty(0))
        flat = torch.empty(part.segments.end, dtype=torch.float32, device=some.device)
        views = dict(zip(part.names, part.segments.views(flat), strict=True))
        for name, tensor in tensors.items():
            views[name].copy_(tensor)
        self.exchange.step = step
        self.exchange.begin()
        finite = self.exchange.mean_(flat, part)
        self.exchange.end()
        if not finite:
            raise NonFiniteError(
                f"the momentum of step {step} is not finite ({self.exchange.void}), though its gradients"
                " were: training has diverged; go back to a checkpoint, and lower the learning rate"
            )
        return views


def under(prefix: str, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors under a prefix, without it."""
    return {key.removeprefix(prefix): value for key, value in state.items() if key.startswith(prefix)}


def without(prefixes: Collection[str], state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors under none of these prefixes."""
    return {key: value for key, value in state.items() if not key.startswith(tuple(prefixes))}

"""Scheme: codecs of both directions, aggregation of updates, and sampling of clients."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from laconic.core.spec import Spec, parse
from laconic.exchange.method import lift
from laconic.federated.form import Buffers, Tensors
from laconic.federated.rounds import Aggregate, weighted_mean
from laconic.federated.samplings import Sampling
from laconic.federated.server import Server


class Scheme(Spec):
    """Federated method, named by one string."""

    @property
    def up(self) -> Any:
        """Spec of the clients' updates."""
        return "dense()"

    @property
    def down(self) -> Any:
        """Spec of the server's updates; None: the uncompressed model, or from `up`."""
        return None

    @property
    def aggregate(self) -> Aggregate:
        """Function that computes the next model."""
        return weighted_mean

    @property
    def sampling(self) -> Sampling | None:
        """Sampling of clients; None: the run's."""
        return None

    @property
    def max_norm(self) -> float | None:
        """Largest norm of updates. None: no clipping."""
        return None

    def attached(self, net: nn.Module) -> Scheme:
        """Return this scheme for the clients' model, which it may transform."""
        return self

    def begin(self) -> None:
        """Prepare the model for another client."""

    def shared(self, model: Tensors, trained: Tensors) -> Tensors:
        """Return the model that a client sends, given the one it received."""
        return trained

    def server(
        self,
        model: Mapping[str, Tensor],
        buffers: Buffers = "send",
        seed: int = 0,
        shared_start: bool = False,
    ) -> Server:
        """Return a server of this model. Raises `SpecError` if a spec needs all ranks at once."""
        return Server(
            model,
            self.up,
            self.down,
            buffers=buffers,
            max_norm=self.max_norm,
            seed=seed,
            shared_start=shared_start,
        )


def scheme_of(spec: Any) -> Scheme:
    """Return the scheme of a spec: a scheme, or a method, codec or selector for clients' updates.

    Raises `SpecError` for other specs.

    >>> scheme_of("fedavg()"), scheme_of("topk(density=0.01)")
    (fedavg(), updates(topk(density=0.01)))
    """
    from laconic.federated.schemes.updates import Updates  # imports this module

    found = parse(spec) if isinstance(spec, str) else spec
    if isinstance(found, Scheme):
        return found
    lift(found)  # raises if no message can carry it
    return Updates(found)

"""Scheme: what goes up and down, how updates become a model, and who takes part."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from torch import Tensor

from laconic.core.spec import Spec, Status, parse
from laconic.exchange.method import lift
from laconic.federated.form import Buffers
from laconic.federated.rounds import Aggregate, weighted_mean
from laconic.federated.samplings import Sampling
from laconic.federated.server import Server


class Scheme(Spec):
    """One federated method, as one string names it."""

    paper: ClassVar[str] = "-"
    status: ClassVar[Status] = "-"

    @property
    def up(self) -> Any:
        """What clients send: a spec that `compress` takes."""
        return "dense()"

    @property
    def down(self) -> Any:
        """What the server answers; None: the model, or what `up` says."""
        return None

    @property
    def aggregate(self) -> Aggregate:
        """What makes the next model of the clients' proposals."""
        return weighted_mean

    @property
    def sampling(self) -> Sampling | None:
        """Who takes part; None: as the run says."""
        return None

    @property
    def max_norm(self) -> float | None:
        """The norm that an update is clipped to; None: it is not."""
        return None

    def server(
        self,
        model: Mapping[str, Tensor],
        buffers: Buffers = "send",
        seed: int = 0,
        shared_start: bool = False,
    ) -> Server:
        """A server of this model. Raises `SpecError` where `up` or `down` need all ranks at once."""
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
    """The scheme that a spec stands for: a scheme, or any method, codec or selector, which goes up.

    Args:
        spec: a string, or what `parse` returns for one. `stc(down=0.01)` goes both ways.

    Raises:
        SpecError: It is something else, such as a strategy.

    >>> scheme_of("fedavg()"), scheme_of("topk(density=0.01)")
    (fedavg(), updates(topk(density=0.01)))
    """
    from laconic.federated.schemes.updates import Updates  # it is a scheme itself

    found = parse(spec) if isinstance(spec, str) else spec
    if isinstance(found, Scheme):
        return found
    lift(found)  # raises for what no message can carry
    return Updates(found)

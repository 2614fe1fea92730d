"""Updates: any codec or method in each direction, any mean, any sampling."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal, get_args

from laconic.core import arguments
from laconic.core.errors import SpecError
from laconic.core.spec import Status
from laconic.exchange.method import lift
from laconic.federated.rounds import Aggregate, majority, mean, weighted_mean
from laconic.federated.samplings import Sampling
from laconic.federated.schemes import Scheme

By = Literal["examples", "clients", "majority"]
AGGREGATES: dict[str, Aggregate] = {"examples": weighted_mean, "clients": mean, "majority": majority}


@dataclass(frozen=True, repr=False)
class Updates(Scheme):
    """Compressed updates, with one spec per direction.

    `up`, `down`: specs that need no other rank, such as stc(density=0.01); without `down` the model is sent
    uncompressed. `by`: a mean weighted by 'examples', an equal mean of 'clients', or the 'majority'.
    `sampling`: such as falling(0.2); default: the run's. `max_norm`: largest norm of updates.

    >>> from laconic.core.spec import parse
    >>> parse("updates(dhqc(density=0.01), dhqc(density=0.01), sampling=falling(0.2))").sampling.count(1, 100)
    20
    """

    status: ClassVar[Status] = "own"

    up: Any = field(default="dense()")
    down: Any = None
    by: By = "examples"
    sampling: Sampling | None = None
    max_norm: float | None = None

    name: ClassVar[str] = "updates"
    examples: ClassVar[tuple[str, ...]] = (
        "updates(stc(density=0.05), stc(density=0.05), by='clients')",
        "updates(qsgd(levels=7), sampling=falling(0.2), max_norm=1.0)",
    )

    def __post_init__(self) -> None:
        lift(self.up)  # raises for an invalid spec
        if self.down is not None:
            lift(self.down)
        arguments.choice("updates: by", self.by, get_args(By))
        if self.sampling is not None and not isinstance(self.sampling, Sampling):
            raise SpecError(
                f"updates: sampling must be a sampling such as falling(0.2), got {self.sampling!r}"
            )
        if self.max_norm is not None:
            arguments.number("updates: max_norm", self.max_norm, above=0, hint="None clips nothing")

    @property
    def aggregate(self) -> Aggregate:
        return AGGREGATES[self.by]

"""What crosses from stage to stage of a pipeline: a spec where there are `--stages`."""

from __future__ import annotations

from dataclasses import dataclass

from laconic.core.errors import SpecError
from laconic.core.spec import parse

DENSE = "dense()"


@dataclass(frozen=True)
class Crossing:
    """`spec`: its canonical text. `forward`, `backward`: specs for `laconic.pipeline`; "": float32."""

    spec: str
    forward: str = ""
    backward: str = ""

    @property
    def dense(self) -> bool:
        """Whether float32 crosses in both directions."""
        return not self.forward and not self.backward


def crossing(text: str) -> Crossing:
    """The crossing of a spec. Raises `SpecError` if it is of something else."""
    found = parse(text)
    if repr(found) != DENSE:
        raise SpecError(
            f"{text} is for workers that each have the whole model: with --stages give {DENSE}, and methods"
            " for gradients of weights to --replicas-with"
        )
    return Crossing(DENSE)

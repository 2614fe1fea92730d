"""Plan: the parsed arguments of `compress`."""

from __future__ import annotations

from dataclasses import dataclass

from laconic.core.codec import Codec
from laconic.pipeline.codings.change import Change
from laconic.pipeline.place import Place


@dataclass(frozen=True)
class Plan:
    """Arguments of `compress`, equal on all ranks except `place`."""

    forward: Change | Codec
    backward: Codec
    samples: int
    keep: Codec
    place: Place
    seed: int

    @property
    def direct(self) -> Codec:
        return self.forward.codec if isinstance(self.forward, Change) else self.forward

"""Warning for dropped weights that are nonzero again before the next step, as under Lookahead."""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor

from laconic.core.warning import warn

MAX_CHECKS = 16  # wrappers use slow weights every 5 or 6 steps


class DroppedWeightsCheck:
    def __init__(self) -> None:
        self._checks = -1  # a script may load weights before the first step

    def check(self, weights: Iterable[tuple[str, Tensor, Tensor]]) -> None:
        self._checks += 1
        if not 0 < self._checks <= MAX_CHECKS:
            return
        for name, weight, mask in weights:
            if bool(weight.detach()[~mask].any()):
                self._checks = MAX_CHECKS
                warn(
                    f"masked weights of {name} are nonzero between two steps, and forward passes use them: an"
                    " average or a wrapper around the optimiser, such as Lookahead, restores them; only steps"
                    " of the optimiser set them to zero",
                )
                return

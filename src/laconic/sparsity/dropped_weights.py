"""Warning for dropped weights that are nonzero again before the next step, as under Lookahead."""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor

from laconic.core.warning import warn

LOOKS = 16  # steps; wrappers with slow weights use them every 5 or 6


class ReturnedWatch:
    """Looks at the weights before each of the first steps but one, and warns once."""

    def __init__(self) -> None:
        self._looks = -1  # before the first step a script may load weights

    def look(self, weights: Iterable[tuple[str, Tensor, Tensor]]) -> None:
        """Warn if a weight that is out of use is not zero. `weights`: name, weight and mask of each."""
        self._looks += 1
        if not 0 < self._looks <= LOOKS:
            return
        for name, weight, mask in weights:
            if bool(weight.detach()[~mask].any()):
                self._looks = LOOKS
                warn(
                    f"weights of {name} that are out of use were written between two steps, and forward"
                    " passes compute with them: a wrapper around the optimiser, such as Lookahead, or an"
                    " average brings them back; only the optimiser's own steps set them to zero",
                )
                return

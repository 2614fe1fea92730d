"""Gradient watch: notices gradients that were changed between the exchange and the step.

Under momentum correction `p.grad` holds sent velocity, so clipping it clips momentum; and a GradScaler that
the method does not know of changes the scale of what any memory holds back. One small tensor per bucket is
enough to notice either.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterable

from torch import Tensor

from laconic.core.layout import Layout

TOLERANCE = 0.02  # relative: what rounding to bfloat16 may change
LOOKS = 16  # at tensors, for a scaler alone, which is there from the first step on: each waits for the device
LEAST_POWER = 7  # a scaler divides by 2^7 or more; a script that has added gradients up, by less


class GradientWatch:
    """Remembers the magnitude of one mean per bucket, and compares it before the step; warns once."""

    def __init__(self) -> None:
        self._seen: dict[str, tuple[float, bool]] = {}  # its sum of magnitudes; whether it is velocity
        self._looks = LOOKS
        self._warned = False

    def note(self, mean: Tensor, layout: Layout, owned: Iterable[str], scale: float, remembers: bool) -> None:
        """Remember the smallest `owned` tensor of this bucket, from the flat `mean`.

        `remembers`: the method has a memory; then the first few steps watch for a scaler without such too.
        """
        if self._warned:
            return
        owned = frozenset(owned)
        watched = [each for each in layout if each.name in owned]
        if not watched and remembers and self._looks > 0:
            watched = list(layout)
        smallest = min(watched, key=lambda entry: entry.numel, default=None)
        if smallest is not None:
            view = mean[smallest.offset : smallest.offset + smallest.numel]
            self._seen[smallest.name] = float(view.abs().sum()) / scale, smallest.name in owned

    def noted(self) -> tuple[str, ...]:
        """Names of the tensors to compare before the step."""
        return tuple(self._seen)

    def compare(self, name: str, grad: Tensor, scale: float) -> None:
        """Warn if the gradient is not what the exchange left. `scale`: by which the step will divide it."""
        expected, velocity = self._seen.pop(name, (0.0, False))
        if self._warned or not expected:
            return
        self._looks -= not velocity
        found = float(grad.abs().sum()) / scale
        if velocity and abs(found - expected) > TOLERANCE * max(found, expected):
            self._warn(
                f"the gradient of {name} was changed between backward() and step() (its sum of magnitudes was"
                f" {expected:.4g}, it is {found:.4g}). With momentum correction it holds velocity: to clip"
                " gradients use clip= of the method, and with a GradScaler pass compress(..., scaler=scaler)"
            )
        elif not velocity and (power := _power_of_two(expected, found)) >= LEAST_POWER:
            self._warn(
                f"the gradient of {name} was divided by {2**power} between backward() and step(), as by a"
                " GradScaler. When that changes its scale, what this method holds back would come back at the"
                " wrong one: pass it, laconic.compress(..., scaler=scaler)"
            )

    def _warn(self, text: str) -> None:
        self._warned = True
        warnings.warn(text, stacklevel=2)


def _power_of_two(before: float, after: float) -> int:
    """The k > 0 for which before = 2^k after, as scales of a GradScaler are; 0 for any other ratio.

    >>> _power_of_two(512.0, 2.0), _power_of_two(512.0, 3.0), _power_of_two(1.0, 1.0), _power_of_two(1.0, 0.0)
    (8, 0, 0, 0)
    """
    if not (0 < after < before < math.inf):
        return 0
    power = round(math.log2(before / after))
    return power if math.isclose(before, after * 2.0**power, rel_tol=1e-4) else 0

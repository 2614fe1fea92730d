"""Gradient watch: notices gradients that were changed between the exchange and the step.

Under momentum correction `p.grad` holds sent velocity, so clipping it clips momentum; and a scaled gradient
without `scaler=` mixes scales in the memory. One small tensor per bucket is enough to notice either.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable

from torch import Tensor

from laconic.core.layout import Layout

TOLERANCE = 0.02  # relative: what rounding to bfloat16 may change


class GradientWatch:
    """Remembers the magnitude of one mean per bucket, and compares it before the step; warns once."""

    def __init__(self) -> None:
        self._seen: dict[str, float] = {}
        self._warned = False

    def note(self, mean: Tensor, layout: Layout, owned: Iterable[str], scale: float) -> None:
        """Remember the smallest `owned` tensor of this bucket, from the flat `mean`."""
        owned = frozenset(owned)
        smallest = min((e for e in layout if e.name in owned), key=lambda e: e.numel, default=None)
        if smallest is not None and not self._warned:
            view = mean[smallest.offset : smallest.offset + smallest.numel]
            self._seen[smallest.name] = float(view.abs().sum()) / scale

    def noted(self) -> tuple[str, ...]:
        """Names of the tensors to compare before the step."""
        return tuple(self._seen)

    def compare(self, name: str, grad: Tensor) -> None:
        """Warn if the gradient is no longer what the exchange left."""
        expected = self._seen.pop(name, None)
        if expected is None or self._warned:
            return
        found = float(grad.abs().sum())
        if abs(found - expected) > TOLERANCE * max(found, expected):
            self._warned = True
            warnings.warn(
                f"the gradient of {name} was changed between backward() and step() (its sum of magnitudes was"
                f" {expected:.4g}, it is {found:.4g}). With momentum correction it holds velocity: to clip"
                " gradients use clip= of the method, and with a GradScaler pass compress(..., scaler=scaler)",
                stacklevel=2,
            )

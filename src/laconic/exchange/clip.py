"""Clip: each rank's whole gradient is limited in norm, though it comes in buckets, one after the other.

The factor of a bucket needs the norm of all tensors, vectors included. With one bucket that is at hand. With
several, the rest is taken from the last step, grown as much as what has come so far:

    |g|^2 ~ s + rest' * growth       s: squared norm of the tensors that have come in this step,
                                     s', rest': of the same tensors and of the others in the last step
    growth = s / s'                  where s' is a hundredth of s' + rest' or more
             (s + rest') / (s' + rest')    otherwise: a small part tells little about the rest
    g = g * min(1, limit / |g|)

That is exact for the last bucket, and where the gradient has changed in length alone for all but small ones.
Where there was no last step, it is the norm of what has come so far.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from laconic.core.layout import Layout

KIND = "clip"
TELLING = 0.01  # of the last step's squared norm: such a part tells how the rest has grown


class Clip:
    """Measures the gradients of a model, bucket by bucket. Keeps the squared norm of each tensor."""

    def __init__(self, layout: Layout) -> None:
        self._before = dict.fromkeys(layout.names, 0.0)  # of the last step that counted
        self._now: dict[str, float] = {}

    def begin(self) -> None:
        """The first bucket of a step is about to come."""
        self._now.clear()

    def factor(self, grad: Tensor, layout: Layout, scale: float, limit: float | None) -> float:
        """What scale * grad, this bucket, is to be multiplied by; `limit` None only measures."""
        if len(layout):
            norms = torch._foreach_norm(layout.segments.views(grad), dtype=torch.float64)
            squares = (torch.stack(norms) * scale).square().tolist()
            self._now |= zip(layout.names, squares, strict=True)
        norm = self._norm()
        return 1.0 if limit is None or not limit < norm < math.inf else limit / norm

    def end(self) -> None:
        """The step counts."""
        if all(map(math.isfinite, self._now.values())):
            self._before |= self._now

    def state_dict(self) -> dict[str, Tensor]:
        """ "clip/<tensor name>" to the squared norm of its last gradient, float64."""
        return {f"{KIND}/{name}": torch.tensor(v, dtype=torch.float64) for name, v in self._before.items()}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Take the norms back."""
        self._before = {name: float(state[f"{KIND}/{name}"]) for name in self._before}
        self._now.clear()

    def _norm(self) -> float:
        """The norm of the whole gradient, as far as it is known."""
        now = sum(self._now.values())
        before = sum(self._before[name] for name in self._now)
        rest = sum(square for name, square in self._before.items() if name not in self._now)
        if before >= TELLING * (before + rest) > 0:
            return math.sqrt(now + rest * now / before)
        return math.sqrt(now + rest * (now + rest) / (before + rest) if rest else now)

"""Clip: limits the norm of each rank's whole gradient, bucket by bucket.

The norm of the tensors still missing is estimated from the last step, scaled by the growth of the others:

    |g|^2 ~ s + rest' * growth       s: squared norm of this step's tensors so far,
                                     s', rest': of the same tensors and of the others in the last step
    growth = s / s'                  if s' is a hundredth of s' + rest' or more
             (s + rest') / (s' + rest')    otherwise: a small part predicts the rest poorly
    g = g * min(1, limit / |g|)

This is exact for the last bucket, and for all but small ones if only the gradient's length has changed.
The first step ignores the missing tensors.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from laconic.core.layout import Layout
from laconic.feedback import Feedback

KIND = "clip"
MIN_SHARE = 0.01


class Clip:
    def __init__(self, feedbacks: Sequence[Feedback], layout: Layout, size: int) -> None:
        self._feedbacks, self._size = feedbacks, size
        self._before = dict.fromkeys(layout.names, 0.0)  # of the last step not skipped
        self._now: dict[str, float] = {}

    @classmethod
    def of(cls, feedbacks: Sequence[Feedback], layout: Layout, size: int) -> Clip | None:
        clipping = [each for each in feedbacks if each.clip_at(each.warm_at) is not None]
        return cls(clipping, layout, size) if clipping else None

    def begin(self) -> None:
        self._now.clear()

    def factor(self, grad: Tensor, layout: Layout, scale: float, step: int) -> float:
        if len(layout):
            norms = torch._foreach_norm(layout.segments.views(grad), dtype=torch.float64)
            squares = (torch.stack(norms) * scale).square().tolist()
            self._now |= zip(layout.names, squares, strict=True)
        limits = [limit for each in self._feedbacks if (limit := each.clip_at(step)) is not None]
        limit = min(limits) / math.sqrt(self._size) if limits else None
        norm = self._norm()
        return 1.0 if limit is None or not limit < norm < math.inf else limit / norm

    def end(self) -> None:
        if all(map(math.isfinite, self._now.values())):
            self._before |= self._now

    def state_dict(self) -> dict[str, Tensor]:
        """Return "clip/<tensor name>" to the squared norm of its last gradient, float64."""
        return {
            f"{KIND}/{name}": torch.tensor(v, dtype=torch.float64, device="cpu")
            for name, v in self._before.items()
        }

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        self._before = {name: float(state[f"{KIND}/{name}"]) for name in self._before}
        self._now.clear()

    def _norm(self) -> float:
        now = sum(self._now.values())
        before = sum(self._before[name] for name in self._now)
        rest = sum(square for name, square in self._before.items() if name not in self._now)
        if before >= MIN_SHARE * (before + rest) > 0:
            return math.sqrt(now + rest * now / before)
        return math.sqrt(now + rest * (now + rest) / (before + rest) if rest else now)

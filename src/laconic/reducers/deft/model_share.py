"""Model share: the number of entries per bucket, from the norms of the last step."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from laconic.core.errors import StateError
from laconic.core.layout import Layout
from laconic.feedback.memory import Pending
from laconic.reducers.deft.bins import Bins, allot

KIND = "weight"


class ModelShare:
    """One number q_l per tensor: its norm at the last step times the square root of its number of pieces.

    That is the sum of the norms of equal pieces, so a share does not depend on DDP's buckets.
    """

    def __init__(self, layout: Layout, k: int, size: int) -> None:
        self._k = k
        self._entries = [entry for entry in layout if entry.numel]
        self._pieces = {
            entry.name: min(entry.numel, size) if entry.numel * size > layout.numel else 1
            for entry in self._entries
        }
        self._weights = dict.fromkeys(self._pieces, 0.0)
        self._shares: dict[str, int] | None = None
        self._pending: Pending[dict[str, float]] = Pending(self._finish)

    def budget(self, bucket: Layout, step: int) -> int | None:
        """Return this bucket's number of entries; None if the last norms are unknown."""
        self._pending.finish_before(step)
        names = [entry.name for entry in bucket if entry.numel]
        if len(names) == len(self._entries):
            return self._k
        if not any(self._weights.values()):
            return None
        if self._shares is None:
            q = torch.tensor(
                [self._weights[entry.name] for entry in self._entries], dtype=torch.float64, device="cpu"
            )
            n = torch.tensor([entry.numel for entry in self._entries], dtype=torch.int64, device="cpu")
            self._shares = dict(zip(self._weights, allot(q, n, self._k).tolist(), strict=True))
        return min(bucket.numel, max(1, sum(self._shares[name] for name in names)))

    def note(self, norms: Tensor, bins: Bins, bucket: Layout, step: int) -> None:
        squares, at, weights = norms.double().square().tolist(), 0, {}
        sizes = bins.pieces.sizes
        for entry in bucket:
            end, left = at, entry.numel
            while left:
                left -= sizes[end]
                end += 1
            if entry.numel:
                weights[entry.name] = math.sqrt(self._pieces[entry.name] * sum(squares[at:end]))
            at = end
        self._pending.add(weights, bucket, step)

    def put_back(self, bucket: Layout) -> None:
        self._pending.drop(bucket)

    def state_dict(self) -> dict[str, Tensor]:
        self._pending.finish_all()
        return {
            f"{KIND}/{name}": torch.tensor(q, dtype=torch.float64, device="cpu")
            for name, q in self._weights.items()
        }

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        expected = {f"{KIND}/{name}" for name in self._weights}
        if expected != state.keys():
            other = sorted(expected ^ state.keys())[0]
            raise StateError(
                f"{other} is not in both the saved state and this model: the state is of another model"
            )
        self._pending.finish_all()
        self._weights = {name: float(state[f"{KIND}/{name}"]) for name in self._weights}
        self._shares = None

    def _finish(self, weights: dict[str, float], bucket: Layout) -> None:
        self._weights |= weights
        self._shares = None

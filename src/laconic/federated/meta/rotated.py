"""Few-shot classes: rotations of scikit-learn's digits.

Ten digits in four turns are 40 classes of at least 174 images. A rotated 0 or 8 looks like itself.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import numpy as np
import torch
from torch import Tensor

from laconic.core import arguments
from laconic.core.errors import SpecError
from laconic.core.extras import require
from laconic.core.turn import mix
from laconic.federated.meta.tasks import Batch

TURNS = 4


@dataclass(frozen=True)
class RotatedDigits:
    """Agents that classify `ways` classes each; normalised images float32 (64,).

    digits: digits whose rotations are the classes.

    Raises:
        SpecError: No agents, fewer classes than ways, or an invalid digit.
    """

    count: int
    digits: tuple[int, ...] = (0, 1, 2, 3, 4, 5, 6)
    ways: int = 5
    seed: int = 0

    def __post_init__(self) -> None:
        arguments.whole("count", self.count, 1, hint="a meta-model needs agents")
        for digit in self.digits:
            arguments.whole("digits", digit, 0, 9)
        most = TURNS * len(set(self.digits))
        arguments.whole("ways", self.ways, 2, most, hint=f"a digit makes {TURNS} classes")

    def classes(self) -> list[list[int]]:
        """Return each agent's classes, 4 * digit + turn."""
        all_of_them = [TURNS * digit + turn for digit in sorted(set(self.digits)) for turn in range(TURNS)]
        rng = np.random.default_rng([self.seed & 0xFFFFFFFF, 1])
        return [rng.permutation(all_of_them)[: self.ways].tolist() for _ in range(self.count)]

    def batch(self, step: int, size: int) -> Batch:
        """Return images float32 (a, size, 64) and labels int64 (a, size); classes alternate."""
        each = -(-size // self.ways)
        (x, y), _ = self._drawn(step, each, 0)
        return x[:, :size], y[:, :size]

    def episode(self, step: int, shots: int, queries: int) -> tuple[Batch, Batch]:
        arguments.whole("shots", shots, 1)
        arguments.whole("queries", queries, 1)
        return self._drawn(step, shots, queries)

    def _drawn(self, step: int, shots: int, queries: int) -> tuple[Batch, Batch]:
        rng = np.random.default_rng(mix(self.seed, step, 2))
        images, chosen = [], shots + queries
        for classes in self.classes():
            rows = []
            for name in classes:
                pool = _pool()[name]
                if chosen > len(pool):
                    raise SpecError(
                        f"shots + queries must be at most {len(pool)}, the images of digit {name // TURNS},"
                        f" got {chosen}"
                    )
                rows.append(pool[torch.from_numpy(rng.permutation(len(pool))[:chosen])])
            images.append(torch.stack(rows, dim=1))  # (chosen, ways, 64)
        x = torch.stack(images)
        y = torch.arange(self.ways, dtype=torch.int64, device="cpu").expand(self.count, chosen, self.ways)
        return (
            (x[:, :shots].flatten(1, 2), y[:, :shots].flatten(1, 2)),
            (x[:, shots:].flatten(1, 2), y[:, shots:].flatten(1, 2)),
        )


@cache
def _pool() -> dict[int, Tensor]:
    require("sklearn", "rotated digits")
    from sklearn.datasets import load_digits

    found, labels = load_digits(return_X_y=True)
    images = torch.from_numpy(((found - 4.88) / 6.02).astype(np.float32)).view(-1, 8, 8)
    return {
        TURNS * digit + turn: torch.rot90(images[labels == digit], turn, (1, 2)).flatten(1)
        for digit in range(10)
        for turn in range(TURNS)
    }

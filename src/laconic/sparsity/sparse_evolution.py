"""Sparse evolution (SET): the smallest weights drop, and random ones grow.

Mocanu et al. 2018, doi:10.1038/s41467-018-04316-3, as in the RigL authors' baseline (google-research/rigl):
smallest |w| (SET: smallest positive and largest negative w), a fraction that falls as a cosine, updates after
the optimiser's step.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from laconic.core.spec import Status
from laconic.sparsity.changing_masks import ChangingMasks
from laconic.sparsity.draws import generator
from laconic.sparsity.mask_rule import Moment


@dataclass(frozen=True, repr=False)
class SparseEvolution(ChangingMasks):
    """Drop by magnitude, grow at random. Arguments: see `Rigl`.

    >>> SparseEvolution(density=0.2)
    sparse_evolution(density=0.2)
    """

    paper: ClassVar[str] = "Mocanu et al. 2018, doi:10.1038/s41467-018-04316-3"
    status: ClassVar[Status] = "verified"
    code: ClassVar[str] = "google-research/rigl"
    examples: ClassVar[tuple[str, ...]] = ("sparse_evolution(density=0.1)",)

    def updated(self, weight: Tensor, used: Tensor, score: Tensor | None, share: float, at: Moment) -> Tensor:
        luck = torch.rand(
            used.numel(), generator=generator(at.key + 2), dtype=torch.float32, device="cpu"
        ).to(used.device)
        return self.changed(weight, used, luck, at)

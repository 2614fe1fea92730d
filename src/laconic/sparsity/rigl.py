"""RigL: the smallest weights drop, and those with the largest dense gradient grow.

Evci et al. 2020, arXiv:1911.11134. A turn is a training iteration; every `every`-th updates masks instead of
stepping the optimiser. For a weight with z entries in use:

    count = floor(f * z),  f = drop / 2 * (1 + cos(pi * turn / (until * steps)))
    drop the `count` entries with the smallest |w|
    grow the `count` with the largest |sum over ranks of the dense gradient|
    new entries: w = 0 and optimiser slots = 0;  entries dropped and grown at once keep their value

Checked against the authors' code (google-research/rigl), with its sum over ranks and first update at turn 0.
Ours: a key decides between equal values (theirs: noise of 1e-5 on |w|); slots are cleared at the drop
(theirs: growth). `accumulate` is from nollied/rigl-torch, with normalised gradients.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import ClassVar

import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from laconic.core import arguments
from laconic.core.spec import Status
from laconic.sparsity.changing_masks import ChangingMasks
from laconic.sparsity.densities import DensityLayout
from laconic.sparsity.mask_rule import Moment
from laconic.sparsity.sparse_training import SparseTraining
from laconic.sparsity.sparsify import sparsify


@dataclass(frozen=True, repr=False)
class Rigl(ChangingMasks):
    """RigL: drop by magnitude, grow by gradient.

    Args:
        density: Fraction of weights in use, in (0, 1].
        every: Turns between updates.
        drop: Fraction of entries that drop in the first update, in (0, 1].
        until: Fraction of the training after which masks are fixed, in (0, 1].
        layout: "erk": narrow layers are denser; "uniform": equal densities, the first layer dense; "2:4"
            needs density=0.5.
        accumulate: Turns, up to the update, with gradients in the score. With several, each turn's gradient
            is scaled to norm 1, and `every` should be larger.

    >>> Rigl(density=0.2, every=50)
    rigl(density=0.2, every=50)
    """

    accumulate: int = 1

    paper: ClassVar[str] = "Evci et al. 2020, arXiv:1911.11134"
    status: ClassVar[Status] = "verified"
    code: ClassVar[str] = "google-research/rigl"
    examples: ClassVar[tuple[str, ...]] = ("rigl(density=0.1)",)
    replaces_step: ClassVar[bool] = True

    def __post_init__(self) -> None:
        super().__post_init__()
        arguments.whole("accumulate", self.accumulate, 1, self.every)

    def counts(self, turn: int, steps: int) -> bool:
        ahead = -turn % self.every  # until the next update
        return ahead < self.accumulate and self.due(turn + ahead, steps)

    def updated(self, weight: Tensor, used: Tensor, score: Tensor | None, share: float, at: Moment) -> Tensor:
        assert score is not None
        return self.changed(weight, used, score.abs(), at)


def rigl(
    model: nn.Module,
    optimizer: Optimizer,
    density: float = 0.1,
    *,
    steps: int,
    every: int = 100,
    drop: float = 0.3,
    until: float = 0.75,
    layout: DensityLayout = "erk",
    accumulate: int = 1,
    keep: Collection[str] = (),
    seed: int = 0,
    group: dist.ProcessGroup | None = None,
) -> SparseTraining:
    """Call `sparsify` with `Rigl`; see both for arguments.

    >>> import torch
    >>> net = nn.Sequential(nn.Linear(100, 100), nn.ReLU(), nn.Linear(100, 10))
    >>> optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    >>> sparse = rigl(net, optimizer, density=0.1, steps=1000)
    >>> {name: round(share, 2) for name, share in sparse.densities.items()}
    {'0.weight': 0.07, '2.weight': 0.39}
    """
    spec = Rigl(density, every, drop, until, layout, accumulate)
    return sparsify(model, optimizer, spec, steps=steps, keep=keep, seed=seed, group=group)

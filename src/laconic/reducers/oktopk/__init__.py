"""Ok-Topk: the largest entries of the sum of all ranks' largest, at a cost independent of their number.

Li and Hoefler 2022, arXiv:2201.07598. The result equals that of `gtopk`, bit for bit. Per tensor of n
elements, with k = ceil(density * n) and N ranks:

    1. P_r = the k largest |x_r|, on each rank r
    2. the bucket is cut into N regions with about equally many of the P_r: see `regions`
    3. all_to_all: a rank adds up all entries chosen in its region, in rank order: s
    4. all_gather: those |s| that reach the tensor's threshold
    5. mean = the k largest of all received entries, the same on every rank
    6. the next threshold: a little less than the k-th largest, times its growth since the last step

The threshold saves bytes and cannot change the mean. Per tensor a region sends at least the average number a
of entries that a rank chose there, so that k arrive, and at most 2 a + 4. If this may hold back an entry of
the mean, which every rank can see, one more all_gather sends it.

The paper chooses about k entries, by thresholds that are exact every tau' steps; here exactly k.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from laconic import kernels
from laconic.comm.comm import Comm
from laconic.comm.messages import Sent
from laconic.comm.skippable import all_to_all_or_skip, fits
from laconic.core import arguments, deferred
from laconic.core.framing import CPU, moved
from laconic.core.layout import Layout
from laconic.core.selector import counts_per_segment, kept
from laconic.core.spec import Status
from laconic.core.turn import Turn
from laconic.reducers import BoundReducer, DensityReducer
from laconic.reducers.entries import Entries
from laconic.reducers.oktopk.global_topk import global_topk
from laconic.reducers.oktopk.regions import Regions

RANKS = 64  # largest group that `nbytes` bounds
MARGIN = 0.97  # threshold as a share of the next mean's expected smallest entry
MOST_GROWTH = 1.5  # of the smallest entries, per step


@dataclass(frozen=True, repr=False)
class OkTopk(DensityReducer):
    """mean = the k = ceil(density * n) largest entries of the average of every rank's k largest.

    At most k entries of a tensor change. `every`: steps between two cuts of the regions.

    Payload: up to twice k values in 32 bits with positions by `golomb`: up those outside this rank's region,
    at most k; down those inside, k / N on average, at most k. `nbytes` is a bound for up to 64 ranks; each
    further rank may add 15 bytes.

    >>> OkTopk(density=0.01)
    oktopk(density=0.01)
    """

    every: int = 64

    paper: ClassVar[str] = "Li and Hoefler 2022, arXiv:2201.07598"
    status: ClassVar[Status] = "verified"
    code: ClassVar[str] = "Shigangli/Ok-Topk"
    examples: ClassVar[tuple[str, ...]] = (
        "oktopk(density=0.01)",
        "oktopk(density=0.2, every=2)",
        "oktopk(density=1.0)",
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        arguments.whole("oktopk: every", self.every, 1)

    def bind(self, layout: Layout, comm: Comm) -> BoundReducer:
        return _OkTopk(self, comm)

    def nbytes(self, layout: Layout) -> int:
        """Return the most bytes: positions of n in pieces take up to log2(n / k) + 3.1 bits, plus 2 bytes.

        Two rounds, with k' = k / 2 each, take one bit more.
        """
        total = 15 * RANKS + 2
        for entry in layout:
            k = kept(self.density, entry.numel)
            bits = k * (2 * (math.log2(entry.numel / k) + 3.1) + 1) if k else 0
            total += 20 + 2 * 4 * k + math.ceil(bits / 8)
        return total


class _OkTopk(BoundReducer):
    """Regions and floors affect only the cost, and are not saved."""

    def __init__(self, spec: OkTopk, comm: Comm) -> None:
        self._spec = spec
        self._comm = comm
        self._regions: dict[int, tuple[Layout, int, Regions]] = {}  # by id of a layout; step of the cut
        self._floors: dict[str, float] = {}  # smallest entry of the mean, by tensor name
        self._growth = 1.0
        self._before: tuple[int, dict[str, float], float] | None = None  # step; floors and growth before it

    def reduce(
        self, x: Tensor | None, layout: Layout, turn: Turn, out: Tensor, alpha: float = 1.0
    ) -> Sent | None:
        if self._before is None or self._before[0] != turn.step:
            self._before = turn.step, dict(self._floors), self._growth
        segments, starts = layout.segments, layout.segments.packed.starts_tensor
        ks = counts_per_segment(self._spec.density, segments)
        own = None if x is None else Entries.largest(x, segments, ks).on(CPU)
        chosen = None if own is None else own.positions(starts)
        regions = self._cut(chosen, layout, turn.step, out.device)
        if regions is None:
            return None
        wires = None
        if own is not None and chosen is not None:
            parts = zip(regions.split(chosen, own.values), regions.pieces, strict=True)
            wires = moved([part.wire(pieces) for part, pieces in parts], out.device)
        came = all_to_all_or_skip(self._comm, wires, out.device)
        if own is None or chosen is None or came is None:
            return None
        floors = torch.tensor(
            [self._floors.get(name, 0.0) for name in layout.names], dtype=torch.float32, device="cpu"
        )
        thresholds = MARGIN * self._growth * floors
        positions, best, found = global_topk(came, regions, ks, thresholds, self._comm, out.device)
        final = best.on(out.device)
        self._growth = growth(floors, found)
        self._floors.update(zip(layout.names, found.tolist(), strict=True))
        if deferred.is_late() and not fits([final.values], alpha):
            return None
        deferred.write(
            lambda: kernels.scatter_add_(
                segments.zero_(out), segments, final.indices, final.counts, final.values, alpha
            )
        )
        return own.share(segments, chosen, positions, out.device)

    def _cut(self, chosen: Tensor | None, layout: Layout, step: int, device: torch.device) -> Regions | None:
        _, cut_at, regions = self._regions.get(id(layout), (layout, step, None))
        if regions is None or not 0 <= step - cut_at < self._spec.every:
            regions = Regions.agreed(chosen, layout.segments.packed, self._comm, device)
            if regions is not None:
                self._regions[id(layout)] = (layout, step, regions)
        return regions

    def writes_late(self, step: int) -> bool:
        return True

    def put_back(self, layout: Layout) -> None:
        """Restore also regions and floors: a bad batch has unusual floors."""
        if self._before is None:
            return
        step, floors, self._growth = self._before
        self._floors = dict(floors)
        if id(layout) in self._regions and self._regions[id(layout)][1] == step:
            del self._regions[id(layout)]

    def accept(self, layout: Layout) -> None:
        self._before = None

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Reset regions and floors: all ranks must agree on when to cut again."""
        super().load_state_dict(state)
        self._regions.clear()
        self._floors.clear()
        self._growth = 1.0
        self._before = None


def growth(before: Tensor, after: Tensor) -> float:
    """Return the median growth of floors float32 (s,): from 1 to `MOST_GROWTH`.

    >>> growth(torch.tensor([0.0, 1.0, 2.0, 4.0]), torch.tensor([7.0, 1.5, 2.5, 4.0]))
    1.25
    """
    known = before > 0
    if not bool(known.any()):
        return 1.0
    return float((after[known] / before[known]).median().clamp(1.0, MOST_GROWTH))

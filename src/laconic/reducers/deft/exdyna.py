"""ExDyna: MiCRO with moving parts, so that every rank finds equally many entries in its own.

Yoon and Oh 2024 (CCGrid), arXiv:2402.13781; the authors' code is kljp/exdyna [V]. As `micro`, but the parts,
equal at first, consist of 1024 blocks. After each step, from the first border to the last, with c_p entries
chosen in part p and c on average:

    c_p > 1.05 c  and  c_{p+1} < c / 1.05     one block moves from part p to part p + 1
    c_{p+1} > 1.05 c  and  c_p < c / 1.05     one block moves from part p + 1 to part p

unless the giving part has only a quarter of an equal one.

Differences from the paper and its code, besides those of `micro`: a block is n / 1024 elements of the model
there, 1/1024 of each tensor here.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from laconic.comm.comm import Comm
from laconic.core.errors import SpecError
from laconic.core.layout import Layout
from laconic.core.spec import Status
from laconic.reducers import BoundReducer
from laconic.reducers.deft.borders import Borders
from laconic.reducers.deft.threshold_controlled import ByThreshold

BLOCKS = 1024


@dataclass(frozen=True, repr=False)
class Exdyna(ByThreshold):
    """mean = average of x at the entries that reach the threshold on the rank that owns their part.

    For at most 1024 ranks. Payload, error and arguments as in `micro`.

    >>> Exdyna(density=0.001)
    exdyna(density=0.001)
    """

    paper: ClassVar[str] = "Yoon and Oh 2024, arXiv:2402.13781"
    status: ClassVar[Status] = "partial"
    code: ClassVar[str] = "kljp/exdyna"
    examples: ClassVar[tuple[str, ...]] = ("exdyna(density=0.01)", "exdyna(density=0.3, indices=raw32())")

    def bind_sparse(self, layout: Layout, comm: Comm) -> BoundReducer:
        if comm.size > BLOCKS:
            raise SpecError(
                f"exdyna supports at most {BLOCKS} ranks, one per block, got {comm.size}: use micro"
            )
        return self.bind_parts(comm, Borders.even(comm.size, BLOCKS), Borders.moved)

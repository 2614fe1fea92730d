"""MiCRO: every rank selects the entries that reach a common threshold, in its own part of each tensor.

Yoon and Oh 2023 (HiPC), arXiv:2310.00967; the authors' code is kljp/micro [V]. At step t, rank i, of N:

    part     (t + i) mod N of N equal parts
    S_i      where |x_i| >= d in this part
    mean[S]  1/N * sum over ranks of x_i[S], at the union S of all S_i
    d        follows the number sent at the last step, without communication; equal on all ranks

Differences from the paper and its code:

    the parts      There of the model as one vector, here of each tensor.
    the threshold  See `threshold_controller`: theirs takes hundreds of steps to approach the density.
    first step     Without a threshold yet, the density * n largest of each tensor.
    nothing found  There one entry anyway, here none.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from laconic.comm.comm import Comm
from laconic.core.layout import Layout
from laconic.core.spec import Status
from laconic.reducers import BoundReducer
from laconic.reducers.deft.borders import Borders
from laconic.reducers.deft.threshold_controlled import ByThreshold


@dataclass(frozen=True, repr=False)
class Micro(ByThreshold):
    """mean = average of x at the entries that reach the threshold on the rank that owns their part.

    Sends density * n of all tensors together on average once the threshold has settled, in the first steps
    less. `indices`: coding of positions. Density 1 is `sum()`.

    Payload per rank, with K entries chosen by all, unlimited when the gradient grows: 4 K bytes of values,
    and the positions of the entries it chose, K / N on average; in the first step 8 kB more per bucket.
    Error: |x - sent| <= |x|.

    >>> Micro(density=0.001)
    micro(density=0.001)
    """

    paper: ClassVar[str] = "Yoon and Oh 2023, arXiv:2310.00967"
    status: ClassVar[Status] = "partial"
    code: ClassVar[str] = "kljp/micro"
    examples: ClassVar[tuple[str, ...]] = ("micro(density=0.01)", "micro(density=0.3, indices=delta())")

    def bind_sparse(self, layout: Layout, comm: Comm) -> BoundReducer:
        return self.bind_parts(comm, Borders.even(comm.size, comm.size))

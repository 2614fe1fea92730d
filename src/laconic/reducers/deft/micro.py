"""MiCRO: every rank takes what reaches a common threshold, in a part of each tensor that is its own.

Yoon and Oh 2023 (HiPC), arXiv:2310.00967; the authors' code is kljp/micro [V]. At step t, rank i, of N:

    part     (t + i) mod N of N equal parts
    S_i      where |x_i| >= d in this part
    mean[S]  1/N * sum over ranks of x_i[S], at the union S of all S_i
    d        follows how many were sent at the last step: without communication, and the same on all

No rank sorts, and each looks at n / N elements. What it holds back stays in its residual.

What differs from the paper and its code, and why:

    the parts      There of the whole model as one vector, here of each tensor: the result does not depend on
                   how DDP cuts buckets, and every rank has its share of every layer.
    the threshold  See `threshold_controller`: theirs takes hundreds of steps to come near the density.
    the first step has no threshold yet: density * n of each tensor, its largest.
    nothing found  There one entry all the same, here none: a small tensor's part often has nothing to send.
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
    """mean = average of x at the entries that reach the threshold on the rank whose part they are in.

    On average density * n of all tensors together, once the threshold has settled, in about nine steps: until
    then less, down to half of it in the third. After that a step has a few percent more or less, 12 at most
    of the stored gradient. `indices`: how positions travel. Density 1 is `sum()`.

    Payload of a rank, with K entries chosen by all: 4 K bytes of values, and the positions of what it has
    chosen, K / N on average; in the first step 8 kB more a bucket. Nothing limits K in a step in which the
    gradient has grown. Error: |x - sent| <= |x|, and all of x is sent in the end, with error feedback.

    >>> Micro(density=0.01)
    micro(density=0.01)
    """

    paper: ClassVar[str] = "Yoon and Oh 2023, arXiv:2310.00967"
    status: ClassVar[Status] = "verified"
    code: ClassVar[str] = "kljp/micro"
    examples: ClassVar[tuple[str, ...]] = ("micro(density=0.01)", "micro(density=0.3, indices=delta())")

    def bind_sparse(self, layout: Layout, comm: Comm) -> BoundReducer:
        return self.bind_parts(comm, Borders.even(comm.size, comm.size))

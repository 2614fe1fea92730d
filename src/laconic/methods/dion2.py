"""Dion2: Muon that updates a random fraction of each matrix's rows or columns, and exchanges only these.

Ahn, Amsel, Langford 2025, arXiv:2512.16928. Reconstruction: the paper averages whole gradients and chooses
rows by L1 norm, or at random; here all ranks draw the same rows.
"""

from __future__ import annotations

from laconic.core import arguments
from laconic.core.layout import Entry, Layout
from laconic.exchange.method import Method, Route, everything, method, routes
from laconic.optim.chosen_rows import ChosenRows
from laconic.optim.muon_rows import MuonRows
from laconic.optim.row_momentum import RowMomentum
from laconic.reducers.sum import Sum


def two_dimensional(entry: Entry, model: Layout) -> bool:
    """Accept the tensors that `torch.optim.Muon` accepts."""
    return len(entry.shape) == 2


@method(
    paper="Ahn et al. 2025, arXiv:2512.16928",
    status="reconstruction",
    sends="a random fraction of the rows or columns of the momentum, without positions",
    examples=("dion2()", "dion2(fraction=1.0)"),
)
def dion2(fraction: float = 0.25) -> Method:
    """Per matrix of `torch.optim.Muon`, on each rank r = 0..N-1, with Muon's momentum mu:

        M_r = M_r + g_r               S = ceil(fraction * s) random ones of its s rows, the same on all ranks
        U = mean over ranks of M_r[S]                    M_r[S] = mu * M_r[S]
        w[S] = w[S] - adjusted lr * NewtonSchulz(U)      after w = (1 - lr * weight decay) * w

    Columns are chosen if they are fewer. This is Dion2 on the mean gradient, up to rounding; `fraction=1` is
    Muon.

    Needs `torch.optim.Muon` with `nesterov=False`; other tensors are summed uncompressed: `compress(model,
    [muon, adamw], "dion2()")`. Payload: 4 * fraction bytes per entry of Muon's matrices. Memory: one float32
    per element, in place of Muon's.

    Args:
        fraction: Share of rows or columns per step, in (0, 1].

    Raises:
        SpecError: `fraction` is out of range.

    >>> dion2(fraction=0.5)
    dion2(fraction=0.5)
    """
    arguments.number("dion2: fraction", fraction, above=0, most=1)
    return routes(
        Route(two_dimensional, ChosenRows(fraction), RowMomentum(), MuonRows()),
        Route(everything, Sum()),
    )

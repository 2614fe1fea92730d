"""EF21-SGDM: compressed changes of each rank's averaged gradient, added up to one mean on all ranks.

Richtarik, Sokolov, Fatkhullin 2021, arXiv:2106.05203 (EF21); Fatkhullin, Tyurin, Richtarik 2023,
arXiv:2305.15155 (its momentum); both recalled. The papers send a whole first gradient.
"""

from __future__ import annotations

from typing import Any

from laconic.codecs.selectors.topk import TopK
from laconic.core.errors import SpecError
from laconic.exchange.method import Method, Route, everything, matrices, method, plain, routes
from laconic.feedback.ef21 import EF21
from laconic.reducers.sum import Sum

TOP = TopK(density=0.01)


@method(
    paper="Fatkhullin et al. 2023, arXiv:2305.15155",
    status="recalled",
    sends="the codec's message for the change of each rank's averaged gradient",
    examples=("ef21_sgdm()", "ef21_sgdm(sign(), eta=1.0)"),
)
def ef21_sgdm(compressor: Any = TOP, *, eta: float = 0.1) -> Method:
    """Per tensor of two dimensions and more (others are summed uncompressed), on rank i, with v_i, h_i and G
    zero at first:

        v_i = (1 - eta) * v_i + eta * g_i        c_i = C(v_i - h_i)        h_i = h_i + c_i
        G = G + mean over ranks of c_i;          the optimiser gets G

    When gradients converge, C's error goes to zero: unlike error feedback, this needs no bound on gradients,
    large batches, or similar data on the ranks. Any optimiser works; with SGD without momentum, use 1 / eta
    times the learning rate of SGD with momentum 1 - eta. Payload: that of `compressor`. Memory: three float32
    per element.

    Args:
        compressor: C, a codec, selector or reducer with an error below |x|^2, by default topk(density=0.01).
        eta: Weight of the newest gradient, in (0, 1]. 1 is EF21 without momentum.

    Raises:
        SpecError: An argument is invalid, or `compressor` is a method, or a reducer that rounds the mean too.

    >>> from laconic.core.spec import parse
    >>> parse("ef21_sgdm(sign(), eta=0.2)")
    ef21_sgdm(compressor=sign(), eta=0.2)
    """
    reducer = plain(compressor, "ef21_sgdm").routes[0].reducer
    if not reducer.exact_mean:
        raise SpecError(
            f"ef21_sgdm accumulates the means of {reducer!r}, and so also their rounding errors,"
            " permanently: use a codec, which is gathered, or scatter_reduce(..., feedback='both')"
        )
    return routes(Route(matrices, reducer, EF21(eta)), Route(everything, Sum()))

"""Any codec, selector or reducer with error feedback of one's own settings."""

from __future__ import annotations

from typing import Any

from laconic.core.errors import SpecError
from laconic.core.spec import parse
from laconic.feedback.error_feedback import ErrorFeedback
from laconic.reducers.sum import Sum
from laconic.strategies.method import Method, Route, everything, lift, matrices, method, routes


@method(
    paper="Karimireddy et al. 2019, arXiv:1901.09847",
    status="recalled",
    sends="what the codec in it sends",
    examples=("error_fed(topk(density=0.01), decay=0.9)",),
)
def error_fed(what: Any, *, decay: float = 1.0, damped: bool = False) -> Method:
    """x = decay * e + g;  send C(x), times 1 / (1 + omega) where damped;  e = x - what was sent.

    `what`: a codec, selector or reducer. Without this, they have decay 1 where they are biased, and no
    feedback where they are not. `damped` lets an unbiased codec of high variance be error-fed. Tensors of
    one dimension are summed as they are. Payload: that of `what`.

    >>> from laconic.core.spec import parse
    >>> parse("error_fed(topk(density=0.01), decay=0.9)")
    error_fed(what=topk(density=0.01), decay=0.9)
    """
    if isinstance(what, str):
        what = parse(what)
    if isinstance(what, Method):
        raise SpecError(f"error_fed takes a codec, selector or reducer, got the method {what}")
    reducer = lift(what).routes[0].reducer
    return routes(Route(matrices, reducer, ErrorFeedback(decay, damped)), Route(everything, Sum()))

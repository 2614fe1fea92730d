"""Any codec, selector or reducer with error feedback and its settings."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from laconic.exchange.method import (
    Method,
    Route,
    error_feedback,
    everything,
    matrices,
    method,
    plain,
    routes,
)
from laconic.feedback.error_feedback import Momentum
from laconic.reducers.sum import Sum


@method(
    paper="Karimireddy et al. 2019, arXiv:1901.09847",
    status="recalled",
    sends="the codec's message",
    examples=("error_fed(topk(density=0.01), decay=0.9)",),
)
def error_fed(
    compressor: Any,
    *,
    decay: float = 1.0,
    damped: bool = False,
    momentum: Momentum = "local",
    ahead: float | None = None,
) -> Method:
    """x = decay * e + g;  send C(x), times 1 / (1 + omega) if damped;  e = x - sent share.

    Without this method, a biased codec has feedback with decay 1, and an unbiased one has none.
    One-dimensional tensors are summed uncompressed. Payload: that of `compressor`.

    Args:
        compressor: A codec, selector or reducer.
        decay: Share of the error that the next step adds.
        damped: Whether messages are damped, which allows feedback for an unbiased codec of high variance.
        momentum: "local": the momentum of SGD or LARS is applied before compression (see
            `error_feedback`), except with `powersgd`; "optimizer": the optimiser applies it.
        ahead: As of `error_feedback`. None: 0.75 for `deft`, `micro` and `exdyna`, 0.5 for other
            sparse methods, else 0.

    Raises:
        SpecError: An argument is invalid, or `compressor` is a method.

    >>> from laconic.core.spec import parse
    >>> parse("error_fed(topk(density=0.01), decay=0.9)")
    error_fed(compressor=topk(density=0.01), decay=0.9)
    """
    reducer = plain(compressor, "error_fed").routes[0].reducer
    usual = error_feedback(reducer, momentum)
    feedback = replace(usual, decay=decay, damped=damped, ahead=usual.ahead if ahead is None else ahead)
    return routes(Route(matrices, reducer, feedback), Route(everything, Sum()))

"""Gradients summed in float16: half the bytes, one rounding on the way in and one at each addition."""

from __future__ import annotations

from laconic.exchange.method import Method, Route, everything, method, routes
from laconic.reducers.sum import Sum


@method(paper="-", status="-", sends="every gradient as float16")
def fp16() -> Method:
    """mean = sum_r fp16(g_r / N), in float16.

    Payload: 2 bytes a parameter. Values above 65504 saturate, values below 6e-8 vanish.

    >>> fp16()
    fp16()
    """
    return routes(Route(everything, Sum(dtype="fp16")))

"""Gradients summed in bfloat16: half the bytes, the range of float32, 8 bits of precision."""

from __future__ import annotations

from laconic.exchange.method import Method, Route, everything, method, routes
from laconic.reducers.sum import Sum


@method(paper="-", status="own", sends="every gradient as bfloat16")
def bf16() -> Method:
    """mean = sum_r bf16(g_r / N), in bfloat16. Payload: 2 bytes per parameter.

    >>> bf16()
    bf16()
    """
    return routes(Route(everything, Sum(dtype="bf16")))

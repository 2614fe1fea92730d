"""Adam on the exact mean gradient: what the methods made for Adam are measured against."""

from __future__ import annotations

from torch.optim import Adam, AdamW

from laconic.optim.adam_tensors import make_adam
from laconic.optim.asks import Asks
from laconic.reducers.sum import Sum
from laconic.strategies.method import Method, Route, everything, method, routes

ADAM = Asks("torch.optim.Adam or AdamW", lambda optimiser: isinstance(optimiser, (Adam, AdamW)), make_adam)


@method(paper="-", sends="every gradient as float32, for Adam", status="-")
def adam() -> Method:
    """mean = 1/N * sum_r g_r, which `torch.optim.Adam` or `AdamW` takes. Payload: 4 bytes a parameter.

    >>> adam()
    adam()
    """
    return routes(Route(everything, Sum(), rule=ADAM))

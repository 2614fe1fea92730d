"""Adam on the exact mean gradient: the baseline of the methods for Adam."""

from __future__ import annotations

from torch.optim import Adam, AdamW

from laconic.exchange.method import Method, Route, everything, method, routes
from laconic.optim.adam_tensors import make_adam
from laconic.optim.requires import Requires
from laconic.reducers.sum import Sum

ADAM = Requires("torch.optim.Adam or AdamW", lambda each: isinstance(each, (Adam, AdamW)), make_adam)


@method(paper="-", sends="every gradient as float32, for Adam", status="own")
def adam() -> Method:
    """mean = 1/N * sum_r g_r, for `torch.optim.Adam` or `AdamW`. Payload: 4 bytes a parameter.

    >>> adam()
    adam()
    """
    return routes(Route(everything, Sum(), rule=ADAM))

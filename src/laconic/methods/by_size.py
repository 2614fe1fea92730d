"""Small tensors one way, large ones another: what a small tensor saves is seldom worth its error."""

from __future__ import annotations

from typing import Any

from laconic.codecs.dense import Dense
from laconic.core import arguments
from laconic.core.layout import Entry, Layout
from laconic.strategies.method import Method, everything, method
from laconic.strategies.policy import share_out

DENSE = Dense()


@method(
    paper="-",
    status="-",
    sends="what the method for each tensor's size sends",
    examples=("by_size(limit=10000, large=topk(density=0.01))",),
)
def by_size(limit: int, *, large: Any, small: Any = DENSE) -> Method:
    """`large` for tensors of `limit` elements and more, `small` for the others.

    Both are any spec that `compress` takes. A codec, selector or reducer leaves tensors of one dimension
    dense, as everywhere. Payload: that of the two.

    >>> from laconic.core.spec import parse
    >>> parse("by_size(10000, large=topk(density=0.01))")
    by_size(limit=10000, large=topk(density=0.01))
    """
    arguments.whole("by_size: limit", limit, 1)

    def is_large(entry: Entry, model: Layout) -> bool:
        return entry.numel >= limit

    return share_out((is_large, large), (everything, small))

"""Methods by tensor size, as compressing a small tensor seldom pays for its error."""

from __future__ import annotations

from typing import Any

from laconic.codecs.dense import Dense
from laconic.core import arguments
from laconic.core.layout import Entry, Layout
from laconic.exchange.method import Method, everything, method
from laconic.exchange.policy import split

DENSE = Dense()


@method(
    paper="-",
    status="own",
    sends="the payload of the method chosen by each tensor's size",
    examples=("by_size(limit=10000, large=topk(density=0.01))",),
)
def by_size(limit: int, *, large: Any, small: Any = DENSE) -> Method:
    """Apply one method to large tensors, another to small ones. Payload: the sum of their payloads.

    A codec, selector or reducer leaves one-dimensional tensors dense.

    Args:
        limit: Least number of elements of a large tensor; 1 or more.
        large: Any spec that `compress` accepts.
        small: Any spec that `compress` accepts.

    Raises:
        SpecError: An argument is invalid.

    >>> from laconic.core.spec import parse
    >>> parse("by_size(10000, large=topk(density=0.01))")
    by_size(limit=10000, large=topk(density=0.01))
    """
    arguments.whole("by_size: limit", limit, 1)

    def is_large(entry: Entry, model: Layout) -> bool:
        return entry.numel >= limit

    return split((is_large, large), (everything, small))

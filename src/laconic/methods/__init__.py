"""One file per paper: a docstring with its equation, and one expression that composes the concepts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from laconic.core import spec
from laconic.core.codec import Codec
from laconic.core.selector import Selector
from laconic.exchange.method import Paper
from laconic.reducers import Reducer
from laconic.strategies.strategy import Strategy


def catalogue() -> dict[str, Callable[..., Any]]:
    """Return every registered name that `distribute` accepts, with its constructor.

    Papers, codecs, selectors and reducers are methods, which `compress` accepts too; the others are
    strategies.

    >>> [name for name in catalogue() if name in ("dgc", "golomb", "local_sgd", "topk")]
    ['dgc', 'local_sgd', 'topk']
    """
    makers = {name: spec.find(name) for name in spec.names()}
    return {name: make for name, make in makers.items() if _fits(make)}


def _fits(make: Callable[..., Any]) -> bool:
    if isinstance(make, Paper):
        return True
    return isinstance(make, type) and issubclass(make, (Codec, Selector, Reducer, Strategy))

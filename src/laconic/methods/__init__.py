"""One file a paper: each is a docstring with its equation, and one expression that composes the ideas."""

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
    """Every registered name that `distribute` takes, with what makes it.

    Papers, codecs, selectors and reducers are methods, which `compress` takes too; the others are strategies.

    >>> [name for name in catalogue() if name in ("dgc", "golomb", "local_sgd", "topk")]
    ['dgc', 'local_sgd', 'topk']
    """
    makers = {name: spec.find(name) for name in spec.names()}
    return {name: make for name, make in makers.items() if _fits(make)}


def _fits(make: Callable[..., Any]) -> bool:
    if isinstance(make, Paper):
        return True
    return isinstance(make, type) and issubclass(make, (Codec, Selector, Reducer, Strategy))

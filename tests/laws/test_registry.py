"""The law of specs: every registered object is rebuilt from its repr."""

from __future__ import annotations

from laconic.core.codec import Codec
from laconic.core.selector import IndexCoding, Selector
from laconic.core.spec import parse
from laconic.reducers import Reducer
from laconic.strategies.strategy import Strategy
from tests.cases import over

from .table import specs


@over(kind=(Codec, Selector, IndexCoding, Reducer, Strategy))
def test_the_repr_is_the_spec(kind: type) -> None:
    for spec in specs(kind):
        made = parse(spec)
        assert isinstance(made, kind) and repr(made) == spec and parse(repr(made)) == made

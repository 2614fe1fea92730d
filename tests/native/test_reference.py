"""Native kernels are the reference: codecs, selectors and reducers give the same bits on every target.

The laws of `tests/laws` run with native kernels only. They hold for the reference because it agrees here.
"""

from __future__ import annotations

import torch

from laconic.core.codec import Codec
from laconic.core.layout import Segments
from laconic.core.selector import Selector
from laconic.core.spec import parse
from laconic.reducers import Reducer
from tests.cases import over

from ..laws.table import cases, given, specs
from ..laws.test_reducers import MODEL, play
from .targets import agree

MESSAGES = {
    "one": Segments.whole(1),
    "neighbours": Segments.consecutive([1, 30, 0, 7, 1001, 2]),
    "apart": Segments((5, 40, 700), (20, 513, 1)),
}


@over(spec=specs(Codec), name=("normal", "heavy", "spike", "denormal", "zeros"), segments=MESSAGES)
def test_codecs_encode_decode_and_clear_alike(spec: str, name: str, segments: Segments) -> None:
    codec: Codec = parse(spec)
    x, keys = given(name, segments.end + 9), range(50, 50 + len(segments))
    wire = agree(lambda: codec.encode_segments(x, segments, keys))
    agree(lambda: codec.decode_segments_add_(wire, segments, torch.ones_like(x), -0.3))
    agree(lambda: codec.clear_segments_(wire, segments, torch.ones_like(x)))
    agree(lambda: codec.decode(codec.encode(x, key=3), x.numel()))


@over(spec=specs(Selector))
def test_selectors_choose_alike(spec: str) -> None:
    for _, x in cases(sizes=(0, 1, 7, 100, 1001, 5000)):
        agree(lambda x=x: parse(spec).select(x, key=4))


@over(spec=specs(Reducer))
def test_reducers_give_the_same_mean(spec: str) -> None:
    agree(lambda: [out for out, *_ in play(spec, 2, MODEL)])

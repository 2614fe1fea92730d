"""Messages of all ranks in one call: the sum of each alone, and the number of a damaged one."""

from __future__ import annotations

import pytest
import torch
from tests.unit.shared import for_each

from laconic.core.codec import Codec
from laconic.core.errors import WireError
from laconic.core.layout import Segments
from laconic.core.spec import parse

SPECS = ("sign()", "sign(block=37)", "signmean()", "natural()", "natural(bits=8)")
SHARES = (
    Segments((0, 40), (40, 24)),
    Segments((0, 40), (40, 24)),
    Segments((0,), (0,)),
    Segments((8,), (50,)),
)


@for_each("spec", SPECS)
def test_messages_are_added_in_order_and_a_damaged_one_is_named(spec: str) -> None:
    codec: Codec = parse(spec)
    x = torch.randn(64, generator=torch.Generator().manual_seed(1))
    messages = [(codec.encode_segments(x * (i + 1), s, list(range(len(s)))), s) for i, s in enumerate(SHARES)]
    out, expected = torch.zeros(64), torch.zeros(64)
    for wire, segments in messages:
        if segments.numel:
            codec.decode_segments_add_(wire, segments, expected, 0.25)
    assert codec.decode_messages_add_(messages, out, 0.25) is out and torch.equal(out, expected)
    for bad in (0, 1, 3):
        damaged = list(messages)
        damaged[bad] = (messages[bad][0][:-1], messages[bad][1])
        with pytest.raises(WireError) as caught:
            codec.decode_messages_add_(damaged, out, 0.25)
        assert caught.value.message == bad

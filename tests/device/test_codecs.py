"""Every codec and selector on the stand-in device gives the bits that it gives on the CPU."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from laconic import kernels
from laconic.core.codec import Codec
from laconic.core.errors import NonFiniteError
from laconic.core.layout import Segments
from laconic.core.selector import Selector
from laconic.core.spec import parse
from tests.device.worlds import GPU
from tests.laws.table import first_of_each, given, same, specs

SIZES = (1200, 40, 4097, 7, 0, 513)
SEGMENTS = Segments.consecutive(SIZES)
KEYS = range(len(SIZES))
INPUTS = ("heavy", "zeros", "denormal", "huge")


@pytest.fixture(autouse=True)
def reference() -> Iterator[None]:
    with kernels.using("reference"):
        yield


@pytest.mark.parametrize("spec", first_of_each(specs(Codec)))
def test_wires_and_decoded_values_are_those_of_the_cpu(spec: str) -> None:
    codec = parse(spec)
    for name in INPUTS:
        x = given(name, sum(SIZES))
        try:
            wire = codec.encode_segments(x, SEGMENTS, KEYS)
        except NonFiniteError:
            with pytest.raises(NonFiniteError):
                codec.encode_segments(x.to(GPU), SEGMENTS, KEYS)
            continue
        found = codec.encode_segments(x.to(GPU), SEGMENTS, KEYS)
        assert found.device == GPU, name
        assert same(found.cpu(), wire), name
        out = codec.decode_segments_add_(wire, SEGMENTS, torch.ones(x.numel()), 0.5)
        mine = codec.decode_segments_add_(wire.to(GPU), SEGMENTS, torch.ones(x.numel(), device=GPU), 0.5)
        assert mine.device == GPU, name
        assert same(mine.cpu(), out), name


@pytest.mark.parametrize("spec", first_of_each(specs(Selector)))
def test_selections_are_those_of_the_cpu(spec: str) -> None:
    select = parse(spec)
    for name in INPUTS:
        x = given(name, sum(SIZES))
        indices, counts = select.select_segments(x, SEGMENTS, KEYS)
        found, found_counts = select.select_segments(x.to(GPU), SEGMENTS, KEYS)
        assert found.device == GPU and found_counts.device.type == "cpu", name
        assert same(found.cpu(), indices) and same(found_counts, counts), name

"""Layouts and keys."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.unit.shared import for_each, refuses

from laconic.core.errors import SpecError
from laconic.core.layout import Layout, Segments
from laconic.core.turn import COMMON, Turn, mix


@given(st.lists(st.integers(0, 9), max_size=8))
def test_consecutive_segments_tile_the_buffer(sizes: list[int]) -> None:
    segments = Segments.consecutive(sizes)
    x = torch.arange(sum(sizes))
    assert torch.equal(torch.cat([*segments.views(x), x[:0]]), x)
    assert segments.end == segments.numel == sum(sizes)


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 5)), max_size=8), st.randoms())
def test_merged_segments_touch_the_same_elements(gaps: list[tuple[int, int]], order) -> None:  # type: ignore[no-untyped-def]
    ranges, at = [], 0
    for gap, size in gaps:
        ranges.append((at + gap, size))
        at += gap + size
    order.shuffle(ranges)
    segments = Segments(tuple(r[0] for r in ranges), tuple(r[1] for r in ranges))
    touched, merged = torch.ones(at + 1), torch.ones(at + 1)
    for start, size in segments:
        touched[start : start + size] = 0
    assert torch.equal(segments.zero_(merged), touched)
    assert len(segments.merged) <= len(segments)


@for_each("starts, sizes", [((-50,), (4,)), ((0,), (-4,)), ((0, 1), (1,))])
def test_segments_outside_of_a_buffer_are_refused(starts: tuple[int, ...], sizes: tuple[int, ...]) -> None:
    refuses(ValueError, "as many starts as sizes, all >= 0", Segments, starts, sizes)


def test_a_part_of_a_layout_keeps_its_offsets() -> None:
    layout = Layout.of([("a", (2, 3)), ("b", (4,)), ("c", (5, 1))])
    part = layout.where(lambda entry: len(entry.shape) > 1)
    assert part.names == ("a", "c")
    assert part.segments == Segments((0, 10), (6, 5))
    assert part.numel == 11


def test_runs_join_neighbours() -> None:
    layout = Layout.of([("a", (2,)), ("b", (3,)), ("c", (4,)), ("d", (5,))])
    runs = layout.where(lambda entry: entry.name != "c").runs
    assert runs.names == ("a..b", "d")
    assert runs.segments == Segments((0, 9), (5, 5))


def test_a_name_stands_once() -> None:
    refuses(SpecError, "'a' twice", Layout.of, [("a", (1,)), ("a", (2,))])


def test_keys_differ_where_they_should() -> None:
    keys = {
        Turn(step, rank, seed).own(name)
        for step in (0, 1)
        for rank in (0, 1)
        for seed in (0, 1)
        for name in "ab"
    }
    assert len(keys) == 16
    assert Turn(3, rank=0).common("a") == Turn(3, rank=5).common("a") != Turn(3, rank=0).own("a")
    assert all(0 <= key < 1 << 64 for key in keys)
    assert Turn(3, rank=COMMON).own("a") == Turn(3).common("a")


def test_a_key_is_the_same_in_every_process_and_version() -> None:
    """Written down once: a checkpoint of today must draw the same bits tomorrow."""
    assert mix(1, 2, 3) == 0x6AE515C1C0AC7E37
    assert Turn(7, 2, 1).own("layer.weight") == 0xDD4F059711D54127

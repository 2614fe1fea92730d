"""A gather that would send more than dense is warned of, and nothing else is."""

from __future__ import annotations

import warnings

import pytest
from tests.unit.shared import for_each

from laconic.core.layout import Layout
from laconic.exchange.gathers import message_bytes, warn_of_gathers
from laconic.exchange.method import Method, lift
from laconic.tools.cli.entries import figures

MODEL = Layout.of([("first.weight", (500, 1000)), ("first.bias", (500,)), ("last.weight", (1000, 500))])


def warned(method: Method, size: int) -> str:
    """What is said of a method in a group of this size."""
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        warn_of_gathers(method, MODEL, size)
    return " ".join(str(each.message) for each in said)


@for_each(
    "spec, fits, more",
    [
        ("qsgd()", 15, 16),  # 64 / 4.06 bits
        ("qsgd(coding='rice')", 12, 24),
        ("natural()", 7, 8),
        ("sign()", 62, 63),
        ("gather(cast('fp16'))", 4, 5),
        ("topk(density=0.1)", 12, 24),
        ("dense_first(gather(natural()), steps=4)", 7, 8),
        ("masked(natural())", 7, 8),
        ("masked(qsgd())", 15, 16),
    ],
)
def test_a_gather_that_sends_more_than_dense_is_warned_of(spec: str, fits: int, more: int) -> None:
    method = lift(spec)
    assert not warned(method, fits)
    said = warned(method, more)
    assert said.startswith(f"{method!r} sends each message") and f"among {more} that is" in said
    for way_out in ("cgx()", "server(", "scatter_reduce(", "two_level("):
        assert way_out in said


@for_each(
    "spec, fits, more, whom",
    [
        ("two_level(sum(), gather(natural()), ranks_per_node=8)", 56, 64, "machines' first ranks: among 8"),
        ("two_level(sum(), gather(cast('fp16')), ranks_per_node=2)", 8, 10, "machines' first ranks: among 5"),
        ("two_level(gather(natural()), sum(), ranks_per_node=8)", 0, 16, "ranks of the machine: among 8"),
        (
            "masked(two_level(sum(), gather(natural()), ranks_per_node=8))",
            56,
            64,
            "machines' first ranks: among 8",
        ),
    ],
)
def test_each_of_two_levels_is_compared_with_dense(spec: str, fits: int, more: int, whom: str) -> None:
    assert not fits or not warned(lift(spec), fits)
    said = warned(lift(spec), more)
    assert whom in said and "cgx()" in said and "gathers between machines only" not in said


def test_machines_are_as_torchrun_has_set_them(monkeypatch: pytest.MonkeyPatch) -> None:
    method = lift("two_level(sum(), gather(natural()))")
    assert warned(method, 8)
    for name, value in {"RANK": "0", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "4"}.items():
        monkeypatch.setenv(name, value)
    assert not warned(method, 28)
    assert "among 8" in warned(method, 32)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "many")
    assert warned(method, 8)


@for_each("spec", ["dense()", "cgx()", "onebit_adam()", "dgc(warmup_steps=100)", "threshold(value=0.001)"])
def test_what_does_not_gather_or_hardly_anything_is_not_warned_of(spec: str) -> None:
    """Nor what only magnitudes decide."""
    assert not warned(lift(spec), 256)


@for_each("size", [2, 4, 8, 16])
def test_warnings_agree_with_what_was_counted(size: int) -> None:
    """Of every name that gathers, on the stored gradient; 10 % around dense are left to chance."""
    checked = 0
    for spec, kept in figures().items():
        gathers = [each for route in lift(spec).routes for each in route.reducer.gathers(size)]
        known = [message_bytes(each.codec, MODEL) for each in gathers]
        if known and None not in known and abs(kept.smaller(size) - 1) > 0.1:
            assert bool(warned(lift(spec), size)) == (kept.smaller(size) < 1), spec
            checked += 1
    assert checked > 30

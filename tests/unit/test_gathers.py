"""A gather that would send more than dense is warned of, and nothing else is."""

from __future__ import annotations

import warnings

import pytest

from laconic.cli.entries import figures
from laconic.core.layout import Layout
from laconic.exchange.gathers import gathered, message_bytes, warn_of_gathers
from laconic.exchange.method import Method, lift

MODEL = Layout.of([("first.weight", (500, 1000)), ("first.bias", (500,)), ("last.weight", (1000, 500))])


def warned(method: Method, size: int) -> str:
    """What is said of a method in a group of this size."""
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        warn_of_gathers(method, MODEL, size)
    return " ".join(str(each.message) for each in said)


@pytest.mark.parametrize(
    ("spec", "fits", "more"),
    [
        ("qsgd()", 15, 16),  # 64 / 4.06 bits
        ("qsgd(coding='rice')", 12, 24),
        ("natural()", 7, 8),
        ("sign()", 62, 63),
        ("gather(cast('fp16'))", 4, 5),
        ("topk(density=0.1)", 12, 24),
        ("dense_first(gather(natural()), steps=4)", 7, 8),
    ],
)
def test_a_gather_that_sends_more_than_dense_is_warned_of(spec: str, fits: int, more: int) -> None:
    method = lift(spec)
    assert not warned(method, fits)
    said = warned(method, more)
    assert said.startswith(f"{method!r} sends each message") and f"among {more} that is" in said
    for way_out in ("cgx()", "server(", "scatter_reduce(", "two_level("):
        assert way_out in said


@pytest.mark.parametrize(
    "spec", ["dense()", "cgx()", "onebit_adam()", "dgc(warmup_steps=100)", "threshold(value=0.001)"]
)
def test_what_does_not_gather_or_hardly_anything_is_not_warned_of(spec: str) -> None:
    """Nor what only magnitudes decide."""
    assert not warned(lift(spec), 256)


@pytest.mark.parametrize("size", [2, 4, 8, 16])
def test_warnings_agree_with_what_was_counted(size: int) -> None:
    """Of every name that gathers, on the stored gradient; 10 % around dense are left to chance."""
    checked = 0
    for spec, kept in figures().items():
        codecs = [gathered(route.reducer) for route in lift(spec).routes]
        known = [message_bytes(codec, MODEL) for codec in codecs if codec is not None]
        if known and None not in known and abs(kept.smaller(size) - 1) > 0.1:
            assert bool(warned(lift(spec), size)) == (kept.smaller(size) < 1), spec
            checked += 1
    assert checked > 30

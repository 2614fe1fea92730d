"""A slice of the fuzz, sanitized on one target; `make soak` runs a million wires on all of them."""

from __future__ import annotations

import pytest

from laconic.core.selector import IndexCoding
from tests.cases import over

from ..laws.table import specs
from .fuzz import NoSanitizer, Sanitizer, fuzz, sanitized, start
from .wires import attempt


def test_damaged_wires_are_refused_or_valid() -> None:
    outcomes = fuzz(2_000)
    assert sum(n for name, n in outcomes.items() if name.endswith("refused")) > 500
    assert sum(n for name, n in outcomes.items() if name.endswith("accepted")) > 100


@over(decoder=("elias_decode", "error_bound_decode", "levels by", "scatter", *specs(IndexCoding)))
def test_damaged_wires_of_one_decoder_are_refused_alike(decoder: str) -> None:
    """Or give the same bits everywhere, and an encoder makes the same wire of them."""
    refusals = sum(attempt(7, i, decoder)[1] for i in range(150))
    assert 10 < refusals < 150


@pytest.fixture(scope="module")
def sanitizer(tmp_path_factory: pytest.TempPathFactory) -> Sanitizer:
    try:
        return sanitized(tmp_path_factory.mktemp("asan"), timeout_s=180, only="portable")
    except NoSanitizer as reason:
        pytest.skip(f"no sanitized build: {reason}")


def test_the_sanitizer_is_awake(sanitizer: Sanitizer) -> None:
    process = start(["--provoke"], sanitizer)
    _, error = process.communicate()
    assert process.returncode != 0
    assert "AddressSanitizer: heap-buffer-overflow" in error


def test_damaged_wires_stay_in_bounds(sanitizer: Sanitizer) -> None:
    assert sum(fuzz(2_000, seed=1, sanitizer=sanitizer).values()) == 2_000

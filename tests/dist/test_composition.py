"""Each cell of docs/composition.md, tried."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.dist.composition import FEATURES, METHODS, row
from tests.dist.composition_page import table

PAGE = Path(__file__).parents[2] / "docs" / "composition.md"
found: dict[str, list[str]] = {}


@pytest.mark.parametrize("spec", METHODS)
def test_each_cell_works_or_refuses_loudly(pool, spec):
    first, second = pool.run(2, row, spec, timeout_s=120)
    for feature, one, other in zip(FEATURES, first, second, strict=True):
        assert one == other, feature
        assert one == "works" or one.startswith("refused: "), f"{feature}: {one}"
    found[spec] = first


def test_the_page_says_what_was_found():
    if found.keys() != set(METHODS):
        pytest.skip("only some of the methods were tried in this run")
    assert PAGE.read_text() == table(found), "run `make docs`"

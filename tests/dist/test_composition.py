"""Each cell of docs/composition.md, tried: a part of them in `make test`, all by night."""

from __future__ import annotations

import pytest

from tests.dist.commands import ROOT
from tests.dist.composition import ADAMS, FEATURES, METHODS, tried
from tests.dist.composition_page import CELLS, page

PAGE = (ROOT / "docs" / "composition.md").read_text()
SOME = [  # each feature with every fourth method, each method with every fourth feature, and what is special
    (spec, feature)
    for i, spec in enumerate(METHODS)
    for j, feature in enumerate(FEATURES)
    if (i + 3 * j) % 4 == 0
    or (feature == "sparse embeddings" and spec.startswith(ADAMS))
    or (feature == "clipping" and spec == "dgc(density=0.05)")
]


def written() -> dict[tuple[str, str], str]:
    """The cells of the page, with the reasons that it numbers."""
    lines = PAGE.splitlines()
    rows = [line[2:-2].split(" | ") for line in lines if line.startswith("| `")]
    reasons = dict(line.split(". ", 1) for line in lines if line[:1].isdigit())
    cells = {
        (row[0].strip("`"), feature): text
        for row in rows
        for feature, text in zip(FEATURES, row[1:], strict=True)
    }
    return {key: reasons.get(text.partition("(")[2].rstrip(")"), text) for key, text in cells.items()}


def test_cells_work_or_are_refused_as_the_page_says(pool):
    said = written()
    assert said.keys() == set(CELLS)
    assert all(text == "works" or text.startswith("refused: ") for text in said.values())
    assert tried(pool, SOME) == {key: said[key] for key in SOME}, "run `make docs`"


@pytest.mark.nightly
@pytest.mark.timeout(1800)
def test_the_page_says_what_is_found_in_every_cell(pool):
    assert page(tried(pool, CELLS)) == PAGE, "run `make docs`"

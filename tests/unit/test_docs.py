"""Every number in README.md and docs/ is what its file says."""

from __future__ import annotations

import re

import pytest
from docs.write import BLOCKS, PAGES, WHOLE, filled


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_blocks_are_what_their_files_say(page) -> None:  # type: ignore[no-untyped-def]
    text = page.read_text()
    assert set(re.findall(r"<!-- (\w+) -->", text)) <= BLOCKS.keys()
    assert filled(text) == text, "run `make docs`"


def test_every_block_is_on_a_page() -> None:
    shown = {name for page in PAGES for name in re.findall(r"<!-- (\w+) -->", page.read_text())}
    assert shown == BLOCKS.keys()


@pytest.mark.parametrize("page", WHOLE, ids=lambda page: page.name)
def test_whole_pages_are_what_their_files_say(page) -> None:  # type: ignore[no-untyped-def]
    assert page.read_text() == WHOLE[page](), "run `make docs`"


def test_pages_that_readme_links_are_there() -> None:
    page = PAGES[0]
    linked = re.findall(r"\]\(([\w./-]+)\)", page.read_text())
    assert linked
    assert not [link for link in linked if not (page.parent / link).exists()]

"""The parts of `--part` are all tests, each once."""

from __future__ import annotations

import pytest
from tests.conftest import part_of
from tests.unit.shared import refuses


def test_parts_are_disjoint_and_complete() -> None:
    items = list(range(23))
    parts = [part_of(f"{i}/5") for i in range(1, 6)]
    assert sorted(item for first, step in parts for item in items[first::step]) == items
    for wrong in ("0/4", "5/4", "3", "a/b", "1/0", "-1/4"):
        refuses(pytest.UsageError, "--part must be one of 1/N to N/N, got", part_of, wrong)

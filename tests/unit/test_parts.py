"""The parts of `--part` are all tests, each once."""

from __future__ import annotations

import pytest
from tests.conftest import part_of


def test_parts_are_disjoint_and_complete() -> None:
    items = list(range(23))
    parts = [part_of(f"{i}/5") for i in range(1, 6)]
    assert sorted(item for first, step in parts for item in items[first::step]) == items


@pytest.mark.parametrize("wrong", ["0/4", "5/4", "3", "a/b", "1/0", "-1/4"])
def test_a_wrong_part_is_refused(wrong: str) -> None:
    with pytest.raises(pytest.UsageError, match="--part must be one of 1/N to N/N, got"):
        part_of(wrong)

"""How tests are dealt to the processes that run them: those of one file together, those of ranks in turn."""

from __future__ import annotations

from pathlib import Path

import pytest

RANKS = Path(__file__).parent / "dist"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests that start ranks in processes of their own share one pool of these, and so one group."""
    for item in items:
        group = "ranks" if item.path.is_relative_to(RANKS) else str(item.path)
        item.add_marker(pytest.mark.xdist_group(group))

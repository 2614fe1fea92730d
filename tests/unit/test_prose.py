"""The counter of awkward phrases finds them in docstrings, comments and Markdown, and not in code."""

from __future__ import annotations

import json
from pathlib import Path

from tests.prose import LIMITS, packages, places

SOURCE = '''"""What is sent."""

x = "# a string of its own"  # beside the others


def f():
    """Return the mean.

    It goes on:

    >>> f("what is this")
    """
'''


def test_phrases_are_found_where_people_read(tmp_path: Path) -> None:
    file = tmp_path / "file.py"
    file.write_text(SOURCE)
    found = [place.removeprefix(f"{file}:").partition("(")[0].strip() for place in places(file)]
    assert found == [
        "1: a docstring starts with 'What': start with a verb or a noun",
        "1: ...What is sent....",
        "9: ...Return the mean. It goes on: x...",
        "3: ...beside the others...",
    ]


def test_code_in_markdown_is_not_read(tmp_path: Path) -> None:
    file = tmp_path / "file.md"
    file.write_text("Sent `beside`.\n\n```python\nanew()\n```\n\n| alike |\n\nTold of it.\n")
    assert [place.partition(": ")[0] for place in places(file)] == [f"{file}:9"]


def test_every_package_has_a_limit() -> None:
    assert set(json.loads(LIMITS.read_text())) == set(packages())

"""Docstrings, wrapped to any width."""

from __future__ import annotations

import textwrap

SECTIONS = ("Args:", "Returns:", "Raises:")
DEEPER = " " * 4


def flowing(text: str, width: int) -> str:
    """Wrap a docstring to `width` columns. Equations that fit keep their lines.

    >>> print(flowing("Two lines\\nof words:\\n\\n    y = x\\n    z = y", 80))
    Two lines of words:
    <BLANKLINE>
        y = x
        z = y
    >>> print(flowing("Args:\\n    density: Share that\\n        is sent.", 20))
    Args:
        density: Share
            that is
            sent.
    """
    blocks = text.strip("\n").rstrip().split("\n\n")
    return "\n\n".join("\n".join(_fitting(line, width) for line in _lines(block)) for block in blocks)


def _lines(block: str) -> list[str]:
    lines = block.split("\n")
    if not any(line.startswith((" ", ">>>")) for line in lines):
        return [" ".join(lines)]
    joined: list[str] = []
    for line in lines:
        if lines[0] in SECTIONS and line.startswith(2 * DEEPER):
            joined[-1] += f" {line.strip()}"
        else:
            joined.append(line)
    return joined


def _fitting(line: str, width: int) -> str:
    if len(line) <= width:
        return line
    words = line.lstrip()
    indent = line[: len(line) - len(words)]
    deeper = indent + DEEPER if indent else ""
    return textwrap.fill(
        words, width, initial_indent=indent, subsequent_indent=deeper, break_on_hyphens=False
    )

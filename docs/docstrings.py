"""Docstrings as Markdown: equations stay as they are drawn, words become paragraphs, examples code.

A docstring here is plain text: `*` is a product, `_` an index, what is indented by four is drawn by hand.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from itertools import groupby

CODE = re.compile(r"(`[^`]+`)")
ARXIV = re.compile(r"arXiv:(\d{4}\.\d{4,5})")
# At the beginning of a line it begins a paragraph too.
FACT = re.compile(r"(?:^|(?<=[.:] ))(Wire|Error|Payload|Memory|State)(?=[:,] )")
LINKED = r"[arXiv:\1](https://arxiv.org/abs/\1)"


def markdown(text: str, inline: Callable[[str], str] = str) -> str:
    """A docstring, already without its own indentation, as Markdown. `inline`: what becomes of each `code`.

    >>> markdown("Two lines\\nof words, a * b:\\n\\n    y = a * b")
    'Two lines of words, a \\\\* b:\\n\\n```text\\ny = a * b\\n```'
    """
    return "\n\n".join(_written(kind, lines, inline) for kind, lines in _blocks(text))


def words(text: str, inline: Callable[[str], str] = str) -> str:
    """One line of words, with what Markdown would take for its own made harmless, and papers linked.

    >>> words("m_i * `x_i`, arXiv:1610.02132")
    'm\\\\_i \\\\* `x_i`, [arXiv:1610.02132](https://arxiv.org/abs/1610.02132)'
    """
    parts = CODE.split(text)
    return "".join(inline(part) if i % 2 else _plain(part) for i, part in enumerate(parts))


def _plain(text: str) -> str:
    safe = re.sub(r"([\\*_\[\]|#])", r"\\\1", text).replace("<", "&lt;")
    return ARXIV.sub(LINKED, safe)


def _blocks(text: str) -> Iterator[tuple[str, list[str]]]:
    """Paragraphs, list items, drawings and examples, in order; drawings that follow each other are one."""
    kinds: list[tuple[str, str]] = []
    kind = "words"
    for line in text.strip("\n").rstrip().split("\n"):
        if not line.strip():
            kind = "drawing" if kind == "drawing" else "none"
        elif line.startswith(">>>"):
            kind = "example"
        elif kind != "example" and line.startswith("    "):
            kind = "drawing"
        elif kind != "example":
            kind = "words"
        kinds.append((kind, line))
    for found, lines in groupby(kinds, key=lambda each: each[0]):
        if found != "none":
            yield found, [line for _, line in lines]


def _written(kind: str, lines: list[str], inline: Callable[[str], str]) -> str:
    if kind == "words":
        items: list[str] = []
        for line in lines:
            if line.startswith("- ") or not items or FACT.match(line):
                items.append(line)
            else:
                items[-1] += f" {line.strip()}"
        if items[0].startswith("- "):
            return "\n".join(f"- {words(item[2:], inline)}" for item in items)
        return "\n\n".join(FACT.sub(r"**\1**", words(item, inline)) for item in items)
    while not lines[-1].strip():
        lines.pop()
    least = min(len(line) - len(line.lstrip()) for line in lines if line.strip())
    body = "\n".join(line[least:] if kind == "drawing" else line for line in lines)
    return f"```{'text' if kind == 'drawing' else 'pycon'}\n{body}\n```"

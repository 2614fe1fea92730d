"""Docstrings as Markdown: words become paragraphs, sections tables, and examples and equations code.

A docstring here is plain text: `*` is a product, `_` an index, and text indented by four is drawn by hand.
Google's sections (`Args:` and so on) hold one item for each name, whose further lines are indented by eight.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from itertools import groupby

CODE = re.compile(r"(`[^`]+`)")
ARXIV = re.compile(r"arXiv:(\d{4}\.\d{4,5})")
# These words start a paragraph if they start a line or a sentence.
FACT = re.compile(r"(?:^|(?<=[.:] ))(Wire|Error|Payload|Memory|State)(?=[:,] )")
LINKED = r"[arXiv:\1](https://arxiv.org/abs/\1)"
SECTION = re.compile(r"(Args|Attributes|Returns|Yields|Raises):$")
NAMED = re.compile(r"(\*{0,2}\w+): ")  # what an item of a section begins with
Section = Callable[[str, list[tuple[str, str]]], str]


def section_table(title: str, items: list[tuple[str, str]]) -> str:
    """A section as a table, or as a sentence if its items have no names.

    >>> section_table("Args", [("lr", "Above 0.")])
    '| Args |  |\\n|---|---|\\n| `lr` | Above 0. |'
    """
    if not all(name for name, _ in items):
        return f"**{title}**: " + " ".join(text for _, text in items)
    return "\n".join([f"| {title} |  |", "|---|---|", *(f"| `{name}` | {text} |" for name, text in items)])


def section_google(title: str, items: list[tuple[str, str]]) -> str:
    """A section as Google writes it, for mkdocstrings, which makes a table of it."""
    return "\n".join(
        [f"{title}:", *(f"    {name}: {text}" if name else f"    {text}" for name, text in items)]
    )


def markdown(text: str, inline: Callable[[str], str] = str, section: Section = section_table) -> str:
    """A docstring, already without its own indentation, as Markdown. `inline` converts each `code`.

    >>> markdown("Two lines\\nof words, a * b:\\n\\n    y = a * b")
    'Two lines of words, a \\\\* b:\\n\\n```text\\ny = a * b\\n```'
    """
    return "\n\n".join(_written(kind, lines, inline, section) for kind, lines in _blocks(text))


def words(text: str, inline: Callable[[str], str] = str) -> str:
    """One line of words, with Markdown characters escaped and papers linked.

    >>> words("m_i * `x_i`, arXiv:1610.02132")
    'm\\\\_i \\\\* `x_i`, [arXiv:1610.02132](https://arxiv.org/abs/1610.02132)'
    """
    parts = CODE.split(text)
    return "".join(inline(part) if i % 2 else _plain(part) for i, part in enumerate(parts))


def _plain(text: str) -> str:
    safe = re.sub(r"([\\*_\[\]|#])", r"\\\1", text).replace("<", "&lt;")
    return ARXIV.sub(LINKED, safe)


def _blocks(text: str) -> Iterator[tuple[str, list[str]]]:
    """Paragraphs, lists, sections, drawings and examples, in order; consecutive drawings are joined."""
    kinds: list[tuple[str, str]] = []
    kind = "words"
    for line in text.strip("\n").rstrip().split("\n"):
        if not line.strip():
            kind = "drawing" if kind == "drawing" else "none"
        elif line.startswith(">>>"):
            kind = "example"
        elif SECTION.match(line) or (kind == "section" and line.startswith("    ")):
            kind = "section"
        elif kind != "example" and line.startswith("    "):
            kind = "drawing"
        elif kind != "example":
            kind = "words"
        kinds.append((kind, line))
    for found, lines in groupby(kinds, key=lambda each: each[0]):
        if found != "none":
            yield found, [line for _, line in lines]


def _written(kind: str, lines: list[str], inline: Callable[[str], str], section: Section) -> str:
    if kind == "section":
        return section(lines[0].removesuffix(":"), list(_items(lines[1:], inline)))
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


def _items(lines: list[str], inline: Callable[[str], str]) -> Iterator[tuple[str, str]]:
    """(name or "", text) of each item of a section."""
    whole: list[str] = []
    for line in lines:
        if line.startswith("        ") and whole:
            whole[-1] += f" {line.strip()}"
        else:
            whole.append(line.strip())
    for item in whole:
        named = NAMED.match(item)
        yield (named[1], words(item[named.end() :], inline)) if named else ("", words(item, inline))

"""Count phrases that interrupt reading, by package, and compare them with limits that only decrease.

    python -m tests.prose             # fails if a package has more than its limit; `make check` runs it
    python -m tests.prose --show core # every place in a package
    python -m tests.prose --lower     # lower the limits to the present counts

It reads docstrings and comments of `src`, and Markdown outside code. A docstring starts with a verb, or with
a noun that says what the object is.
"""

from __future__ import annotations

import argparse
import ast
import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
LIMITS = Path(__file__).with_name("prose_limits.json")
START = re.compile(r"(What|Of|Those|These|There|So|As|By|Which|Who|Where|How)\b")
PHRASES = {  # phrase: a plainer way
    r"(is|are|was|were|be|been) told|told (of|by|that|what)|tells? (of|what|how|whether)": "report or log it",
    r"what (is|was|are|were|has|have|had|it|they|the|a|an|this|that)": "name the thing",
    r"(of|by|to|for) (which|whom|what)": "two sentences",
    r"(kept|taken|left|sent|given) (of|for|to be)|keeps? (what|of)": "store, or name the thing",
    r"(so|as) (it|they) (is|are|was|were)|there (it|they) (is|are)": "unchanged, or name the state",
    r"(of|on) (its|their|his) own|by (itself|themselves)": "its own, alone",
    r"(go|goes|went|going|gone) on": "continue",
    r"come?s? (back|along|late)|came (back|along|late)|gives? up|lets? go": "return, abort, release",
    r"beside|anew|alike|apiece|nobody|no one|per cent": "next to, again, equally, nothing, percent",
    r"now and then|by turns|a (good )?deal of|so (many|much)": "periodically, alternately, a number",
}
RULE = re.compile("|".join(rf"\b(?:{phrase})\b" for phrase in PHRASES), re.IGNORECASE)
COMMENT = re.compile(r"(?:^|\s{2})#+ (.*)$")
CODE = re.compile(r"```.*?```|^\|.*?$|`[^`\n]*`|^ *(?:>>>|\.\.\.) .*?$", re.MULTILINE | re.DOTALL)
Documented = ast.Module | ast.ClassDef | ast.FunctionDef


def texts(path: Path) -> Iterator[tuple[int, str, bool]]:
    """Yield (line, text, whether it is a docstring) for the prose of a file, without code."""
    source = path.read_text()
    if path.suffix == ".md":
        yield 1, blank(source), False
        return
    for node in nested(ast.parse(source)):
        if text := ast.get_docstring(node):
            yield node.body[0].lineno, blank(text), True
    for line, text in enumerate(source.splitlines(), 1):
        if "#" in text and (found := COMMENT.search(text)):
            yield line, blank(found[1]), False


def nested(node: Documented) -> Iterator[Documented]:
    """Yield a module and its classes and functions, which can have docstrings."""
    yield node
    for child in node.body:
        if isinstance(child, Documented):
            yield from nested(child)


def blank(text: str) -> str:
    """Return the text without code; lines stay where they are."""
    return CODE.sub(lambda code: "\n" * code[0].count("\n") or "x", text)


def places(path: Path) -> Iterator[str]:
    """Yield a line for each odd start of a docstring and each awkward phrase."""
    where = path.relative_to(ROOT) if path.is_relative_to(ROOT) else path
    for first, text, is_docstring in texts(path):
        if is_docstring and (found := START.match(text)):
            yield f"{where}:{first}: a docstring starts with {found[0]!r}: start with a verb or a noun"
        for found in RULE.finditer(text):
            line = first + text.count("\n", 0, found.start())
            around = " ".join(text[max(0, found.start() - 25) : found.end() + 25].split())
            better = next(way for phrase, way in PHRASES.items() if re.fullmatch(phrase, found[0], re.I))
            yield f"{where}:{line}: ...{around}... ({better})"


def packages() -> dict[str, list[Path]]:
    """Return the files of each package of `src`, of the docs and of the examples."""
    source = ROOT / "src" / "laconic"
    groups: dict[str, list[Path]] = {"docs": [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")]}
    groups["examples"] = sorted((ROOT / "examples").rglob("*.py"))
    for path in sorted(source.rglob("*.py")):
        *folders, _ = path.relative_to(source).parts
        depth = 2 if folders[:1] == ["tools"] else 1
        groups.setdefault(".".join(folders[:depth]) or "laconic", []).append(path)
    return groups


def main() -> None:
    """Compare the counts with the limits, show the places of a package, or lower the limits."""
    options = argparse.ArgumentParser(prog="python -m tests.prose")
    options.add_argument("--show", metavar="PACKAGE")
    options.add_argument("--lower", action="store_true")
    given = options.parse_args()
    found = {name: [place for path in paths for place in places(path)] for name, paths in packages().items()}
    if given.show:
        print(*found[given.show], sep="\n")
        return
    limits: dict[str, int] = json.loads(LIMITS.read_text()) if LIMITS.exists() else {}
    if given.lower:
        lowered = {name: min(len(found[name]), limits.get(name, len(found[name]))) for name in sorted(found)}
        LIMITS.write_text(json.dumps(lowered, indent=2) + "\n")
        return
    above = {name: lines for name, lines in found.items() if len(lines) > limits.get(name, 0)}
    for name, lines in above.items():
        print(f"{name}: {len(lines)} awkward phrases, at most {limits.get(name, 0)}; among these:")
        print(*lines[:20], sep="\n")
    sys.exit(bool(above))


if __name__ == "__main__":
    main()

"""Choice of the tests that are most likely to catch a fault in one module.

The mutant's hints come first, then test files by how much they have to do with the module: their name,
imports of it, and words for what it defines. The module's doctests are last: pytest would import the module a
second time if it came before the tests that import it.
"""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

from .table import Mutant

FOLDERS = ("laws", "unit", "native", "golden", "dist")  # cheapest first
MOST = 6  # files beside hints


def test_files(tree: Path) -> list[str]:
    """Return the test files of a tree, in the order of `FOLDERS`, relative to it.

    Not those of the table of mutants: they would find every mutant in the sources.
    """
    found = (path for folder in FOLDERS for path in sorted((tree / "tests" / folder).glob("test_*.py")))
    return [str(path.relative_to(tree)) for path in found if path.stem != "test_mutants"]


def related(tree: Path, mutant: Mutant) -> list[str]:
    """Return the files to test first, without repeats, relative to the tree."""
    hinted = [str(path.relative_to(tree)) for hint in mutant.hints for path in sorted(tree.glob(hint))]
    public = _public(tree / "src" / "laconic" / mutant.file)
    scores = {name: _score(tree / name, module_of(mutant), public) for name in test_files(tree)}
    ranked = sorted((name for name in scores if scores[name]), key=lambda name: -scores[name])
    own = [] if mutant.native else [f"src/laconic/{mutant.file}"]
    return [*dict.fromkeys([*hinted, *ranked[:MOST], *own])]


def _score(path: Path, module: str, public: frozenset[str]) -> int:
    package, _, stem = module.rpartition(".")
    text, words = _read(path)
    imports = f"from {package} import " in text and stem in words
    return (
        8 * path.stem.startswith(f"test_{stem}")
        + 4 * (module in text or imports)
        + 2 * path.stem.startswith(f"test_{package.rpartition('.')[2]}")
        + min(2, len(public & words))
    )


@cache
def _read(path: Path) -> tuple[str, frozenset[str]]:
    text = path.read_text()
    return text, frozenset(re.findall(r"\w+", text))


def module_of(mutant: Mutant) -> str:
    """Return the dotted name of the module; for native code, of the kernel's package.

    >>> module_of(Mutant("x", "kernels/select/cpu.cc", "", "", ""))
    'laconic.kernels.select'
    """
    path = Path("laconic") / mutant.file
    if mutant.native or path.name == "__init__.py":
        return ".".join(path.parent.parts)
    return ".".join(path.with_suffix("").parts)


def _public(path: Path) -> frozenset[str]:
    """Return the public names that a module defines at its top; none of native code."""
    body = ast.parse(path.read_text()).body if path.suffix == ".py" else []
    names = [node.name for node in body if isinstance(node, (ast.ClassDef, ast.FunctionDef))]
    return frozenset(name for name in names if len(name) > 4 and not name.startswith("_"))

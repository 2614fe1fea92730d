"""Every dotted name of the package in docstrings and docs is there."""

from __future__ import annotations

import importlib
import re
from pathlib import Path

import laconic

ROOT = Path(__file__).parents[2]
SOURCE = Path(laconic.__file__).parent
NAME = re.compile(r"`{1,2}(laconic(?:\.\w+)+)")
EXTENSIONS = {"pt", "md", "py", "so", "json", "log"}  # names of files


def resolves(name: str) -> bool:
    """Whether this is a module, or an attribute of one.

    >>> resolves("laconic.federated.samplings"), resolves("laconic.federated.sampling")
    (True, False)
    """
    parts = name.split(".")
    for end in range(len(parts), 0, -1):
        try:
            found: object = importlib.import_module(".".join(parts[:end]))
        except ImportError:
            continue
        for part in parts[end:]:
            if not hasattr(found, part):
                return False
            found = getattr(found, part)
        return True
    return False


def test_dotted_names_resolve() -> None:
    files = [*SOURCE.rglob("*.py"), *ROOT.glob("docs/*.md"), ROOT / "README.md", ROOT / "CONTRIBUTING.md"]
    names = {
        (str(path.name), name)
        for path in files
        for name in NAME.findall(path.read_text("utf-8"))
        if name.rsplit(".", 1)[-1] not in EXTENSIONS
    }
    assert len(names) > 50
    wrong = sorted(f"{file}: {name}" for file, name in names if not resolves(name))
    assert not wrong, wrong

"""The files of single runs: what is there is not done again."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

Row = dict[str, Any]


def kept(file: Path) -> Row | None:
    """What is kept of a run; None where it is not done."""
    found: Row | None = json.loads(file.read_text()) if file.exists() else None
    return found


def keep(file: Path, row: Row) -> None:
    """Write the file of a run, whole or not at all: one figure or curve a line."""
    file.parent.mkdir(parents=True, exist_ok=True)
    lines = (f" {json.dumps(name)}: {json.dumps(value)}" for name, value in row.items())
    temporary = file.with_suffix(".part")
    temporary.write_text("{\n" + ",\n".join(lines) + "\n}\n")
    temporary.replace(file)

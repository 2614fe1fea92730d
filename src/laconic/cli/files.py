"""Files and folders that a command writes."""

from __future__ import annotations

import shutil
from datetime import datetime
from pathlib import Path

from laconic.core.errors import SpecError, StateError
from laconic.report.ledger import CONFIG


def write(path: Path, text: str) -> None:
    """Write `text` to `path`. Raises `SpecError` if that fails."""
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise SpecError(
            f"--out: cannot write {path}: {error.strerror}; choose a file in a folder that you can write to"
        ) from None


def write_svg(path: Path, text: str) -> None:
    """Write a picture. Raises `SpecError` if `path` does not end in .svg, or if writing fails."""
    if path.suffix.lower() != ".svg":
        raise SpecError(f"--out must end in .svg, the only picture format, got {path}")
    write(path, text)


def default_name(task: str) -> str:
    """A run's name: the task and the time, in milliseconds, as two runs may begin in one second."""
    return f"{task}-{datetime.now():%Y%m%d-%H%M%S-%f}"[:-3]


def fresh_folder(folder: Path) -> Path:
    """Make a run's folder and return it. An older run in its place moves to NAME.old.

    Raises `StateError` if what is in its place is no run.
    """
    if folder.exists():
        if not (folder / CONFIG).exists():
            raise StateError(f"{folder} exists and is not a run of Laconic: give another --name")
        aside = folder.with_name(f"{folder.name}.old")
        if aside.exists():
            shutil.rmtree(aside)
        folder.rename(aside)
    folder.mkdir(parents=True)
    return folder

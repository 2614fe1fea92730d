"""Files and folders that a command writes."""

from __future__ import annotations

import shutil
from datetime import datetime
from pathlib import Path

from laconic.core.errors import SpecError, StateError
from laconic.report.ledger import CONFIG, EVENTS


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


def check_free(folder: Path, *, overwrite: bool, way_out: str) -> None:
    """Raise `StateError` if a run cannot begin in this folder: it holds another one, or is no run at all.

    `overwrite`: an older run may be deleted; `way_out`: what else to do about it. A run that has measured
    nothing is nobody's loss.
    """
    if not folder.exists():
        return
    if not (folder / CONFIG).exists():
        raise StateError(f"{folder} exists and is not a run of Laconic: give another --name")
    events = folder / EVENTS
    if not overwrite and events.exists() and events.stat().st_size:
        raise StateError(f"{folder} holds a run already: {way_out}")


def fresh_folder(folder: Path, *, overwrite: bool, way_out: str) -> Path:
    """Make a run's folder and return it; deletes an older run that `check_free` lets go."""
    check_free(folder, overwrite=overwrite, way_out=way_out)
    if folder.exists():
        shutil.rmtree(folder)
    folder.mkdir(parents=True)
    return folder

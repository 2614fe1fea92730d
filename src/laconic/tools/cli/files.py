"""Files and folders written by commands."""

from __future__ import annotations

import shutil
import tempfile
from datetime import datetime
from pathlib import Path

from laconic.core.errors import SpecError, StateError
from laconic.tools.report.ledger import CONFIG, EVENTS


def check_file(path: Path) -> None:
    try:
        if path.is_dir():
            raise SpecError(f"--out: {path} is a folder; choose a file in it, such as {path / 'plan.svg'}")
        if not path.parent.is_dir():
            raise SpecError(f"--out: there is no folder {path.parent}; make it first, or choose another")
        if path.is_file():
            path.open("ab").close()
        elif not _there(path):
            _try(path.parent)
    except OSError as error:
        raise SpecError(_cannot(path, error)) from None


def check_svg(path: Path | None) -> None:
    if path is None:
        return
    if path.suffix.lower() != ".svg":
        raise SpecError(f"--out must end in .svg, the only picture format, got {path}")
    check_file(path)


def write(path: Path, text: str) -> None:
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise SpecError(_cannot(path, error)) from None


def _cannot(path: Path, error: OSError) -> str:
    return f"--out: cannot write {path}: {error.strerror}; choose a file in a folder that you can write to"


def _there(path: Path) -> bool:
    """Return whether a path exists; raise `OSError` if unknown, unlike `Path.exists` from Python 3.14."""
    try:
        path.stat()
    except (FileNotFoundError, NotADirectoryError):
        return False
    return True


def _try(folder: Path) -> None:
    """Raise `OSError` unless a file can be made here; permissions are no proof, as in /proc."""
    with tempfile.NamedTemporaryFile(dir=folder, prefix=".laconic-"):
        pass


def write_svg(path: Path, text: str) -> None:
    check_svg(path)
    write(path, text)


def default_name(task: str) -> str:
    return f"{task}-{datetime.now():%Y%m%d-%H%M%S-%f}"[:-3]


def check_name(name: str, out: Path) -> None:
    if name in ("", "..") or Path(name).name != name:
        raise SpecError(f"--name must be the name of a folder in {out}, such as first-try, got {name!r}")


def check_free(folder: Path, *, overwrite: bool, way_out: str) -> None:
    """Raise `StateError` if it exists and is not a run, or is another run; `SpecError` if it cannot exist."""
    try:
        if in_the_way := next((each for each in folder.parents if each.exists() and not each.is_dir()), None):
            raise SpecError(f"--out: {in_the_way} is a file, and runs need a folder: give another")
        taken = _there(folder)
        _try(next(each for each in (folder, *folder.parents) if each.is_dir()))
    except OSError as error:
        raise SpecError(
            f"--out: cannot make {folder}: {error.strerror}; give a folder that you can write to"
        ) from None
    if not taken:
        return
    if not (folder / CONFIG).exists():
        raise StateError(f"{folder} exists but is not a run of Laconic: give another --name")
    events = folder / EVENTS
    if not overwrite and events.exists() and events.stat().st_size:
        raise StateError(f"{folder} holds a run already: {way_out}")


def fresh_folder(folder: Path, *, overwrite: bool, way_out: str) -> Path:
    check_free(folder, overwrite=overwrite, way_out=way_out)
    if folder.exists():
        shutil.rmtree(folder)
    folder.mkdir(parents=True)
    return folder

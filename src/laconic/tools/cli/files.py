"""Files and folders written by commands."""

from __future__ import annotations

import shutil
import tempfile
from datetime import datetime
from pathlib import Path

from laconic.core.errors import SpecError, StateError
from laconic.tools.report.ledger import CONFIG, EVENTS


def check_file(path: Path) -> None:
    """Raise `SpecError` if `path` cannot be written, before any work is done for it."""
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
    """Like `check_file`, for a picture: also if it does not end in .svg. None: no picture was asked for."""
    if path is None:
        return
    if path.suffix.lower() != ".svg":
        raise SpecError(f"--out must end in .svg, the only picture format, got {path}")
    check_file(path)


def write(path: Path, text: str) -> None:
    """Write `text` to `path`. Raises `SpecError` if that fails."""
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise SpecError(_cannot(path, error)) from None


def _cannot(path: Path, error: OSError) -> str:
    return f"--out: cannot write {path}: {error.strerror}; choose a file in a folder that you can write to"


def _there(path: Path) -> bool:
    """Return whether it exists. Raises `OSError` if it cannot, as `Path.exists` does before Python 3.14."""
    try:
        path.stat()
    except (FileNotFoundError, NotADirectoryError):
        return False
    return True


def _try(folder: Path) -> None:
    """Raise `OSError` if this folder is not writable, by trying: permissions are no proof, as for /proc."""
    with tempfile.NamedTemporaryFile(dir=folder, prefix=".laconic-"):
        pass


def write_svg(path: Path, text: str) -> None:
    """Write a picture. Raises `SpecError` as `check_svg` does, or if writing fails."""
    check_svg(path)
    write(path, text)


def default_name(task: str) -> str:
    """Return a run's name: the task and the time in milliseconds, as two runs may begin in one second."""
    return f"{task}-{datetime.now():%Y%m%d-%H%M%S-%f}"[:-3]


def check_name(name: str, out: Path) -> None:
    """Raise `SpecError` if a run's name is not that of one folder in `out`."""
    if name in ("", "..") or Path(name).name != name:
        raise SpecError(f"--name must be the name of a folder in {out}, such as first-try, got {name!r}")


def check_free(folder: Path, *, overwrite: bool, way_out: str) -> None:
    """Raise `StateError` if a run cannot begin in this folder: it holds another run, or other files.

    Raises `SpecError` if it cannot be created. `overwrite`: an older run may be deleted; `way_out`: the
    remedy to name in the error. A run without measurements may always be replaced.
    """
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
    """Create a run's folder and return it; delete an older run if `check_free` allows it."""
    check_free(folder, overwrite=overwrite, way_out=way_out)
    if folder.exists():
        shutil.rmtree(folder)
    folder.mkdir(parents=True)
    return folder

"""Files that a command is told to write by --out."""

from __future__ import annotations

from pathlib import Path

from laconic.core.errors import SpecError


def write(path: Path, text: str) -> None:
    """Raises `SpecError` where nothing can be written."""
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise SpecError(
            f"--out: cannot write {path}: {error.strerror}; name a file in a folder of yours"
        ) from None


def write_svg(path: Path, text: str) -> None:
    """A picture. Raises `SpecError` for another kind of file too."""
    if path.suffix.lower() != ".svg":
        raise SpecError(f"--out must end in .svg, the only format there is, got {path}")
    write(path, text)

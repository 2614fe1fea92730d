"""Writes the file that --out names."""

from __future__ import annotations

from pathlib import Path

from laconic.core.errors import SpecError


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

"""Atomic replacement of a file."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO, TextIO


@contextmanager
def naming(path: Path, temporary: Path | None = None) -> Iterator[None]:
    """Name this file in an `OSError` without a name, or with the temporary one."""
    try:
        yield
    except OSError as error:
        if error.errno is not None and str(error.filename) in ("None", str(temporary)):
            error.filename = str(path)
        raise


@contextmanager
def appending(path: Path) -> Iterator[TextIO]:
    file = path.open("a", encoding="utf-8")
    try:
        yield file
    finally:
        with naming(path):
            file.close()


def write_text(path: Path, text: str) -> None:
    with replacing(path) as file:
        file.write(text.encode())


@contextmanager
def replacing(path: Path) -> Iterator[BinaryIO]:
    """Open a temporary file; at the end of the block, flush and rename it to `path`.

    A crash, a full disk or an exception leaves the old content; only a crash, the temporary file.

    >>> import tempfile
    >>> folder = Path(tempfile.mkdtemp())
    >>> with replacing(folder / "state") as file:
    ...     _ = file.write(b"whole")
    >>> [(path.name, path.read_bytes()) for path in folder.iterdir()]
    [('state', b'whole')]
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with naming(path, temporary):
            with temporary.open("wb") as file:
                yield file
                file.flush()
                os.fsync(file.fileno())
            temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
    with suppress(OSError):  # some file systems cannot flush a folder
        folder = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(folder)  # the new name
        finally:
            os.close(folder)

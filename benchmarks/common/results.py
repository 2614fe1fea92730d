"""Results of single runs, one JSON object per line. A stored run is not repeated."""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

Row = dict[str, Any]


@dataclass(frozen=True)
class Results:
    """Rows of a file of JSON lines, sorted by key. Several processes may store rows at the same time."""

    file: Path

    def __contains__(self, key: str) -> bool:
        return key in self._lines()

    def get(self, key: str) -> Row | None:
        """Return the row of a run, or None if it is not done."""
        line = self._lines().get(key)
        return None if line is None else _row(line)

    def rows(self, group: str = "") -> list[Row]:
        """Return the rows with keys `<group>/<name>`, or without a group."""
        return [_row(line) for key, line in self._lines().items() if _group(key) == group]

    def groups(self) -> list[str]:
        """Return the groups of the keys, without the empty one."""
        return sorted({*map(_group, self._lines())} - {""})

    def put(self, key: str, row: Row) -> None:
        """Store a row, replacing an earlier one of the same key."""
        line = json.dumps({"key": key} | row | {"key": key})
        self.file.parent.mkdir(parents=True, exist_ok=True)
        with _locked(self.file.parent):
            lines = self._lines() | {key: line}
            temporary = self.file.with_suffix(".part")
            temporary.write_text("".join(f"{lines[each]}\n" for each in sorted(lines)))
            temporary.replace(self.file)

    def _lines(self) -> dict[str, str]:
        try:
            about = self.file.stat()
        except FileNotFoundError:
            return {}
        return _parsed(self.file, about.st_ino, about.st_mtime_ns, about.st_size)


@lru_cache(maxsize=32)
def _parsed(file: Path, *version: int) -> dict[str, str]:
    """Return the lines of a version of a file, by key."""
    return {json.loads(line)["key"]: line for line in file.read_text().splitlines()}


def read(benchmark: str) -> Row:
    """Return the results of a benchmark that writes them as one object, in its results.json."""
    found: Row = json.loads((Path(__file__).parents[1] / benchmark / "results.json").read_text())
    return found


def _group(key: str) -> str:
    return key.rpartition("/")[0]


def _row(line: str) -> Row:
    row: Row = json.loads(line)
    del row["key"]
    return row


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Hold the lock of a folder, which leaves no file."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)

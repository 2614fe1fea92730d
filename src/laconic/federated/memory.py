"""Storage of a client's state."""

from __future__ import annotations

import hashlib
import io
import re
import time
from abc import ABC, abstractmethod
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch

from laconic.core.atomic_file import replacing
from laconic.core.errors import StateError

DAY_S = 86_400.0
KEEP_DAYS = 30.0
SUFFIX = ".client"
MAGIC = b"lacnmem1"
DIGEST = 16


class Memory(ABC):
    """Storage of one client's state. `way_out`: advice if it does not fit."""

    way_out = "use another memory"

    @abstractmethod
    def load(self) -> dict[str, Any]:
        """Return the saved state, or an empty one. Raises `StateError` if damaged."""

    @abstractmethod
    def save(self, state: Mapping[str, Any]) -> None:
        """Save a state; `StateError` leaves the previous one."""


class InMemory(Memory):
    def __init__(self) -> None:
        self._state: dict[str, Any] = {}

    def load(self) -> dict[str, Any]:
        return self._state

    def save(self, state: Mapping[str, Any]) -> None:
        self._state = dict(state)

    def __str__(self) -> str:
        return "the client's memory"


class InFile(Memory):
    """Memory in the file FOLDER/RUN/CLIENT.client.

    Replaced atomically. The file: b"lacnmem1", BLAKE2b of the rest (16 bytes), and `torch.save`'s
    output, which does not detect a flipped bit.

    Args:
        folder: Folder of all runs.
        run, client: Names; a hash distinguishes those with invalid characters.
        keep_days: Older files of other runs, and day-old temporary files, are removed; 0 removes none.
    """

    def __init__(self, folder: Path | str, run: str, client: str, keep_days: float = KEEP_DAYS) -> None:
        self.path = Path(folder) / _plain(run) / f"{_plain(client)}{SUFFIX}"
        self.way_out = f"delete {self.path}, and the client starts from scratch"
        if keep_days:
            _prune(Path(folder), self.path.parent, keep_days)

    def load(self) -> dict[str, Any]:
        try:
            with self.path.open("rb") as file:
                head, saved = file.read(len(MAGIC) + DIGEST), file.read()
        except (FileNotFoundError, NotADirectoryError):
            return {}
        except OSError as error:
            raise StateError(f"cannot read {self.path}: {error}; {self.way_out}") from error
        if head != _head(saved):
            raise StateError(f"{self.path} is damaged: its checksum does not match; {self.way_out}")
        try:
            state: dict[str, Any] = torch.load(io.BytesIO(saved), map_location="cpu", weights_only=True)
        except (OSError, ValueError, RuntimeError, EOFError, KeyError, UnpicklingError) as error:
            raise StateError(f"cannot read {self.path}: {error}; {self.way_out}") from error
        return state

    def save(self, state: Mapping[str, Any]) -> None:
        written = io.BytesIO()
        torch.save(dict(state), written)
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with replacing(self.path) as file:
                file.write(_head(written.getbuffer()))
                file.write(written.getbuffer())
        except OSError as error:
            raise StateError(
                f"cannot save {self.path}: {error.strerror or error}; make {self.path.parent} writable, and"
                " check that its disk has free space; the previous state is unchanged"
            ) from error

    def __str__(self) -> str:
        return str(self.path)


def _head(saved: bytes | memoryview) -> bytes:
    return MAGIC + hashlib.blake2b(saved, digest_size=DIGEST).digest()


def _plain(name: str) -> str:
    """Return a unique file name.

    >>> _plain("run-7"), _plain("run/7")
    ('run-7', 'run_7-66bcd4c3')
    """
    plain = re.sub(r"[^A-Za-z0-9.-]", "_", name).lstrip(".")
    if plain == name:
        return plain
    return f"{plain}-{hashlib.blake2b(name.encode(), digest_size=4).hexdigest()}"


def _prune(folder: Path, ours: Path, keep_days: float) -> None:
    now = time.time()
    for path in folder.glob(f"*/*{SUFFIX}*"):
        with suppress(OSError):  # another process may remove or own it
            if path.suffix != SUFFIX:
                oldest = now - DAY_S  # temporary file
            elif path.parent != ours:
                oldest = now - keep_days * DAY_S
            else:
                continue
            if path.stat().st_mtime < oldest:
                path.unlink()

"""Memory with one row of bytes per sample."""

from __future__ import annotations

import hashlib
import os
from abc import ABC, abstractmethod

import numpy as np
import torch
from torch import Tensor

from laconic.core.errors import StateError


class Memory(ABC):
    """Memory of `samples` rows of `nbytes` each, on the CPU."""

    def __init__(self, samples: int, nbytes: int) -> None:
        self.samples, self.nbytes = samples, nbytes

    @abstractmethod
    def read(self, sample: int) -> Tensor:
        """Return a row, uint8 (nbytes,). Do not modify it."""

    @abstractmethod
    def write(self, sample: int, row: Tensor) -> None:
        """Store a row uint8 (nbytes,). Raises `OSError` after a failed write."""

    def check(self) -> None:
        """Raise `OSError` if a write failed: no row is reliable then."""
        return

    def prefetch(self, samples: list[int]) -> None:
        """Announce reads of these samples."""
        return

    def flush(self) -> None:
        """Wait for all writes. Raises `OSError` if one failed."""
        return

    def close(self) -> None:
        return

    def digest(self, seen: Tensor) -> str:
        hashed = hashlib.blake2b(digest_size=16)
        for sample in seen.nonzero().flatten().tolist():
            hashed.update(sample.to_bytes(8, "little"))
            hashed.update(self.read(sample).numpy().tobytes())
        return hashed.hexdigest()

    def rows(self, seen: Tensor) -> Tensor:
        samples = seen.nonzero().flatten().tolist()
        out = torch.empty(len(samples), self.nbytes, dtype=torch.uint8, device="cpu")
        for row, sample in zip(out, samples, strict=True):
            row.copy_(self.read(sample))
        return out

    def load(self, seen: Tensor, rows: Tensor) -> None:
        for sample, row in zip(seen.nonzero().flatten().tolist(), rows, strict=True):
            self.write(sample, row)
        self.flush()


class InRam(Memory):
    """Memory in a tensor, with pages allocated by the first write."""

    def __init__(self, samples: int, nbytes: int) -> None:
        super().__init__(samples, nbytes)
        self._rows = torch.from_numpy(
            np.zeros((samples, nbytes), np.uint8)
        )  # torch.zeros allocates all pages

    def read(self, sample: int) -> Tensor:
        return self._rows[sample]

    def write(self, sample: int, row: Tensor) -> None:
        self._rows[sample].copy_(row)


def free_ram() -> int:
    try:
        with open("/proc/meminfo") as lines:  # noqa: PTH123 - a pseudo-file
            known = dict(line.split(":") for line in lines)
        return 1024 * int(known["MemAvailable"].split()[0])
    except (OSError, KeyError, ValueError):
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def check_size(what: str, samples: int, nbytes: int, taken: int, most: int, place: str) -> None:
    """Raise `StateError`, with the needed size, if another buffer exceeds the limit.

    >>> check_size("0>1:0", 1000, 4096, taken=0, most=1_000_000, place="most_bytes")
    Traceback (most recent call last):
    laconic.core.errors.StateError: the buffer of 0>1:0 needs 4,096,000 bytes (1,000 samples of 4,096), 0 \
are in use, and most_bytes allows 1,000,000: keep="cast('fp16')" halves it, keep="minmax(bits=8)" \
quarters it, folder=... puts it on a disk
    """
    needed = samples * nbytes
    if taken + needed > most:
        raise StateError(
            f"the buffer of {what} needs {needed:,} bytes ({samples:,} samples of {nbytes:,}), {taken:,} are"
            f' in use, and {place} allows {most:,}: keep="cast(\'fp16\')" halves it, keep="minmax(bits=8)"'
            " quarters it, folder=... puts it on a disk"
        )

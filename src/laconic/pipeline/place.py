"""Location of a rank's buffers, RAM or a folder, with one limit."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from laconic.data.memory import InRam, Memory, check_size, free_ram
from laconic.data.on_disk import OnDisk
from laconic.pipeline.buffer import Buffer


@dataclass(frozen=True)
class Place:
    """`folder`: None for RAM. `most_bytes`: limit of a rank's buffers; None: the free memory."""

    folder: Path | None
    most_bytes: int | None

    def open(self, name: str, samples: int, nbytes: int, others: Iterable[Buffer], rank: int) -> Memory:
        """Open a memory. Raises `StateError` or `OSError` without room."""
        if self.most_bytes is not None:
            taken = sum(each.nbytes for each in others)
            check_size(name, samples, nbytes, taken, self.most_bytes, "most_bytes")
        if self.folder is not None:
            file = f"rank{rank}-{name.replace('>', 'to').replace(':', '-')}.rows"
            return OnDisk(samples, nbytes, self.folder / file)
        if self.most_bytes is None:  # memory that others touched is no longer free
            promised = sum(each.untouched for each in others)
            check_size(name, samples, nbytes, promised, free_ram(), "this machine's free memory")
        return InRam(samples, nbytes)

"""Where a rank's buffers live: in RAM or in a folder, all of them under one bound."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from laconic.data.memory import InRam, Memory, check_size, free_ram
from laconic.data.on_disk import OnDisk
from laconic.pipeline.buffer import Buffer


@dataclass(frozen=True)
class Place:
    """`folder`: None is RAM. `most_bytes`: of all buffers of a rank; None is what the machine has free."""

    folder: Path | None
    most_bytes: int | None

    def open(self, name: str, samples: int, nbytes: int, others: Iterable[Buffer], rank: int) -> Memory:
        """A memory beside those of `others`.

        Raises:
            StateError, OSError: There is no room, with the size that is needed.
        """
        if self.most_bytes is not None:
            taken = sum(each.nbytes for each in others)
            check_size(name, samples, nbytes, taken, self.most_bytes, "most_bytes")
        if self.folder is not None:
            file = f"rank{rank}-{name.replace('>', 'to').replace(':', '-')}.rows"
            return OnDisk(samples, nbytes, self.folder / file)
        if self.most_bytes is None:  # what others have touched is no longer free
            promised = sum(each.untouched for each in others)
            check_size(name, samples, nbytes, promised, free_ram(), "this machine's free memory")
        return InRam(samples, nbytes)

"""Buffer: what one side of a boundary remembers of samples, and which history it shares with the other side.

    draft(micro-batch)    what a step would change: kept apart, until the step is known to have ended well
    settle()              on all ranks: the drafts count
    discard()             on all ranks: as if the step had not been

Nothing of a step that failed anywhere is kept on any side, whichever message it stopped at. The version is a
digest of every body that has ever changed the buffer, in order: sides of one version hold the same bytes.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from laconic.data.memory import Memory

WAY_OUT = "handle.forget() on every rank empties all buffers, and each sample's next visit is its first again"
NEW = bytes(8)  # the version of an empty buffer


@dataclass(frozen=True)
class Draft:
    """Of one micro-batch: int64 (k,) samples, their new rows uint8 (nbytes,), and a digest of its body."""

    ids: Tensor
    rows: list[Tensor]
    body: bytes


@dataclass(frozen=True)
class Saved:
    """A copy of a buffer: bool (samples,), uint8 (seen samples, bytes of one), and uint8 (8,)."""

    seen: Tensor
    rows: Tensor
    version: Tensor


class Buffer:
    """One row of bytes for each sample, in a memory that opens when it is needed.

    Attributes:
        seen: bool (samples,), whose rows are there.
        version: equal on both sides as long as their rows are.
        first_visits, changes: samples that settled for the first time, and again.
    """

    def __init__(self, samples: int, open_memory: Callable[[], Memory]) -> None:
        self._open = open_memory
        self.seen = torch.zeros(samples, dtype=torch.bool, device="cpu")
        self.version = NEW
        self.first_visits = self.changes = 0
        self._drafts: dict[int, Draft] = {}

    @cached_property
    def memory(self) -> Memory:
        """The rows. Raises `StateError` or `OSError` if there is no room."""
        return self._open()

    @property
    def opened(self) -> bool:
        """Whether there is a memory yet."""
        return "memory" in self.__dict__

    @property
    def nbytes(self) -> int:
        """Of all rows, seen or not; 0 before there is a memory."""
        return self.memory.samples * self.memory.nbytes if self.opened else 0

    @property
    def untouched(self) -> int:
        """Bytes that are promised, and that no sample has taken yet."""
        return self.nbytes - int(self.seen.sum()) * self.memory.nbytes if self.opened else 0

    def check(self) -> None:
        """Raise `OSError`, with the way out, if rows could not be written."""
        if self.opened:
            try:
                self.memory.check()
            except OSError as error:
                raise OSError(
                    error.errno, f"{error.strerror}; make room, then {WAY_OUT}", error.filename
                ) from error

    def draft(self, micro: int, ids: Tensor, rows: list[Tensor], body: Tensor) -> None:
        """Note what a micro-batch changes, in rows that nobody else writes to.

        Raises:
            StateError, OSError: There is no room for rows.
        """
        assert self.memory is not None  # opened here, where an error still stops the step on all ranks
        brought = hashlib.blake2b(body.cpu().numpy().tobytes(), digest_size=16).digest()
        self._drafts[micro] = Draft(ids, [row.cpu() for row in rows], brought)

    def settle(self) -> None:
        """Keep the drafts. A disk that fails meanwhile is told by the next `check`: at the next step."""
        for _, draft in sorted(self._drafts.items()):
            with suppress(OSError):
                for sample, row in zip(draft.ids.tolist(), draft.rows, strict=True):
                    self.memory.write(sample, row)
            known = int(self.seen[draft.ids].sum())
            self.changes += known
            self.first_visits += len(draft.ids) - known
            self.seen[draft.ids] = True
            self.version = hashlib.blake2b(self.version + draft.body, digest_size=8).digest()
        self._drafts.clear()

    def discard(self) -> None:
        """Drop the drafts."""
        self._drafts.clear()

    def forget(self) -> None:
        """As if no sample had been seen; the memory is opened anew, so one that failed works again."""
        self.discard()
        self.close()
        self.seen.zero_()
        self.version = NEW

    def close(self) -> None:
        """Free the memory."""
        if self.opened:
            self.memory.close()
            del self.memory

    def digest(self) -> str:
        """A short text of all that is remembered, equal on both sides."""
        return self.memory.digest(self.seen) if self.opened else ""

    def save(self) -> Saved:
        """A copy. Raises `OSError` if rows could not be written."""
        if self.opened:
            self.memory.flush()
        rows = (
            self.memory.rows(self.seen) if self.opened else torch.zeros(0, 0, dtype=torch.uint8, device="cpu")
        )
        return Saved(
            self.seen.clone(), rows, torch.tensor(list(self.version), dtype=torch.uint8, device="cpu")
        )

    def restore(self, saved: Saved) -> None:
        """Continue from a copy whose rows fit. Raises `OSError` if there is no room: it is empty then."""
        self.forget()
        if len(saved.rows):
            self.memory.load(saved.seen, saved.rows)
            self.seen.copy_(saved.seen)
        self.version = bytes(saved.version.tolist())

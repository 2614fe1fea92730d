"""Buffer: one side's stored activations of a boundary, by sample.

    draft(micro-batch)    record the changes of a step apart from the rows until the step has succeeded
    settle()              on all ranks: apply the drafts
    discard()             on all ranks: drop the drafts

A step that fails on any rank is not stored. Equal versions, digests of all bodies that changed the buffer,
have equal bytes.
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
NEW = bytes(8)


@dataclass(frozen=True)
class Draft:
    """Sample ids int64 (k,), rows uint8 (nbytes,), digest of the body."""

    ids: Tensor
    rows: list[Tensor]
    body: bytes


@dataclass(frozen=True)
class Saved:
    """Bool (samples,), uint8 (seen samples, bytes per sample), uint8 (8,)."""

    seen: Tensor
    rows: Tensor
    version: Tensor


class Buffer:
    """Row of bytes for each sample, in a memory that is opened on first use.

    `seen`: bool (samples,). `first_visits`, `changes`: samples settled for the first time, and again.
    """

    def __init__(self, samples: int, open_memory: Callable[[], Memory]) -> None:
        self._open = open_memory
        self.seen = torch.zeros(samples, dtype=torch.bool, device="cpu")
        self.version = NEW
        self.first_visits = self.changes = 0
        self._drafts: dict[int, Draft] = {}

    @cached_property
    def memory(self) -> Memory:
        return self._open()

    @property
    def opened(self) -> bool:
        return "memory" in self.__dict__

    @property
    def nbytes(self) -> int:
        return self.memory.samples * self.memory.nbytes if self.opened else 0

    @property
    def untouched(self) -> int:
        return self.nbytes - int(self.seen.sum()) * self.memory.nbytes if self.opened else 0

    def check(self) -> None:
        """Raise `OSError` if rows could not be written."""
        if self.opened:
            try:
                self.memory.check()
            except OSError as error:
                raise OSError(
                    error.errno, f"{error.strerror}; make room, then {WAY_OUT}", error.filename
                ) from error

    def draft(self, micro: int, ids: Tensor, rows: list[Tensor], body: Tensor) -> None:
        """Record changes. The rows must not be modified afterwards. Raises `StateError` or `OSError` without
        room.
        """
        # opens the memory while an error still stops the step on all ranks
        assert self.memory is not None
        wire, *copies = body, *rows
        if not body.is_cpu:  # one copy, one wait
            sizes = [each.numel() for each in (body, *rows)]
            wire, *copies = torch.cat([body, *rows]).cpu().split_with_sizes(sizes)
        brought = hashlib.blake2b(wire.numpy().tobytes(), digest_size=16).digest()
        self._drafts[micro] = Draft(ids, copies, brought)

    def settle(self) -> None:
        """Apply the drafts; the next `check` reports a failing disk."""
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
        self._drafts.clear()

    def forget(self) -> None:
        self.discard()
        self.close()
        self.seen.zero_()
        self.version = NEW

    def close(self) -> None:
        if self.opened:
            self.memory.close()
            del self.memory

    def digest(self) -> str:
        return self.memory.digest(self.seen) if self.opened else ""

    def save(self) -> Saved:
        """Return a copy. Raises `OSError` if rows could not be written."""
        if self.opened:
            self.memory.flush()
        rows = (
            self.memory.rows(self.seen) if self.opened else torch.zeros(0, 0, dtype=torch.uint8, device="cpu")
        )
        return Saved(
            self.seen.clone(), rows, torch.tensor(list(self.version), dtype=torch.uint8, device="cpu")
        )

    def restore(self, saved: Saved) -> None:
        """Restore a copy. Raises `OSError`, with the buffer empty, without room."""
        self.forget()
        if len(saved.rows):
            self.memory.load(saved.seen, saved.rows)
            self.seen.copy_(saved.seen)
        self.version = bytes(saved.version.tolist())

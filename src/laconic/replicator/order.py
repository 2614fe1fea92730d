"""Order: are all replicas about to do the same collective?

Collectives meet by their order alone. Replicas that call them in different orders wait for each other for
ever, or silently mix tensors of one shape. With `debug=True` each replica keeps a hash of all collectives so
far: their kinds, the shapes and dtypes of their tensors, and the lines of the script that call them. Before
each collective all gather 8 bytes of it. Where they differ, every replica raises `PeerError`, which tells
what each is about to do: it is the first that differs, as all before it were equal.

A collective called from another line counts as another one, even if it is of the same kind: that is how a
loop over a set, or an `if` that depends on the rank, is found before it mixes tensors.
"""

from __future__ import annotations

import hashlib
import sys
from collections import Counter as Tally
from pathlib import Path

import torch

from laconic.comm.comm import Comm
from laconic.comm.gather_text import gather_text
from laconic.core.errors import PeerError

OURS = (str(Path(__file__).parents[1]), str(Path(torch.__file__).parent))
END = "the end of the script"


class Order:
    """Checks nothing: what replicas have without `debug=True`."""

    def note(self, what: str, *parts: object) -> str:
        """What a message says of a collective: `what.format(*parts)`, and where the script calls it."""
        return what

    def check(self, note: str) -> None:
        """Called before every collective."""


class CheckedOrder(Order):
    """Compares each collective with those of the other replicas before it begins.

    Args:
        comm: A group of its own, of the replicas in sync; all make this at once.
    """

    def __init__(self, comm: Comm) -> None:
        self._comm = comm
        self._counters = [comm.counter() for _ in range(comm.size)]
        self._count = 0
        self._digest = b""

    def note(self, what: str, *parts: object) -> str:
        return f"{what.format(*parts)} at {called_at()}"

    def check(self, note: str) -> None:
        """Raise `PeerError` on every replica unless all are about to do this."""
        comm = self._comm
        self._count += 1
        self._digest = hashlib.blake2b(self._digest + note.encode(), digest_size=8).digest()
        number = int.from_bytes(self._digest, "little", signed=True)
        self._counters[comm.rank].add(1)
        try:
            numbers = torch.cat(
                comm.all_gather(torch.tensor([number], dtype=torch.int64, device="cpu"))
            ).tolist()
            if len(set(numbers)) == 1:
                return
            texts = gather_text(comm, note)
        except PeerError as error:
            raise PeerError(f"{self._alone(note)}: {error}") from error
        raise PeerError(differing(self._count, texts))

    def _alone(self, note: str) -> str:
        """What to say where the others do not come."""
        counts = [counter.add(0) for counter in self._counters]
        behind = ", ".join(f"replica {i} at {count}" for i, count in enumerate(counts) if count < self._count)
        late = f"; behind it: {behind}" if behind else ""
        return f"replica {self._comm.rank} waits at collective {self._count}, {note}{late}"


def differing(count: int, texts: list[str]) -> str:
    """What to say of the first collective that differs: what each replica is about to do.

    >>> differing(3, ["all_sum at a.py:1", "all_sum at a.py:1", "all_gather at a.py:2"])
    'replicas differ at collective 3: all_sum at a.py:1 (replicas 0, 1); all_gather at a.py:2 (replica 2)'
    """
    groups = []
    for text in Tally(texts):
        who = [str(i) for i, each in enumerate(texts) if each == text]
        groups.append(f"{text} (replica{'s' if len(who) > 1 else ''} {', '.join(who)})")
    return f"replicas differ at collective {count}: {'; '.join(groups)}"


def called_at() -> str:
    """The file and line of the script that called us."""
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_code.co_filename.startswith(OURS):
        frame = frame.f_back
    return f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}"

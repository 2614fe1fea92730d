"""Order: check that all replicas make the same collective, else they deadlock or mix tensors silently.

With `debug=True` they compare 8 bytes before each one, a hash of all kinds, shapes, dtypes and calling lines;
at the first difference every replica raises `PeerError`.
"""

from __future__ import annotations

import hashlib
import sys
from collections import Counter as Tally
from pathlib import Path

import torch

from laconic.comm.comm import Comm
from laconic.comm.gather_text import gather_numbers, gather_text
from laconic.core.errors import PeerError

OURS = (str(Path(__file__).parents[1]), str(Path(torch.__file__).parent))
END = "the end of the script"


class Order:
    def note(self, what: str, *parts: object) -> str:
        return what

    def check(self, note: str) -> None:
        """Check a collective before it begins."""


class CheckedOrder(Order):
    def __init__(self, comm: Comm) -> None:
        self._comm = comm
        self._counters = [comm.counter() for _ in range(comm.size)]
        self._count = 0
        self._digest = b""

    def note(self, what: str, *parts: object) -> str:
        return f"{what.format(*parts)} at {caller_location()}"

    def check(self, note: str) -> None:
        comm = self._comm
        self._count += 1
        self._digest = hashlib.blake2b(self._digest + note.encode(), digest_size=8).digest()
        number = int.from_bytes(self._digest, "little", signed=True)
        self._counters[comm.rank].add(1)
        try:
            numbers = gather_numbers(comm, number)
            if len(set(numbers)) == 1:
                return
            texts = gather_text(comm, note)
        except PeerError as error:
            raise PeerError(f"{self._describe_wait(note)}: {error}") from error
        raise PeerError(describe_difference(self._count, texts))

    def _describe_wait(self, note: str) -> str:
        counts = [counter.add(0) for counter in self._counters]
        behind = ", ".join(f"replica {i} at {count}" for i, count in enumerate(counts) if count < self._count)
        late = f"; behind it: {behind}" if behind else ""
        return f"replica {self._comm.rank} waits at collective {self._count}, {note}{late}"


def describe_difference(count: int, texts: list[str]) -> str:
    """Return the message for the first collective that differs.

    >>> describe_difference(3, ["all_sum at a.py:1", "all_sum at a.py:1", "all_gather at a.py:2"])
    'replicas differ at collective 3: all_sum at a.py:1 (replicas 0, 1); all_gather at a.py:2 (replica 2)'
    """
    groups = []
    for text in Tally(texts):
        who = [str(i) for i, each in enumerate(texts) if each == text]
        groups.append(f"{text} (replica{'s' if len(who) > 1 else ''} {', '.join(who)})")
    return f"replicas differ at collective {count}: {'; '.join(groups)}"


def caller_location() -> str:
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_code.co_filename.startswith(OURS):
        frame = frame.f_back
    return f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}"

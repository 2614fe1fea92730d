"""Writes of means that wait until it is known whether the step counts.

Until then the buffer of a mean holds new values of a memory, or old ones. `write` writes at once by default,
and after a `late` block when the caller of the block does so.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

Write = Callable[[], object]


class _Waiting(threading.local):
    """Writes of the present `late` block of each thread; None outside of one."""

    writes: list[Write] | None = None


_waiting = _Waiting()


def write(write: Write) -> None:
    """Write a mean now, or after the present `late` block.

    >>> write(lambda: print("written"))
    written
    >>> with late() as writes:
    ...     write(lambda: print("written"))
    >>> len(writes)
    1
    """
    if _waiting.writes is None:
        write()
    else:
        _waiting.writes.append(write)


def is_late() -> bool:
    """Return whether `write` waits."""
    return _waiting.writes is not None


@contextmanager
def late(wait: bool = True) -> Iterator[list[Write]]:
    """Collect the writes of this block in this thread; `wait` False lets them happen at once."""
    outer, writes = _waiting.writes, list[Write]()
    _waiting.writes = writes if wait else None
    try:
        yield writes
    finally:
        _waiting.writes = outer

"""The end of Python: first our threads end, then our process groups close.

A thread that comes back from a collective, or from the store, while Python is finalised cannot have the GIL
any more. Python then unwinds the thread, C++ forbids that, and a run that has succeeded ends with SIGABRT. So
nothing of ours should be at work by then. Before Python is finalised, however the script ends:

1. From now on a thread, ours or another's, that asks for the GIL after Python's end is parked, so that the
   exit code stays the script's own. Python 3.14 does so itself. Only where native code was compiled.
2. Every thread of ours is told to end.
3. All are waited for, `LIMIT_S` in all: one may wait in a collective for a rank that does not come.
4. If all have ended, the groups close, the youngest first. gloo waits for its worker threads then.
"""

from __future__ import annotations

import atexit
import os
import threading
import time
from collections.abc import Callable
from typing import Protocol, TypeVar
from weakref import WeakKeyDictionary

try:
    from laconic._native import park_late_threads
except ImportError:  # nothing was compiled

    def park_late_threads() -> None:
        """Without native code, nothing can be done about them."""


LIMIT_S = 2.0


class Closable(Protocol):
    """What is closed at exit, unless it was closed before."""

    def close(self) -> None:
        """Close it, if it is open."""


Group = TypeVar("Group", bound=Closable)

_threads: WeakKeyDictionary[threading.Thread, Callable[[], object]] = WeakKeyDictionary()
_groups: WeakKeyDictionary[Closable, None] = WeakKeyDictionary()


def start_thread(run: Callable[[], object], name: str, end: Callable[[], object]) -> threading.Thread:
    """A daemon thread that runs `run`. `end()` tells it to end, without waiting for that.

    What refers to the thread may be kept alive by `run`, but not by `end`.
    """
    thread = threading.Thread(target=run, name=name, daemon=True)
    _threads[thread] = end
    thread.start()
    return thread


def close_at_exit(group: Group) -> Group:
    """The same group, which closes when Python ends, if it still exists."""
    _groups[group] = None
    return group


@atexit.register
def end_all() -> None:
    """End what is still at work, in the order above."""
    park_late_threads()
    threads = list(_threads.items())
    for _, end in threads:
        end()
    deadline = time.monotonic() + LIMIT_S
    for thread, _ in threads:
        thread.join(max(0.0, deadline - time.monotonic()))
    if not any(thread.is_alive() for thread, _ in threads):
        for group in reversed(list(_groups)):
            group.close()


os.register_at_fork(after_in_child=_threads.clear)  # a child has neither the threads nor the connections
os.register_at_fork(after_in_child=_groups.clear)

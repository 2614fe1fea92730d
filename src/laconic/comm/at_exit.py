"""Shutdown at the end of Python: first our threads end, then our process groups close.

A thread that returns from a collective, or from the store, while Python is finalised cannot acquire the
GIL. Python then unwinds the thread, C++ forbids that, and a successful run ends with SIGABRT. So none of
our threads should be running by then. Before Python is finalised, however the script ends:

1. From now on any thread that requests the GIL after Python's end is parked, so that the exit code stays the
   script's own. Python 3.14 does this itself. Requires native code.
2. Every thread of ours is asked to end.
3. All are joined, for at most `LIMIT_S` in total: one may wait in a collective for a missing rank.
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
        """Do nothing without native code."""


LIMIT_S = 2.0


class Closable(Protocol):
    """An object that is closed at exit, unless it was closed before."""

    def close(self) -> None:
        """Close it, if it is open."""


Group = TypeVar("Group", bound=Closable)

_threads: WeakKeyDictionary[threading.Thread, Callable[[], object]] = WeakKeyDictionary()
_groups: WeakKeyDictionary[Closable, None] = WeakKeyDictionary()


def start_thread(run: Callable[[], object], name: str, end: Callable[[], object]) -> threading.Thread:
    """Start a daemon thread that runs `run`. `end()` asks it to end, without waiting.

    `run` may reference the thread's owner, `end` must not.
    """
    thread = threading.Thread(target=run, name=name, daemon=True)
    _threads[thread] = end
    thread.start()
    return thread


def close_at_exit(group: Group) -> Group:
    """Close `group` when Python ends, if it still exists, and return it."""
    _groups[group] = None
    return group


@atexit.register
def end_all() -> None:
    """End all threads and groups in the order above."""
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


os.register_at_fork(after_in_child=_threads.clear)  # a child process has neither threads nor connections
os.register_at_fork(after_in_child=_groups.clear)

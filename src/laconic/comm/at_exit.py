"""Shutdown at the end of Python: first our threads end, then our process groups close.

A thread that returns from a collective or from the store while Python is finalised cannot acquire the GIL.
Python then unwinds it, C++ forbids that, and a successful run ends with SIGABRT. So before that:

1. Threads that request the GIL later are parked (Python 3.14 does this itself).
2. Our threads are asked to end, and joined for at most `LIMIT_S` in total: one may wait for a missing rank.
3. If all have ended, the groups close, the youngest first. gloo waits for its worker threads then.
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
except ImportError:

    def park_late_threads() -> None:
        """Do nothing."""


LIMIT_S = 2.0


class Closable(Protocol):
    def close(self) -> None:
        """Close it."""


Group = TypeVar("Group", bound=Closable)

_threads: WeakKeyDictionary[threading.Thread, Callable[[], object]] = WeakKeyDictionary()
_groups: WeakKeyDictionary[Closable, None] = WeakKeyDictionary()


def start_thread(run: Callable[[], object], name: str, end: Callable[[], object]) -> threading.Thread:
    """Start a daemon thread. `end()` asks it to end, without waiting.

    `run` may reference the thread's owner, `end` must not.
    """
    thread = threading.Thread(target=run, name=name, daemon=True)
    _threads[thread] = end
    thread.start()
    return thread


def close_at_exit(group: Group) -> Group:
    _groups[group] = None
    return group


@atexit.register
def end_all() -> None:
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


os.register_at_fork(after_in_child=_threads.clear)  # a child has neither threads nor connections
os.register_at_fork(after_in_child=_groups.clear)

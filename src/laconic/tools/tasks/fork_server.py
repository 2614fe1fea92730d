"""First import of the server that forks workers, started with SIGINT blocked: Ctrl-C ends it silently."""

from __future__ import annotations

import atexit
import os
import signal
import sys


def end(server: int) -> None:
    """End the server without freeing torch's modules, which takes a second or two after the command's end."""
    if os.getpid() == server:
        os._exit(0)


if any("multiprocessing.forkserver" in word for word in sys.orig_argv):
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    atexit.register(end, os.getpid())

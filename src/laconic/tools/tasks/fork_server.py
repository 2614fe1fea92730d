"""First import of the server that forks workers, started with SIGINT blocked: Ctrl-C ends it silently."""

from __future__ import annotations

import signal
import sys

if any("multiprocessing.forkserver" in word for word in sys.orig_argv):
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})

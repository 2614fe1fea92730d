"""First import of the server that forks workers: Ctrl-C then ends it silently.

`launcher` starts it with SIGINT blocked.
"""

from __future__ import annotations

import signal
import sys

if any("multiprocessing.forkserver" in word for word in sys.orig_argv):
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})

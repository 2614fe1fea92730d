"""First code of a worker of `laconic run`, started with SIGINT blocked: Ctrl-C ends it silently."""

import os
import signal
import sys

if __name__ == "__main__":
    shows_interrupts = signal.getsignal(signal.SIGINT) is signal.default_int_handler
    if shows_interrupts:  # else the parent process ignores it
        signal.signal(signal.SIGINT, lambda number, frame: os._exit(130))
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    from pathlib import Path

    sys.path[0] = str(Path.cwd())  # as `python -m` has it
    from laconic.tools.cli.worker import main

    if shows_interrupts:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    main()

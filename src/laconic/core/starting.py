"""The start of the `laconic` command: Ctrl-C ends it in one line while torch is imported, for seconds.

`import laconic` comes before any code of the command, so it imports this first. The server that forks workers
has the same to import, and ends in silence. In a user's script, signals are unchanged.
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from types import FrameType

INTERRUPTED = 130  # exit code, the same as that of shells
MAIN, WORKER = "laconic.tools.cli.main", "laconic.tools.cli.worker"  # as `python -m` runs them
LAUNCHER = "LACONIC_LAUNCHER"  # environment variable of workers: the launcher's process


def commanded(argv: list[str], original: list[str]) -> bool:
    """Whether this process is the command or one of its workers, by `sys.argv` and `sys.orig_argv`.

    >>> commanded(["/bin/laconic", "doctor"], []), commanded(["train.py"], ["python", "train.py"])
    (True, False)
    >>> commanded(["-m", "doctor"], ["python", "-m", "laconic.tools.cli.main", "doctor"])
    True
    >>> commanded(["-m"], ["python", "-mpackage.train"]), commanded([], [])
    (False, False)
    """
    if argv[:1] == ["-m"]:
        return any(word.endswith((MAIN, WORKER)) for word in original)
    return bool(argv) and Path(argv[0]).stem == "laconic"


def serving(original: list[str]) -> bool:
    """Return whether this process is the fork server of `laconic.tools.tasks.launcher`."""
    return any("multiprocessing.forkserver" in word and "laconic.tools.tasks." in word for word in original)


def started() -> None:
    """From here on, Ctrl-C is a KeyboardInterrupt again."""
    if signal.getsignal(signal.SIGINT) is _end:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def say_interrupted() -> None:
    """One line on standard error; a worker leaves it to its launcher."""
    if WORKER not in sys.orig_argv:
        os.write(2, b"laconic: interrupted\n")


def forget_interrupt() -> None:
    """Let the process end with its own exit code after a KeyboardInterrupt that was handled.

    Where it was raised inside `exec` of a string, as while a dataclass is made, CPython remembers it until
    the next such `exec`, and at the end kills the process by SIGINT.
    """
    exec("")


def _end(number: int, frame: FrameType | None) -> None:
    say_interrupted()
    os._exit(INTERRUPTED)


if serving(sys.orig_argv):
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
elif signal.getsignal(signal.SIGINT) is signal.default_int_handler and commanded(sys.argv, sys.orig_argv):
    signal.signal(signal.SIGINT, _end)

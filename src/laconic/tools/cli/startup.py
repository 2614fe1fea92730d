"""Start of the command and its workers: Ctrl-C ends them in one line, also while torch is imported."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from types import FrameType

INTERRUPTED = 130  # exit code, the same as that of shells
WORKER = str(Path(__file__).with_name("begin_worker.py"))  # as Python runs it
LAUNCHER = "LACONIC_LAUNCHER"  # environment variable of workers: the launcher's process


def exit_on_interrupt() -> None:
    """Make Ctrl-C end the process in one line, unless the parent process ignores it."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _exit)


def raise_on_interrupt() -> None:
    """Make Ctrl-C a KeyboardInterrupt again, after `exit_on_interrupt`."""
    if signal.getsignal(signal.SIGINT) is _exit:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def say_interrupted() -> None:
    """Print one line on standard error; the launcher prints it for its workers."""
    if WORKER not in sys.orig_argv:
        os.write(2, b"laconic: interrupted\n")


def forget_interrupt() -> None:
    """Let the process end with its own exit code after a KeyboardInterrupt that was handled.

    If it was raised inside `exec` of a string, as in the definition of a dataclass, CPython remembers it
    until the next such `exec`, and otherwise ends the process by SIGINT.
    """
    exec("")


def _exit(number: int, frame: FrameType | None) -> None:
    say_interrupted()
    os._exit(INTERRUPTED)

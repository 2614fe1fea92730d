"""Start of the command and its workers."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

INTERRUPTED = 130
WORKER = str(Path(__file__).with_name("begin_worker.py"))
LAUNCHER = "LACONIC_LAUNCHER"  # environment variable of workers: the launcher's process


def exit_on_interrupt() -> None:
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _exit)


def raise_on_interrupt() -> None:
    if signal.getsignal(signal.SIGINT) is _exit:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def say_interrupted() -> None:
    if WORKER not in sys.orig_argv:
        os.write(2, b"laconic: interrupted\n")


@contextmanager
def interrupts_blocked_in_children() -> Iterator[None]:
    """Block Ctrl-C in this thread and its children; another thread receives it."""
    ended = threading.Event()
    threading.Thread(target=ended.wait, daemon=True).start()
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        ended.set()
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def forget_interrupt() -> None:
    """Make a process that handled a KeyboardInterrupt end with its own exit code.

    After an interrupt inside `exec` of a string, as in a dataclass, CPython ends by SIGINT unless another
    `exec` follows.
    """
    exec("")


def _exit(number: int, frame: FrameType | None) -> None:
    say_interrupted()
    os._exit(INTERRUPTED)

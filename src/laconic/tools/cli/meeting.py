"""A message, and a working Ctrl-C, while torch waits in native code for a run's other machines.

A thread reads the byte that a signal writes, and ends the process if the main thread does not.
"""

from __future__ import annotations

import os
import signal
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from laconic.tools.cli.console import errors
from laconic.tools.cli.startup import INTERRUPTED, say_interrupted

GRACE_S = 3.0  # torch sleeps 1 s between attempts


@contextmanager
def meeting(given: Any) -> Iterator[None]:
    if given.nnodes in ("1", "1:1"):
        yield
        return
    place = given.rdzv_endpoint or f"{given.master_addr}:{given.master_port}"
    errors().print(
        f"laconic: waiting for {given.nnodes} machines at {place}; Ctrl-C ends the wait",
        style="dim",
        markup=False,
    )
    writes, reads = socket.socketpair()
    writes.setblocking(False)
    before = signal.set_wakeup_fd(writes.fileno(), warn_on_full_buffer=False)
    ended = threading.Event()
    threading.Thread(target=_watch, args=(reads, ended), name="laconic-meeting", daemon=True).start()
    try:
        yield
    finally:
        ended.set()
        signal.set_wakeup_fd(before)
        writes.close()


def _watch(reads: socket.socket, ended: threading.Event) -> None:
    with reads:
        while came := reads.recv(1):
            if came[0] != signal.SIGINT or ended.wait(GRACE_S):
                continue
            if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # the agent has no workers yet
                say_interrupted()
                os._exit(INTERRUPTED)

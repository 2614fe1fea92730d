"""Waits for one process per host, and kills all when one fails."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from tempfile import TemporaryFile
from typing import IO, Any

from laconic.core.errors import LabError

GRACE_S = 10.0
LOOK_S = 1.0
Start = Callable[[IO[str] | None], subprocess.Popen[Any]]


class OutOfTime(LabError):
    pass


class CommandFailed(LabError):
    def __init__(self, host: int, returncode: int) -> None:
        self.code = returncode if returncode > 0 else 128 - returncode
        how = (
            f"was killed by {signal.Signals(-returncode).name}"
            if returncode < 0
            else f"ended with exit code {returncode}"
        )
        super().__init__(f"host {host}: the command {how}; its output is above")


def outputs(
    starts: Sequence[Start], *, timeout_s: float | None, capture: bool, alive: Callable[[], None]
) -> list[str]:
    """Run all commands, and return their outputs, or "" without `capture`.

    `alive` raises if the hosts' network has failed.
    """
    deadline = None if timeout_s is None else time.monotonic() + timeout_s

    def interrupt(kind: type[BaseException] | None, *_: object) -> None:
        if kind is KeyboardInterrupt:
            _interrupt(processes)

    with ExitStack() as stack:
        files = [stack.enter_context(TemporaryFile("w+")) if capture else None for _ in starts]
        processes: list[subprocess.Popen[Any]] = []
        for start, file in zip(starts, files, strict=True):
            processes.append(start(file))
            stack.callback(_end, processes[-1])
        stack.push(interrupt)
        waiting = {stack.enter_context(_Ended(process)): host for host, process in enumerate(processes)}
        while waiting:
            left = LOOK_S if deadline is None else min(LOOK_S, deadline - time.monotonic())
            if left <= 0:
                raise OutOfTime(f"not done within {timeout_s:g} s: all commands were killed")
            for ended in select.select(list(waiting), [], [], left)[0]:
                host = waiting.pop(ended)
                if code := processes[host].wait():
                    raise CommandFailed(host, code)
            alive()
        for file in files:
            if file is not None:
                file.seek(0)
        return ["" if file is None else file.read() for file in files]


class _Ended:
    """File that becomes readable when a process ends."""

    def __init__(self, process: subprocess.Popen[Any]) -> None:
        self._descriptor = os.pidfd_open(process.pid)

    def fileno(self) -> int:
        return self._descriptor

    def __enter__(self) -> _Ended:
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._descriptor)


def _interrupt(processes: Sequence[subprocess.Popen[Any]]) -> None:
    for process in processes:
        if process.poll() is None:
            process.send_signal(signal.SIGINT)
    deadline = time.monotonic() + GRACE_S
    for process in processes:
        with suppress(subprocess.TimeoutExpired):
            process.wait(max(0.0, deadline - time.monotonic()))


def _end(process: subprocess.Popen[Any]) -> None:
    if process.poll() is None:
        process.kill()
    process.wait()

"""Runs a command in a namespace of a lab, and ends as the command ends.

    enter KEEPER NUMBER COMMAND...      KEEPER: the keeper's inner process, as it is seen from here

The command dies with this process, and all it has started with the lab. It leads a session of its own, to
which SIGINT, SIGTERM and SIGHUP are passed on, as from a terminal.
"""

from __future__ import annotations

import os
import signal
import socket
import sys
from contextlib import suppress
from typing import NoReturn

from laconic.core import linux
from laconic.lab.inside.keeper import FIRST

NOT_FOUND = 127  # as shells have it
PASSED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def main(keeper: str, number: int, command: list[str]) -> NoReturn:
    """Enter, run, wait."""
    folder = os.getcwd()  # noqa: PTH109
    step_in(keeper, number)
    signal.pthread_sigmask(signal.SIG_BLOCK, PASSED)  # until there is somebody to pass them on to
    child = os.fork()
    if child == 0:
        become(number, folder, command)
    for passed in PASSED:
        signal.signal(passed, lambda number, frame: os.killpg(child, number))
    signal.pthread_sigmask(signal.SIG_UNBLOCK, PASSED)
    _, status = os.waitpid(child, 0)
    code = os.waitstatus_to_exitcode(status)
    if code < 0:
        if -code != signal.SIGKILL:
            signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    os._exit(code)


def step_in(keeper: str, number: int) -> None:
    """Into the keeper's namespaces; children are in that of processes."""
    home = f"/proc/{keeper}"
    if not os.path.samefile(f"{home}/ns/user", "/proc/self/ns/user"):  # noqa: PTH121
        linux.enter(f"{home}/ns/user", linux.NEWUSER)
    linux.enter(f"{home}/fd/{FIRST + number}", linux.NEWNET)
    linux.enter(f"{home}/ns/pid", linux.NEWPID)
    linux.enter(f"{home}/ns/mnt", linux.NEWNS)


def become(number: int, folder: str, command: list[str]) -> NoReturn:
    """The command, on a host of its own name, whose /sys tells of its interfaces."""
    linux.die_with_parent()
    os.setsid()
    signal.pthread_sigmask(signal.SIG_UNBLOCK, PASSED)
    os.chdir(folder)
    linux.unshare(linux.NEWNS | linux.NEWUTS)
    socket.sethostname(f"host{number}")
    with suppress(OSError):  # a container may not allow it: /sys then tells of its own interfaces
        linux.mount("sysfs", "/sys")
    try:
        os.execvp(command[0], command)
    except OSError as error:
        print(f"laconic lab: {command[0]}: {error.strerror}", file=sys.stderr)
        os._exit(NOT_FOUND)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), sys.argv[3:])

"""Runs a command in a lab's namespace, and ends like it.

    enter KEEPER NUMBER COMMAND...      KEEPER: pid of the inner keeper, outside the lab

The command dies with this process, its children with the lab. It leads a session, which gets this process's
SIGINT, SIGTERM and SIGHUP.
"""

from __future__ import annotations

import os
import signal
import socket
import sys
from contextlib import suppress
from types import FrameType
from typing import NoReturn

from laconic.tools.lab import linux
from laconic.tools.lab.inside.keeper import FIRST

NOT_FOUND = 127
PASSED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def main(keeper: str, number: int, command: list[str]) -> NoReturn:
    folder = os.getcwd()  # noqa: PTH109
    step_in(keeper, number)
    signal.pthread_sigmask(signal.SIG_BLOCK, PASSED)
    child = os.fork()
    if child == 0:
        become(number, folder, command)

    def pass_on(passed: int, frame: FrameType | None) -> None:
        try:
            os.killpg(child, passed)
        except ProcessLookupError:  # it leads no session yet, or has ended
            with suppress(ProcessLookupError):
                os.kill(child, passed)

    for passed in PASSED:
        signal.signal(passed, pass_on)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, PASSED)
    _, status = os.waitpid(child, 0)
    code = os.waitstatus_to_exitcode(status)
    if code < 0:
        if -code != signal.SIGKILL:
            signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    os._exit(code)


def step_in(keeper: str, number: int) -> None:
    home = f"/proc/{keeper}"
    if not os.path.samefile(f"{home}/ns/user", "/proc/self/ns/user"):  # noqa: PTH121
        linux.enter(f"{home}/ns/user", linux.NEWUSER)
    linux.enter(f"{home}/fd/{FIRST + number}", linux.NEWNET)
    linux.enter(f"{home}/ns/pid", linux.NEWPID)
    linux.enter(f"{home}/ns/mnt", linux.NEWNS)


def become(number: int, folder: str, command: list[str]) -> NoReturn:
    linux.die_with_parent()
    os.setsid()
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # it would print a traceback
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, PASSED)
    os.chdir(folder)
    linux.unshare(linux.NEWNS | linux.NEWUTS)
    socket.sethostname(f"host{number}")
    with suppress(OSError):  # a container may forbid it
        linux.mount("sysfs", "/sys")
    try:
        os.execvp(command[0], command)
    except OSError as error:
        print(f"laconic lab: {command[0]}: {error.strerror}", file=sys.stderr)
        os._exit(NOT_FOUND)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), sys.argv[3:])

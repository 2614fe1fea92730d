"""Process that holds a lab's namespaces.

    keeper COUNT OWNER      COUNT network namespaces, until OWNER or stdin ends

Namespaces are open files of process 1 of a pid namespace. When it ends, the kernel kills everything in the
lab and removes namespaces, interfaces and mounts. Without root it uses a new user namespace. It reads
requests, one JSON list per line, and answers each with a list: see `answer`.
"""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import tempfile
import time
from typing import Any, NoReturn

from laconic.tools.lab import linux

FIRST = 10  # namespace k is file FIRST + k
IN_SERVICE_S = 10.0
BURY_S = 0.5


def main(count: int, owner: int) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the owner handles Ctrl-C
    gain_rights()
    linux.unshare(linux.NEWNS | linux.NEWPID)
    child = os.fork()
    if child == 0:
        keep(count)
    say({"process": child})
    try:
        watched = [os.pidfd_open(owner), os.pidfd_open(child)]
        select.select(watched, [], [])
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


def gain_rights() -> None:
    user, group = os.geteuid(), os.getegid()
    try:
        linux.unshare(linux.NEWNET)
    except PermissionError:
        linux.unshare(linux.NEWUSER | linux.NEWNET)
        for name, text in (("setgroups", "deny"), ("uid_map", f"0 {user} 1"), ("gid_map", f"0 {group} 1")):
            write(f"/proc/self/{name}", text)


def keep(count: int) -> NoReturn:
    linux.die_with_parent()
    linux.mount("none", "/", linux.PRIVATE)
    linux.mount("proc", "/proc")
    for number in range(count):
        linux.unshare(linux.NEWNET)
        here = os.open("/proc/self/ns/net", os.O_RDONLY)
        os.dup2(here, FIRST + number, inheritable=False)
        os.close(here)
    say({"ready": True})
    poll = select.poll()
    poll.register(0, select.POLLIN)
    lines = b""
    while True:
        if poll.poll(1000 * BURY_S):
            received = os.read(0, 1 << 16)
            if not received:
                os._exit(0)
            lines += received
            *whole, lines = lines.split(b"\n")
            for line in whole:
                say([answer(request) for request in json.loads(line)])
        bury()


def answer(request: dict[str, Any]) -> Any:
    """Answer one request in one namespace.

    "run": a command with "input"; answers [return code, output, errors]. "write": writes "text" to a file.
    "counts": answers an interface's sent and received bytes. "bare": turns offloads off. "names": sets
    /etc/hosts. "running": answers whether an interface came up in time.
    """
    linux.enter(f"/proc/self/fd/{FIRST + request['in']}", linux.NEWNET)
    if "run" in request:
        done = subprocess.run(
            request["run"], input=request.get("input", ""), capture_output=True, text=True, check=False
        )
        return [done.returncode, done.stdout, done.stderr]
    if "counts" in request:
        return linux.interface_bytes(request["counts"])
    if "bare" in request:
        return linux.offloads_off(request["bare"])
    if "running" in request:
        return in_service(request["running"])
    if "names" in request:
        return show("/etc/hosts", request["names"])
    return write(request["write"], request["text"])


def bury() -> None:
    while True:
        try:
            if os.waitpid(-1, os.WNOHANG)[0] == 0:
                return
        except ChildProcessError:
            return


def write(path: str, text: str) -> None:
    if os.path.exists(path):  # noqa: PTH110  # pathlib takes 10 ms to import
        with open(path, "w") as file:  # noqa: PTH123
            file.write(text)


def in_service(interface: str) -> bool:
    deadline = time.monotonic() + IN_SERVICE_S
    while not linux.running(interface):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.005)
    return True


def show(path: str, text: str) -> None:
    """Replace a file's text inside the lab, by mounting an unnamed file over it."""
    handle, beside = tempfile.mkstemp(prefix="laconic-lab-")
    os.write(handle, text.encode())
    os.fchmod(handle, 0o644)
    os.close(handle)
    try:
        linux.mount(beside, path, linux.BIND)
    finally:
        os.unlink(beside)  # noqa: PTH108


def say(message: Any) -> None:
    sys.stdout.write(json.dumps(message) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    try:
        main(int(sys.argv[1]), int(sys.argv[2]))
    except OSError as error:
        say({"refused": error.strerror or str(error)})

"""The owner's side of a lab's keeper: its life, and requests to it."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from laconic.core.errors import LabError
from laconic.lab.bare import bare

END_S = 5.0  # for the keeper to end by itself
MEANS = """\
it takes root, or a kernel that lets users have namespaces: see user.max_user_namespaces and
kernel.apparmor_restrict_unprivileged_userns in /proc/sys; a container needs --privileged"""
Request = dict[str, Any]


class Keeping:
    """`count` network namespaces, there until `close` or the end of this process, however it ends.

    Raises `LabError` where iproute2 is missing, or the rights to make namespaces.
    """

    def __init__(self, count: int) -> None:
        self.ip, self.tc = _tool("ip"), _tool("tc")
        self._process = subprocess.Popen(
            bare("keeper", count, os.getpid()),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,  # Ctrl-C ends the commands first
        )
        told: dict[str, Any] = {}
        try:
            while not {"ready", "process"} <= told.keys():
                told |= self._hear()
                if "refused" in told:
                    raise LabError(f"no network namespace can be made here ({told['refused']}): {MEANS}")
        except BaseException:
            self.close()
            raise
        self.process: int = told["process"]  # that sees itself as the lab's first

    def ask(self, *requests: Request) -> list[Any]:
        """The keeper's answers, one each: see `inside/keeper.py`. Commands that fail raise `LabError`."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(requests) + "\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            raise LabError("the lab has ended: its keeper was killed") from None
        answers: list[Any] = self._hear()
        for request, answer in zip(requests, answers, strict=True):
            if "run" in request and answer[0] != 0 and not request.get("may_fail"):
                raise LabError(f"{' '.join(request['run'])}: {answer[2].strip()}; {MEANS}")
        return answers

    def enter(self, number: int, command: Sequence[str]) -> list[str]:
        """The command line that runs a command in namespace `number`."""
        return bare("enter", self.process, number, *command)

    def close(self) -> None:
        """End all that runs in the namespaces, and them."""
        assert self._process.stdin is not None and self._process.stdout is not None
        with suppress(BrokenPipeError):
            self._process.stdin.close()
        try:
            self._process.wait(END_S)
        except subprocess.TimeoutExpired:
            self._process.kill()  # the kernel does the rest
            self._process.wait()
        self._process.stdout.close()

    def _hear(self) -> Any:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise LabError("the lab has ended: its keeper was killed, or could not be started")
        return json.loads(line)


def _tool(name: str) -> str:
    """Where a program of iproute2 is; users' PATH often leaves its folder out."""
    path = os.pathsep.join((os.environ.get("PATH", os.defpath), "/usr/sbin", "/sbin"))
    found = shutil.which(name, path=path)
    if found is None:
        raise LabError(f"there is no `{name}` on this machine: install iproute2 (apt-get install iproute2)")
    return found

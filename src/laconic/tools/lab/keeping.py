"""The owner's side of a lab's keeper."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from laconic.core.errors import LabError
from laconic.tools.lab.bare import bare

END_S = 5.0
MEANS = """\
it takes root, or a kernel that allows namespaces to users: see user.max_user_namespaces and
kernel.apparmor_restrict_unprivileged_userns in /proc/sys; a container needs --privileged"""
Request = dict[str, Any]


class Keeping:
    """`count` network namespaces, until `close` or the end of this process.

    Raises `LabError` without iproute2 or the right to make namespaces.
    """

    def __init__(self, count: int) -> None:
        self.ip, self.tc = _tool("ip"), _tool("tc")
        self._process = subprocess.Popen(
            bare("keeper", count, os.getpid()),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,  # Ctrl-C ends commands first
        )
        status: dict[str, Any] = {}
        try:
            while not {"ready", "process"} <= status.keys():
                status |= self._read()
                if "refused" in status:
                    raise LabError(f"no network namespace can be made here ({status['refused']}): {MEANS}")
        except BaseException:
            self.close()
            raise
        self.process: int = status["process"]

    def ask(self, *requests: Request) -> list[Any]:
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(requests) + "\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            raise LabError("the lab has ended: its keeper was killed") from None
        answers: list[Any] = self._read()
        for request, answer in zip(requests, answers, strict=True):
            if "run" in request and answer[0] != 0 and not request.get("may_fail"):
                raise LabError(f"{' '.join(request['run'])}: {answer[2].strip()}; {MEANS}")
        return answers

    def enter(self, number: int, command: Sequence[str]) -> list[str]:
        return bare("enter", self.process, number, *command)

    def close(self) -> None:
        assert self._process.stdin is not None and self._process.stdout is not None
        with suppress(BrokenPipeError):
            self._process.stdin.close()
        try:
            self._process.wait(END_S)
        except subprocess.TimeoutExpired:
            self._process.kill()  # removes the namespaces
            self._process.wait()
        self._process.stdout.close()

    def _read(self) -> Any:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise LabError("the lab has ended: its keeper was killed, or could not be started")
        return json.loads(line)


def _tool(name: str) -> str:
    """Return the path of an iproute2 program; PATH often lacks its folder."""
    path = os.pathsep.join((os.environ.get("PATH", os.defpath), "/usr/sbin", "/sbin"))
    found = shutil.which(name, path=path)
    if found is None:
        raise LabError(f"there is no `{name}` on this machine: install iproute2 (apt-get install iproute2)")
    return found

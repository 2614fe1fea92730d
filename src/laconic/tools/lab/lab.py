"""Emulated hosts on one Linux machine, each with its own link.

    with Lab(hosts=4, link=Link("1gbit", delay="2ms")) as lab:
        outputs = lab.run([sys.executable, "train.py"])      # on every host, in torchrun's environment
        print(lab.counters())

A host is a network namespace; its processes share the machine's files and processors, and know the hosts as
host0, host1, ... The machine's network is not changed.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from types import TracebackType
from typing import Any

from laconic.core.arguments import whole
from laconic.core.errors import LabError, SpecError
from laconic.tools.lab import wiring
from laconic.tools.lab.bare import bare
from laconic.tools.lab.inside.keeper import FIRST
from laconic.tools.lab.keeping import Keeping, Request
from laconic.tools.lab.link import Link
from laconic.tools.lab.profiles import Profile
from laconic.tools.lab.waiting import Start, outputs

PORT = 29500
HOSTS = "LACONIC_LAB"  # variable for `laconic train`, see `tasks/place.py`


@dataclass(frozen=True)
class Counted:
    """Bytes of a host's interface, with all headers."""

    sent: int
    received: int


class Lab:
    """Emulated hosts, inside a `with` block.

    Args:
        hosts: Number of hosts, 1 to 64.
        link: Every host's link, or a profile; default: as fast as memory.
        offload: Whether packets of up to 64 kB cross as one: less processor time, but counters miss headers.
            Default: False.
        seed: Seed of delay and loss without netem; default: 0.

    Raises:
        LabError: This machine cannot have a lab.
    """

    def __init__(
        self, hosts: int, link: Link | Profile | None = None, *, offload: bool = False, seed: int = 0
    ) -> None:
        whole("hosts", hosts, 1, wiring.MOST_HOSTS)
        self.hosts = hosts
        self.profile = link if isinstance(link, Profile) else Profile(link or Link())
        self.links = [self.profile.link] * hosts
        self.offload, self.seed = offload, seed
        self.addresses = tuple(map(wiring.address, range(hosts)))
        self.means = "tc"  # delay and loss: "tc" (netem or none) or "relay"
        self._keeping: Keeping | None = None
        self._relay: subprocess.Popen[str] | None = None
        self._runs = 0

    def __enter__(self) -> Lab:
        try:
            self._build()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def start(
        self, host: int, command: Sequence[str], *, env: Mapping[str, str] | None = None, **popen: Any
    ) -> subprocess.Popen[Any]:
        """Start a command on a host, and return its process, which dies with the lab.

        It reads nothing from the terminal. Ctrl-C does not reach it; `send_signal` does. Killing the process
        kills the command; its children live until the lab is closed.

        Args:
            host: The number of the host.
            command: Program and arguments.
            env: Variables added to the environment; default: none.
            popen: Options of `subprocess.Popen`.
        """
        environment = {**os.environ, "GLOO_SOCKET_IFNAME": wiring.INTERFACE} | dict(env or {})
        popen = {"stdin": subprocess.DEVNULL, "start_new_session": True} | popen
        before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})  # inherited by `enter`
        try:
            return subprocess.Popen(self._kept.enter(host, command), env=environment, **popen)
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)

    def run(
        self,
        command: Sequence[str],
        *,
        env: Mapping[str, str] | None = None,
        timeout_s: float | None = None,
        capture: bool = True,
    ) -> list[str]:
        """Run a command on every host, in torchrun's environment, and wait.

        Args:
            command: Program and arguments.
            env: Variables added to the environment; default: none.
            timeout_s: Time limit; default: none.
            capture: Whether to return the output (default), or print it.

        Returns:
            Each host's output, or "".

        Raises:
            LabError: A command failed, or time is over; the others are killed.
        """
        self._runs += 1

        def on(host: int) -> Start:
            return lambda to: self.start(host, command, env={**self.place(host), **(env or {})}, stdout=to)

        return outputs(
            [on(host) for host in range(self.hosts)],
            timeout_s=timeout_s,
            capture=capture,
            alive=self._check_relay,
        )

    def run_once(
        self,
        command: Sequence[str],
        *,
        env: Mapping[str, str] | None = None,
        timeout_s: float | None = None,
        capture: bool = True,
    ) -> str:
        """Like `run`, on host 0 alone: for `laconic train`, which starts its own workers."""
        hosts = {
            "namespaces": [f"/proc/1/fd/{FIRST + host}" for host in range(self.hosts)],
            "addresses": self.addresses,
            "interface": wiring.INTERFACE,
        }
        environment = {HOSTS: json.dumps(hosts), **(env or {})}
        return outputs(
            [lambda to: self.start(0, command, env=environment, stdout=to)],
            timeout_s=timeout_s,
            capture=capture,
            alive=self._check_relay,
        )[0]

    def place(self, host: int) -> dict[str, str]:
        """Return torchrun's environment variables for a host with one process."""
        place = {
            "RANK": host,
            "WORLD_SIZE": self.hosts,
            "LOCAL_RANK": 0,
            "LOCAL_WORLD_SIZE": 1,
            "GROUP_RANK": host,
            "GROUP_WORLD_SIZE": self.hosts,
            "MASTER_ADDR": self.addresses[0],
            "MASTER_PORT": PORT + self._runs,
            "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", 1),
        }
        return {name: str(value) for name, value in place.items()}

    def reshape(self, link: Link, hosts: Sequence[int] | None = None) -> None:
        """Give hosts, by default all, another link; packets on their way keep their delay."""
        if self.means == "tc" and not link.direct and not self._has_netem():
            raise SpecError(
                "this kernel has no netem, so a lab without delay cannot get delay or loss later: start the"
                " lab with a delay, such as 100us"
            )
        for host in range(self.hosts) if hosts is None else hosts:
            self.links[host] = link
        self._shape()

    def counters(self) -> list[Counted]:
        """Return each interface's bytes since the start."""
        asked = ({"in": host, "counts": wiring.INTERFACE} for host in range(self.hosts))
        return [Counted(*found) for found in self._kept.ask(*asked)]

    def close(self) -> None:
        """End the hosts and their processes."""
        if self._relay is not None:
            self._relay.kill()
            self._relay.wait()
            for pipe in (self._relay.stdin, self._relay.stdout):
                assert pipe is not None
                with suppress(BrokenPipeError):
                    pipe.close()
            self._relay = None
        if self._keeping is not None:
            self._keeping.close()
            self._keeping = None

    @property
    def _kept(self) -> Keeping:
        if self._keeping is None:
            raise LabError("the lab is closed: use it inside its `with` block")
        return self._keeping

    @property
    def _hub(self) -> int:
        return self.hosts  # after the hosts

    def _build(self) -> None:
        self._keeping = Keeping(self.hosts + 1)
        late = not (self.profile.link.direct and self.profile.direct)
        if late and not (self.profile.direct and self._has_netem()):
            self.means = "relay"
        everywhere = [
            {"in": number, "write": wiring.DISABLE_IPV6, "text": "1"} for number in range(self.hosts + 1)
        ]
        cables = wiring.hub_lines(self.hosts, bridged=self.means == "tc")
        names = {"in": self._hub, "names": wiring.names(self.hosts)}
        self._kept.ask(names, *everywhere, self._batch(self._hub, "ip", cables))
        for host in range(self.hosts):
            self._kept.ask(self._batch(host, "ip", wiring.host_lines(host)))
        if not self.offload or self.means == "relay":
            self._kept.ask(*({"in": host, "bare": wiring.INTERFACE} for host in range(self.hosts)))
        self._shape()
        if not all(
            self._kept.ask(*({"in": host, "running": wiring.INTERFACE} for host in range(self.hosts)))
        ):
            raise LabError("the kernel does not bring up the interfaces of the lab")
        if self.means == "relay":
            self._start_relay()

    def _shape(self) -> None:
        netem = self.means == "tc" and any(not link.direct for link in self.links)
        down = (wiring.down_lines(host, link, netem=netem) for host, link in enumerate(self.links))
        self._kept.ask(
            self._batch(self._hub, "tc", "".join(down)),
            *(self._batch(host, "tc", wiring.up_lines(link)) for host, link in enumerate(self.links)),
        )
        if self._relay is not None:
            self._tell_relay()

    def _batch(self, number: int, tool: str, lines: str) -> Request:
        program = self._kept.ip if tool == "ip" else self._kept.tc
        return {"in": number, "run": [program, "-batch", "-"], "input": lines}

    def _has_netem(self) -> bool:
        probe = "qdisc replace dev lo root netem delay 1ms\nqdisc del dev lo root\n"
        (answer,) = self._kept.ask(self._batch(self._hub, "tc", probe) | {"may_fail": True})
        return bool(answer[0] == 0)

    def _start_relay(self) -> None:
        self._relay = subprocess.Popen(
            self._kept.enter(self._hub, bare("relay", self.seed)),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        self._tell_relay()
        assert self._relay.stdout is not None
        if not self._relay.stdout.readline():
            raise LabError("the relay of packets could not start: its output is above")

    def _tell_relay(self) -> None:
        extra = self.profile.extra_s
        shape = {
            "ports": [f"v{host}" for host in range(self.hosts)],
            "delay": [
                [link.delay_s + extra(source, host) for source in range(self.hosts)]
                for host, link in enumerate(self.links)
            ],
            "jitter": [link.jitter_s for link in self.links],
            "loss": [link.loss_share for link in self.links],
        }
        assert self._relay is not None and self._relay.stdin is not None
        self._relay.stdin.write(json.dumps(shape) + "\n")
        self._relay.stdin.flush()

    def _check_relay(self) -> None:
        if self._relay is not None and self._relay.poll() is not None:
            raise LabError("the relay of packets has ended: hosts cannot reach each other")


def missing() -> str | None:
    """Return why this machine cannot have a lab, or None."""
    try:
        with Lab(1, Link("100mbit")):
            return None
    except LabError as error:
        return str(error)

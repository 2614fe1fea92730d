"""Several emulated hosts on one Linux machine, each with a link of its own: the network that a test wants.

    with Lab(hosts=4, link=Link("1gbit", delay="2ms")) as lab:
        outputs = lab.run([sys.executable, "train.py"])      # on every host, in torchrun's environment
        print(lab.counters())

A host is a network namespace: processes on it share the machine's files and processors, and see one
interface, eth0, and the others as host0, host1, ... Nothing of the machine's own network is touched, and
nothing outlives the lab: see `inside/keeper.py`.
"""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from types import TracebackType
from typing import Any

from laconic.core.arguments import whole
from laconic.core.errors import LabError, SpecError
from laconic.lab import wiring
from laconic.lab.bare import bare
from laconic.lab.inside.keeper import FIRST
from laconic.lab.keeping import Keeping, Request
from laconic.lab.link import Link
from laconic.lab.profiles import Profile
from laconic.lab.waiting import Start, outputs

PORT = 29500  # of the first run; each has its own
HOSTS = "LACONIC_LAB"  # environment: what a command that starts its own workers reads, see `tasks/place.py`


@dataclass(frozen=True)
class Counted:
    """Bytes that a host's interface has counted, with all headers."""

    sent: int
    received: int


class Lab:
    """`hosts` emulated hosts, from `start`, or the beginning of a `with` block, to `close`.

    `link`: that of every host, or a profile. `offload`: packets of up to 64 kB cross as one, as in a machine
    whose network card cuts them: fast links take fewer processor seconds, and counters miss their headers.
    `seed` draws what gets lost and late, where the kernel has no netem. Raises `LabError` where this machine
    cannot have a lab, and says what is missing.
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
        self.means = "tc"  # of delay and loss: "tc" where there is none or the kernel has netem, or "relay"
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
        """A command on a host, with `env` beside this process's environment. It dies with the lab.

        It reads nothing from the terminal, and Ctrl-C does not reach it: `send_signal` does. Killing it kills
        the command; what that has started lives until the lab is closed.
        """
        environment = {**os.environ, "GLOO_SOCKET_IFNAME": wiring.INTERFACE} | dict(env or {})
        popen = {"stdin": subprocess.DEVNULL, "start_new_session": True} | popen
        return subprocess.Popen(self._kept.enter(host, command), env=environment, **popen)

    def run(
        self,
        command: Sequence[str],
        *,
        env: Mapping[str, str] | None = None,
        timeout_s: float | None = None,
        capture: bool = True,
    ) -> list[str]:
        """A command on every host at once, in the environment that torchrun gives; what each has printed.

        Without `capture` they print where this process does. Raises `LabError` as soon as one fails or
        `timeout_s` is over; the others are then killed.
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
        """A command on host 0 alone, which starts its own workers on all, as `laconic train` does."""
        told = {
            "namespaces": [f"/proc/1/fd/{FIRST + host}" for host in range(self.hosts)],
            "addresses": self.addresses,
            "interface": wiring.INTERFACE,
        }
        environment = {HOSTS: json.dumps(told), **(env or {})}
        return outputs(
            [lambda to: self.start(0, command, env=environment, stdout=to)],
            timeout_s=timeout_s,
            capture=capture,
            alive=self._check_relay,
        )[0]

    def place(self, host: int) -> dict[str, str]:
        """What torchrun tells a process: one on each host."""
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
        """Other links from now on, for these hosts or all. Packets under way keep what they had."""
        if self.means == "tc" and not link.direct and not self._has_netem():
            raise SpecError(
                "this kernel has no netem: links that are to be late or to lose packets later must do so a"
                " little from the start; begin the lab with a delay, such as 100us"
            )
        for host in range(self.hosts) if hosts is None else hosts:
            self.links[host] = link
        self._shape()

    def counters(self) -> list[Counted]:
        """Of each host, since the lab began."""
        asked = ({"in": host, "counts": wiring.INTERFACE} for host in range(self.hosts))
        return [Counted(*found) for found in self._kept.ask(*asked)]

    def close(self) -> None:
        """End all that runs on the hosts, and them."""
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
        return self.hosts  # the namespace of the network itself comes after the hosts'

    def _build(self) -> None:
        self._keeping = Keeping(self.hosts + 1)
        late = not (self.profile.link.direct and self.profile.direct)
        if late and not (self.profile.direct and self._has_netem()):
            self.means = "relay"
        everywhere = [{"in": number, "write": wiring.QUIET, "text": "1"} for number in range(self.hosts + 1)]
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
            raise LabError("the kernel does not bring the interfaces of the lab up")
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
            raise LabError("the relay of packets could not start: what it said is above")

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
            raise LabError("the relay of packets has ended: no host hears another")


def missing() -> str | None:
    """Why there can be no lab on this machine, or None."""
    try:
        with Lab(1, Link("100mbit")):
            return None
    except LabError as error:
        return str(error)

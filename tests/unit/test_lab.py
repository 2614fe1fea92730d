"""What a lab is asked for, and what the kernel is told: nothing here needs rights."""

from __future__ import annotations

import random
import socket
from typing import Any

import pytest
from typer.testing import CliRunner

from laconic.core.errors import LabError, SpecError
from laconic.tools.cli.lab import stages_on_hosts
from laconic.tools.cli.main import app
from laconic.tools.lab import PROFILES, Lab, Link, Profile, keeping, profile, wiring
from laconic.tools.lab.inside import relay
from laconic.tools.lab.inside.relay import Relay
from laconic.tools.tasks.place import Hosts

FRAME = b"\x02\x00\x00\x00\x00\x01" + b"\x02\x00\x00\x00\x00\x02" + bytes(50)  # to host 0, from host 1
TO_ALL = b"\xff" * 6 + FRAME[6:]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--link", "100"], "rate must be a rate such as 1gbit, 100mbit or 500kbit, got '100'"),
        (["--up", "fast"], "up must be a rate"),
        (["--delay", "2"], "delay must be a time such as"),
        (["--delay", "11s"], "delay must be at most 10s, got '11s'"),
        (["--loss", "100%"], "loss must be below 100%, got '100%'"),
        (["--jitter", "1ms"], "jitter must be at most the delay, 0ms, got '1ms'"),
        (["--hosts", "65"], "hosts must be a whole number in 1..64, got 65"),
        (["--hosts", "0"], "hosts must be a whole number in 1..64, got 0"),
        (["--profile", "fibre"], "there is no profile 'fibre'; there are ethernet-1g, ethernet-100m, wifi,"),
        (["--profile", "dsl", "--link", "1gbit"], "--link and --profile both set the rate"),
        (["--timeout", "0"], "--timeout must be a finite number above 0, got 0.0"),
    ],
)
def test_what_is_wrong_is_refused_before_anything_is_made(options, said, monkeypatch):
    monkeypatch.setattr(keeping.subprocess, "Popen", None)
    result = CliRunner().invoke(app, ["lab", *options, "--", "true"])
    assert result.exit_code == 2
    assert said in result.stderr


def test_a_machine_without_iproute2_says_what_to_install(monkeypatch):
    monkeypatch.setattr(keeping.shutil, "which", lambda name, path: None)
    with pytest.raises(LabError, match="there is no `ip` on this machine: install iproute2"), Lab(2):
        pass


def test_a_kernel_that_refuses_is_told_with_the_way_out(monkeypatch, tmp_path):
    refusal = ["echo", '{"refused": "Operation not permitted"}']
    monkeypatch.setattr(keeping, "bare", lambda *_: refusal)
    monkeypatch.setattr(keeping.shutil, "which", lambda name, path: name)
    with pytest.raises(LabError, match=r"\(Operation not permitted\): it takes root, or a kernel"), Lab(2):
        pass


def test_every_profile_can_be_wired() -> None:
    for name in PROFILES:
        found = profile(name)
        assert wiring.up_lines(found.link).startswith("qdisc replace dev eth0 root tbf rate ")
    assert PROFILES["wan-3-regions"].extra_s(0, 5) == PROFILES["wan-3-regions"].extra_s(2, 3) == 0.08
    assert PROFILES["dsl"].link.bits_up == 10e6


def test_each_direction_has_its_rate_and_netem_holds_the_bucket() -> None:
    link = Link("100mbit", up="10mbit", delay="2ms", jitter="500us", loss="0.5%")
    assert "rate 10000000bit" in wiring.up_lines(link)
    late, shaped = wiring.down_lines(3, link, netem=True).splitlines()
    assert late == "qdisc replace dev v3 root handle 1: netem delay 2000us 500us loss 0.5% limit 100000"
    assert shaped.startswith("qdisc replace dev v3 parent 1:1 tbf rate 100000000bit")
    assert "netem" not in wiring.down_lines(3, link, netem=False)


def test_names_of_interfaces_fit() -> None:
    last = wiring.MOST_HOSTS - 1
    assert len(f"v{last}") <= 15
    assert wiring.mac_address(last) == "02:00:00:00:00:40"
    assert f"peer name eth0 address {wiring.mac_address(0)}" in wiring.hub_lines(1, bridged=True)
    assert "br0" not in wiring.hub_lines(2, bridged=False)


class Wire:
    """A port whose far end is here."""

    def __init__(self) -> None:
        self.near, self.far = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.near.setblocking(False)
        self.far.setblocking(False)

    def got(self) -> list[bytes]:
        found = []
        while True:
            try:
                found.append(self.far.recv(2000))
            except BlockingIOError:
                return found


@pytest.fixture
def wires(monkeypatch):
    made = {f"v{host}": Wire() for host in range(3)}
    monkeypatch.setattr(relay, "port", lambda name: made[name].near)
    yield list(made.values())
    for wire in made.values():
        wire.near.close()
        wire.far.close()


def relayed(
    delay: list[list[float]], jitter: float = 0.0, loss: tuple[float, ...] = (0.0, 0.0, 0.0)
) -> Relay:
    shape: dict[str, Any] = {
        "ports": ["v0", "v1", "v2"],
        "delay": delay,
        "jitter": [jitter] * 3,
        "loss": loss,
    }
    return Relay(shape | {"loss": loss}, random.Random(1))


def at(relay_: Relay, monkeypatch: pytest.MonkeyPatch, moment: float) -> float | None:
    monkeypatch.setattr(relay.time, "monotonic", lambda: moment)
    return relay_.deliver()


def test_a_packet_goes_to_its_host_alone_after_the_delay_of_that_pair(wires, monkeypatch):
    made = relayed([[0, 0.25, 0], [0, 0, 0], [0, 0.5, 0]])
    monkeypatch.setattr(relay.time, "monotonic", lambda: 100.0)
    wires[1].far.send(FRAME)
    made.receive(1)
    assert at(made, monkeypatch, 100.2) == pytest.approx(0.05)
    assert [wire.got() for wire in wires] == [[], [], []]
    assert at(made, monkeypatch, 100.25) is None
    assert [wire.got() for wire in wires] == [[FRAME], [], []]


def test_what_is_for_all_goes_to_all_others(wires, monkeypatch):
    made = relayed([[0.0] * 3] * 3)
    wires[1].far.send(TO_ALL)
    made.receive(1)
    made.deliver()
    assert [wire.got() for wire in wires] == [[TO_ALL], [], [TO_ALL]]


def test_packets_of_two_hosts_stay_in_order_whatever_the_jitter(wires, monkeypatch):
    made = relayed([[0.02] * 3] * 3, jitter=0.02)
    frames = [FRAME + bytes([number]) for number in range(100)]
    for number, frame in enumerate(frames):
        monkeypatch.setattr(relay.time, "monotonic", lambda number=number: number * 1e-4)
        wires[1].far.send(frame)
        made.receive(1)
    dues = sorted(due - number * 1e-4 for number, (due, *_) in enumerate(sorted(made.waiting)))
    assert dues[0] >= 0.0 and dues[-1] <= 0.04 + 1e-9
    assert dues[-1] - dues[0] > 0.005, "they are not all equally late"
    at(made, monkeypatch, 1.0)
    assert wires[0].got() == frames


def test_the_share_that_is_lost_is_what_was_asked_for(wires):
    made = relayed([[9.0] * 3] * 3, loss=(0.1, 0.0, 0.0))
    for _ in range(10_000):
        made.post(1, 0, FRAME)
        made.post(1, 2, FRAME)
    to = [where for _, _, where, _ in made.waiting]
    assert to.count(2) == 10_000
    assert abs(to.count(0) - 9_000) < 5 * 30, "five standard deviations"


def test_workers_are_spread_in_blocks(monkeypatch):
    monkeypatch.delenv("LACONIC_LAB", raising=False)
    alone = Hosts.here()
    assert not alone.namespaces
    assert alone.environment(2, 4)["LOCAL_RANK"] == "2"
    assert alone.counted(0, 4) is None
    hosts = Hosts(("10.77.0.1", "10.77.0.2", "10.77.0.3"), "eth0", ("a", "b", "c"))
    assert [hosts.of(rank, 6) for rank in range(6)] == [0, 0, 1, 1, 2, 2]
    assert [hosts.of(rank, 2) for rank in range(2)] == [0, 1]
    assert hosts.environment(3, 6)["LOCAL_WORLD_SIZE"] == "2"


def test_a_later_link_that_takes_netem_is_refused_where_there_is_none(monkeypatch):
    lab = Lab(2, Profile(Link("1gbit")))
    monkeypatch.setattr(lab, "_has_netem", lambda: False)
    with pytest.raises(SpecError, match="start the lab with a delay, such as 100us"):
        lab.reshape(Link("50mbit", delay="5ms"))


def test_a_lab_outside_its_block_is_closed() -> None:
    with pytest.raises(LabError, match="use it inside its `with` block"):
        Lab(2).counters()


@pytest.mark.parametrize(
    ("words", "hosts", "expected"),
    [
        ("laconic train shakespeare --stages 4", 4, "0.0; 0.1; 0.2; 0.3"),
        ("laconic train shakespeare --stages=2 --replicas 2", 4, "0.0; 0.1; 1.0; 1.1"),
        ("laconic train shakespeare --stages 2", 3, "0.0; 0.1; none"),
        ("laconic train shakespeare --stages 4", 2, "0.0, 0.1; 0.2, 0.3; what crosses 2 of 3 bound"),
        ("laconic train shakespeare --stages 2 --replicas 2", 2, "0.0, 0.1; 1.0, 1.1; what crosses 2 of 2 b"),
    ],
)  # fmt: skip
def test_a_lab_says_where_the_stages_of_a_pipeline_are(words: str, hosts: int, expected: str) -> None:
    """As `Hosts` spreads workers: in blocks."""
    told = stages_on_hosts(words.split(), hosts)
    assert told.removeprefix("stages by host (replica.stage): ").startswith(expected)
    assert ("stays on one host" in told) == ("what crosses" in expected)


@pytest.mark.parametrize(
    "words", ["python train.py --stages 2", "laconic train digits", "laconic train x --stages y"]
)
def test_a_lab_says_nothing_of_what_is_no_pipeline(words: str) -> None:
    assert stages_on_hosts(words.split(), 2) == ""

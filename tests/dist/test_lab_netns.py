"""Real namespaces: links are as slow, late and lossy as asked for, and nothing is left behind."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from laconic.core.errors import LabError
from laconic.tools.lab import Lab, Link, bare, missing
from laconic.tools.lab.waiting import CommandFailed, OutOfTime
from tests.dist.commands import ROOT, finish, run, soon, start, wait_for

PYTHON = [sys.executable, "-I", "-S", "-c"]
LACONIC = [str(Path(sys.executable).with_name("laconic"))]
TALK = """
import os, socket, sys, time
count, size = int(sys.argv[1]), int(sys.argv[2])
if os.environ["RANK"] == "0":
    listening = socket.create_server(("10.77.0.1", 5000))
    far, _ = listening.accept()
    far.setsockopt(6, 1, 1)
    for _ in range(count):
        got = 0
        while got < size:
            got += len(far.recv(1 << 16))
        far.sendall(b"x")
else:
    while True:
        try:
            near = socket.create_connection(("host0", 5000))
            break
        except ConnectionRefusedError:
            time.sleep(0.01)
    near.setsockopt(6, 1, 1)
    spent = []
    for _ in range(count):
        began = time.perf_counter()
        near.sendall(bytes(size))
        near.recv(1)
        spent.append(time.perf_counter() - began)
    print(min(spent))
"""
OWNER = """
import signal, sys, types
signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored in the background of a shell
package = types.ModuleType("laconic")
package.__path__ = [sys.argv[1]]
sys.modules["laconic"] = package
from laconic.tools.lab import Lab, Link
print("building", flush=True)
with Lab(2, Link("100mbit", delay="1ms")) as lab:
    lab.run(["sh", "-c", "sleep 1000 & (setsid sleep 1000 &) ; echo running; sleep 1000"], capture=False)
"""


@pytest.fixture(scope="module", autouse=True)
def _a_lab_can_be() -> None:
    if reason := missing():
        pytest.skip(reason)


def talk(lab: Lab, count: int, size: int) -> float:
    """Seconds that a message of `size` bytes and its answer take, at best."""
    return float(lab.run([*PYTHON, TALK, str(count), str(size)], timeout_s=60)[1])


def test_a_link_is_no_faster_than_asked_for_and_its_bytes_are_counted() -> None:
    size = 2_000_000
    with Lab(2, Link("100mbit", up="20mbit")) as lab:
        spent = talk(lab, 1, size)
        sent = lab.counters()[1].sent
        assert lab.counters()[0].received == sent
    assert 0.95 * 8 * size / 20e6 < spent, "the bucket gives a burst away, no more"
    assert 1.04 * size < sent < 1.06 * size, "66 bytes of headers in 1514"


def test_a_link_can_change_while_it_is_used() -> None:
    with Lab(2, Link("100mbit")) as lab:
        talk(lab, 1, 1_000_000)
        lab.reshape(Link("10mbit"))
        assert talk(lab, 1, 1_000_000) > 0.75


@pytest.mark.parametrize("delay_ms", [2, 20])
def test_packets_are_late_by_the_delay(delay_ms: int) -> None:
    with Lab(2, Link(delay=f"{delay_ms}ms")) as lab:
        assert talk(lab, 20, 1) >= 2 * delay_ms / 1e3


def test_all_arrives_over_a_link_that_loses() -> None:
    with Lab(2, Link("100mbit", delay="1ms", jitter="1ms", loss="1%"), seed=3) as lab:
        talk(lab, 1, 1_000_000)
        one, other = lab.counters()
    assert one.received < other.sent, "some were lost on the way, and sent again"


def test_hosts_see_one_interface_and_each_other_by_name() -> None:
    look = "hostname; ls /sys/class/net; cat /etc/hosts; cat /proc/1/comm"
    with Lab(3) as lab:
        told = [output.split() for output in lab.run(["sh", "-c", look])]
    assert [words[0] for words in told] == ["host0", "host1", "host2"]
    for words in told:
        assert words[1:3] == ["eth0", "lo"]
        assert "10.77.0.3" in words


def test_one_that_fails_ends_the_others() -> None:
    with Lab(2) as lab:
        script = "test $RANK = 0 && exec sleep 100; test $RANK = 1 && exit 3"
        with pytest.raises(CommandFailed, match="host 1: the command ended with exit code 3") as failure:
            lab.run(["sh", "-c", script])
        assert failure.value.code == 3
        with pytest.raises(CommandFailed, match="host 0: the command was killed by SIGKILL"):
            lab.run(["sh", "-c", "test $RANK = 1 && exec sleep 100; kill -9 $$"])


def test_one_that_never_ends_is_ended() -> None:
    with Lab(2) as lab, pytest.raises(OutOfTime, match=r"not done within 0\.5 s"):
        lab.run(["sleep", "1000"], timeout_s=0.5)


def test_without_the_rights_of_root_a_user_namespace_serves() -> None:
    if shutil.which("setpriv") is None:
        pytest.skip("no setpriv to give rights up with")
    owner = OWNER.replace(
        "sleep 1000 & (setsid sleep 1000 &) ; echo running; sleep 1000", "id -u; ip -br addr"
    )
    command = ["setpriv", "--bounding-set=-sys_admin", "--inh-caps=-sys_admin"]
    done = run(*command, *PYTHON, owner, bare.PACKAGE)
    if "no network namespace can be made here" in done.errors:
        pytest.skip("this kernel lets no user have namespaces")
    assert done.code == 0, done.errors
    assert "10.77.0.2/24" in done.output


def marked(mark: str) -> list[str]:
    """Processes that an owner of this mark has left, by what they run."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if mark.encode() in (folder / "environ").read_bytes():
                found.append((folder / "cmdline").read_bytes().replace(b"\0", b" ")[:200].decode())
        except (FileNotFoundError, ProcessLookupError, PermissionError):
            continue
    return found


def own_network() -> set[str]:
    """What of a lab might be seen from outside: interfaces, names of namespaces, files."""
    named = Path("/run/netns")
    return {
        *(path.name for path in Path("/sys/class/net").iterdir()),
        *((path.name for path in named.iterdir()) if named.exists() else ()),
    }


def abort(number: signal.Signals, after: str, delay_s: float) -> None:
    """Start a lab, abort its owner, and look for what is left."""
    before, mark = own_network(), uuid.uuid4().hex
    owner = start(*PYTHON, OWNER, bare.PACKAGE, env={"MARK": mark}, stderr=subprocess.DEVNULL)
    assert owner.stdout is not None
    while owner.stdout.readline() != f"{after}\n":
        assert owner.poll() is None
    time.sleep(delay_s)
    assert marked(mark)
    owner.send_signal(number)
    finish(owner)
    assert soon(lambda: not marked(mark)), marked(mark)
    assert own_network() == before


def test_an_interrupt_reaches_a_command_at_any_time() -> None:
    """Even before it has begun, and without a traceback of the program that starts it."""
    with Lab(1) as lab:
        for delay_ms in range(0, 120, 5):
            command = lab.start(0, ["sleep", "100"], stderr=subprocess.PIPE)
            time.sleep(delay_ms / 1000)
            command.send_signal(signal.SIGINT)
            said = command.communicate(timeout=30)[1]
            assert (delay_ms, command.returncode, said) == (delay_ms, -signal.SIGINT, b"")


ABORTS = [
    (number, after, delay_s)
    for delay_s in (0.0, 0.05, 0.1, 0.2, 0.4)
    for number in (signal.SIGINT, signal.SIGKILL)
    for after in ("building", "running")
]


@pytest.mark.parametrize(("number", "after", "delay_s"), ABORTS[4:8])
def test_an_abort_leaves_nothing(number: signal.Signals, after: str, delay_s: float) -> None:
    abort(number, after, delay_s)


@pytest.mark.soak
def test_twenty_aborts_in_a_row_leave_nothing() -> None:
    assert len(ABORTS) == 20
    for case in ABORTS:
        abort(*case)


@pytest.fixture
def script(tmp_path: Path) -> Iterator[Callable[[Lab, int, tuple[str, ...]], None]]:
    """Train by each method on a clean link and again on a bad one, and compare all bits."""
    go = tmp_path / "bad"

    def both(lab: Lab, steps: int, specs: tuple[str, ...]) -> None:
        program = [sys.executable, str(ROOT / "tests" / "dist" / "lossy_rank.py"), str(tmp_path)]
        jobs = [
            lab.start(
                host,
                [*program, str(steps), *specs],
                env=lab.place(host) | {"PYTHONPATH": str(ROOT)},
                stdout=subprocess.PIPE,
                text=True,
            )
            for host in range(lab.hosts)
        ]
        try:
            wait_for(lambda: len(list(tmp_path.glob("clean*"))) == lab.hosts, *jobs)
            lab.reshape(Link("100mbit", delay="20ms", jitter="20ms", loss="1%"))
            go.touch()
            told = [json.loads(job.communicate(timeout=300)[0]) for job in jobs]
        finally:
            for job in jobs:
                job.kill()
                job.wait()
        for spec in specs:
            assert len({rank["clean"][spec] for rank in told} | {rank["bad"][spec] for rank in told}) == 1

    yield both


def test_loss_and_jitter_change_no_bit(script: Callable[..., None]) -> None:
    with Lab(2, Link("100mbit", delay="100us")) as lab:
        script(lab, 3, ("dgc(density=0.05)",))


@pytest.mark.soak
def test_loss_and_jitter_change_no_bit_of_any_kind_of_method(script: Callable[..., None]) -> None:
    with Lab(4, Link("100mbit", delay="100us")) as lab:
        script(lab, 20, ("dense()", "dgc(density=0.05)", "qsgd(levels=7)", "powersgd(rank=2)", "cgx(bits=4)"))


def test_train_spreads_its_workers_over_hosts_and_tells_their_bytes(tmp_path: Path) -> None:
    command = [*LACONIC, "train", "digits", "--workers", "3", "--steps", "2", "--with", "dense()"]
    with Lab(2, Link("1gbit")) as lab:
        said = lab.run_once([*command, "--out", str(tmp_path), "--name", "run"], timeout_s=300)
        counted = [each.sent for each in lab.counters()]
    events = [json.loads(line) for line in (tmp_path / "run" / "events.jsonl").read_text().splitlines()]
    told = {event["rank"]: event["sent"] for event in events if event["kind"] == "interface"}
    assert told.keys() == {0, 2}, "one of each host's workers"
    steps = [event for event in events if event["kind"] == "step"]
    assert told[2] > sum(event["payload_sent"] for event in steps if event["rank"] == 2)
    assert told[0] <= counted[0] and told[2] <= counted[1]
    assert "Bytes that a host's interface sent" in said


def test_a_killed_keeper_is_an_error_and_no_hang() -> None:
    with Lab(2) as lab:
        os.kill(lab._kept.process, signal.SIGKILL)
        with pytest.raises(LabError, match="the lab has ended"):
            lab.counters()

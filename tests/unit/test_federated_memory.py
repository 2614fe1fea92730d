"""A client's file: it outlives its process, and a kill, a full disk or a changed bit does no harm unseen."""

from __future__ import annotations

import os
import random
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from tests.unit.shared import refuses

from laconic.core.errors import StateError
from laconic.federated.client import Client
from laconic.federated.memory import DAY_S, InFile
from laconic.federated.rounds import deliver
from laconic.federated.server import Server

from .federated_world import equal, model, train

SPEC = "stc(density=0.05)"


def test_a_file_outlives_its_process(tmp_path: Path) -> None:
    first = model()
    one, other = Server(first, SPEC, SPEC), Server(first, SPEC, SPEC)
    held = Client(first)
    for number in range(4):
        restarted = Client(first, InFile(tmp_path, "run 1", "a/b"))
        replies = []
        for server, client in ((one, restarted), (other, held)):
            replies.append(client.reply(train(0, deliver(server, client, "a"), number)[0]))
            server.publish(server.receive("a", replies[-1]))
        assert torch.equal(*replies)
    assert [path.name for path in tmp_path.rglob("*") if path.is_file()] == ["a_b-82badf67.client"]


def test_a_full_disk_loses_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first, memory = model(), InFile(tmp_path, "run", "a")
    server, client = Server(first, SPEC), Client(first, memory)
    server.receive("a", client.reply(train(0, deliver(server, client, "a"), 1)[0]))
    kept = memory.path.read_bytes()

    def full(_: int) -> None:
        raise OSError(28, "No space left on device")

    held = deliver(server, client, "a")
    with monkeypatch.context() as patch:
        patch.setattr("os.fsync", full)
        with pytest.raises(StateError, match=r"No space left on device; make .* free space"):
            client.reply(train(0, held, 2)[0])
    assert memory.path.read_bytes() == kept and len(list(tmp_path.rglob("*.client*"))) == 1
    again = Client(first, memory)
    assert equal(deliver(server, again, "a"), server.public)
    server.receive("a", again.reply(train(0, held, 2)[0]))


def test_every_changed_bit_of_a_file_is_noticed(tmp_path: Path) -> None:
    """torch.load takes most of them without a word, and a residual would send nonsense."""
    first, memory, rng = model(), InFile(tmp_path, "run", "a"), random.Random(0)
    server, client = Server(first, SPEC), Client(first, memory)
    client.reply(train(0, deliver(server, client, "a"), 1)[0])
    good = memory.path.read_bytes()
    for _ in range(300):
        bad = bytearray(good)
        bad[rng.randrange(len(bad))] ^= 1 << rng.randrange(8)
        memory.path.write_bytes(bad)
        refuses(StateError, r"is damaged: .*; delete .*a\.client", memory.load)
    for length in range(0, len(good), 41):
        memory.path.write_bytes(good[:length])
        refuses(StateError, "is damaged", Client, first, memory)


def test_another_models_file_says_what_to_do(tmp_path: Path) -> None:
    memory = InFile(tmp_path, "run", "a")
    for state in ({"fingerprint": "0"}, {"something": 1}):
        memory.save(state)
        with pytest.raises(StateError, match=r"another model: delete .*a\.client"):
            Client(model(), memory)


def test_a_process_killed_while_it_saves_leaves_a_whole_state(tmp_path: Path) -> None:
    """15 processes, each killed at another moment of its saving."""
    script = Path(__file__).with_name("federated_kills.py")
    done = subprocess.run(
        [sys.executable, script, tmp_path], capture_output=True, text=True, timeout=120, check=True
    )
    assert int(done.stdout) >= 15, "some of them have saved something"


def test_what_a_killed_process_left_half_written_is_removed(tmp_path: Path) -> None:
    memory = InFile(tmp_path, "run", "a")
    memory.save({"version": 1})
    old, new = (memory.path.with_suffix(f".client.{number}") for number in (1, 2))
    for path, age_s in ((old, 2 * DAY_S), (new, 60.0), (memory.path, 2 * DAY_S)):
        path.touch()
        os.utime(path, (time.time() - age_s,) * 2)
    assert InFile(tmp_path, "run", "b").load() == {}
    assert sorted(path.name for path in memory.path.parent.iterdir()) == ["a.client", "a.client.2"]


def test_a_file_that_another_process_removes_is_no_error(tmp_path: Path) -> None:
    """Several clients of one machine tidy up the same folder."""
    old = tmp_path / "old run"
    old.mkdir()
    (old / "gone.client").symlink_to(tmp_path / "nowhere")  # it is listed, and not there when it is asked
    InFile(tmp_path, "run", "a").save({"version": 1})
    assert InFile(tmp_path, "run", "a").load() == {"version": 1}


def test_clients_with_like_names_have_files_of_their_own(tmp_path: Path) -> None:
    one, other = InFile(tmp_path, "run", "a/b"), InFile(tmp_path, "run", "a_b")
    one.save({"version": 1})
    assert one.path != other.path and other.load() == {}

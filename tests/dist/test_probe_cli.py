"""`laconic probe` starts workers of its own where no launcher has, and its file serves `laconic plan`."""

from __future__ import annotations

import os
import pty
import re
import subprocess
import sys
import threading
import time
from itertools import pairwise

import pytest

from laconic.plan.probe import Probe


def laconic(*words, cwd):
    return subprocess.run(
        [sys.executable, "-m", "laconic.cli.main", *words],
        cwd=cwd,
        capture_output=True,
        text=True,
        timeout=240,
    )


def test_two_workers_probe_and_plan(tmp_path):
    probed = laconic("probe", "digits", "--workers", "2", "--with", "fp16()", cwd=tmp_path)
    assert probed.returncode == 0, probed.stderr
    found = Probe.load(tmp_path / "probe.json")
    assert found.size == 2
    assert found.pairs[0].bytes_a_second > 1e5
    assert [method.spec for method in found.methods] == ["dense()", "fp16()"]
    assert 0 < found.work.backward_s < 60
    assert laconic("plan", "--probe", "probe.json", "--with", "fp16()", cwd=tmp_path).returncode == 0


def test_on_a_terminal_a_probe_says_every_three_seconds_what_it_does(tmp_path):
    ours, theirs = pty.openpty()
    heard: list[tuple[float, str]] = []

    def listen() -> None:
        while True:
            try:
                heard.append((time.monotonic(), os.read(ours, 4096).decode()))
            except OSError:  # the command has ended
                return

    listener = threading.Thread(target=listen)
    listener.start()
    command = [sys.executable, "-m", "laconic.cli.main", "probe", "digits", "--with", "fp16()"]
    done = subprocess.run(command, cwd=tmp_path, stdout=theirs, stderr=theirs, timeout=240)
    os.close(theirs)
    listener.join()
    os.close(ours)
    said = re.sub(r"\x1b\[[0-9;]*m", "", "".join(text for _, text in heard))
    assert done.returncode == 0, said
    assert "starting 2 workers" in said and "links, " in said  # a training step may end between two looks
    assert "2 of 2 known: fp16()" in said and said.index("2 of 2") < said.index("all at once  ")
    waits = [later - sooner for (sooner, _), (later, _) in pairwise(heard)]
    assert max(waits[1:]) < 5.0, "three seconds, and some for a busy machine; first, imports hold the GIL"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["digit"], "did you mean digits"),
        (["digits", "--workers", "1"], "--workers must be"),
        (["digits", "--with", "topkk()"], "topk"),
    ],
)
def test_wrong_probes_are_refused(tmp_path, words, message):
    said = laconic("probe", *words, cwd=tmp_path)
    assert said.returncode == 2
    assert message in " ".join(said.stderr.split())

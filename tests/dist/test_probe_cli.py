"""`laconic probe` starts workers of its own where no launcher has, and its file serves `laconic plan`."""

from __future__ import annotations

import os
import pty
import re
import threading
import time
from itertools import pairwise

import pytest
from typer.testing import CliRunner

from laconic.tools.cli.main import app
from laconic.tools.plan.probe import Probe
from tests.dist.commands import LACONIC, finish, laconic, start


@pytest.mark.nightly
def test_two_workers_probe_and_plan_and_a_terminal_is_told_every_three_seconds(tmp_path):
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
    probing = start(
        *LACONIC, "probe", "digits", "--with", "fp16()", cwd=tmp_path, stdout=theirs, stderr=theirs
    )
    os.close(theirs)
    code = finish(probing).code
    listener.join()
    os.close(ours)
    said = re.sub(r"\x1b\[[0-9;]*m", "", "".join(text for _, text in heard))
    assert code == 0, said
    assert "starting 2 workers" in said and "links, " in said  # a training step may end between two looks
    assert "2 of 2 done: fp16()" in said and said.index("2 of 2") < said.index("all at once  ")
    waits = [later - sooner for (sooner, _), (later, _) in pairwise(heard)]
    assert max(waits[1:]) < 15.0, "three seconds, and more on a busy machine; first, imports hold the GIL"

    found = Probe.load(tmp_path / "probe.json")
    assert found.size == 2
    assert found.pairs[0].bytes_a_second > 1e5
    assert [method.spec for method in found.methods] == ["dense()", "fp16()"]
    assert 0 < found.work.backward_s < 60
    assert laconic("plan", "--probe", "probe.json", "--with", "fp16()", cwd=tmp_path).code == 0


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["digit"], "did you mean digits"),
        (["digits", "--workers", "1"], "--workers must be"),
        (["digits", "--with", "topkk()"], "topk"),
    ],
)
def test_wrong_probes_are_refused(words, message):
    said = CliRunner().invoke(app, ["probe", *words])
    assert said.exit_code == 2
    assert message in " ".join(said.stderr.split())

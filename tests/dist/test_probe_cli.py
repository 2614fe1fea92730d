"""`laconic probe` starts workers of its own where no launcher has, and its file serves `laconic plan`."""

from __future__ import annotations

import subprocess
import sys

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

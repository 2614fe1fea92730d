"""Payload plus the stated model of headers equals what the network interface counted, within 3 %."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def test_the_model_of_the_wire_equals_the_counters(tmp_path):
    out = tmp_path / "wire.json"
    command = [sys.executable, "-m", "benchmarks.wire", "--quick", "--out", str(out)]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, cwd=ROOT, **pipes) as process:
        told, complaint = process.communicate(timeout=300)
    assert process.returncode == 0, complaint
    if told.startswith("skipped"):
        pytest.skip(told.strip())
    rows = json.loads(out.read_text())["rows"]
    assert {row["what"] for row in rows} >= {"all_reduce", "all_gather"}
    for row in rows:
        assert row["payload_sent"] >= 1_000_000, row
        assert abs(row["network_sent"] / row["counted_sent"] - 1) < 0.03, row
        assert abs(row["network_received"] / row["counted_received"] - 1) < 0.03, row

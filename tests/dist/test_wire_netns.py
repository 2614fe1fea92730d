"""Payload plus the stated model of headers equals what the network interface counted, within 3 %."""

from __future__ import annotations

import json
import sys

import pytest

from tests.dist.commands import ROOT, run


@pytest.mark.nightly
def test_the_model_of_the_wire_equals_the_counters(tmp_path):
    out = tmp_path / "wire.json"
    code, told, complaint = run(sys.executable, "-m", "benchmarks.wire", "--quick", "--out", out, cwd=ROOT)
    assert code == 0, complaint
    if told.startswith("skipped"):
        pytest.skip(told.strip())
    rows = json.loads(out.read_text())["rows"]
    assert {row["what"] for row in rows} >= {"all_reduce", "all_gather"}
    for row in rows:
        assert row["payload_sent"] >= 1_000_000, row
        assert abs(row["network_sent"] / row["counted_sent"] - 1) < 0.03, row
        assert abs(row["network_received"] / row["counted_received"] - 1) < 0.03, row

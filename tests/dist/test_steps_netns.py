"""The benchmark of steps times each contender on the same hosts, and its forecasts are of what it timed."""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.dist.commands import ROOT, run

DGC, PLAIN, ALONE = "dgc(density=0.001)", "plain torch DGC", "no communication"


def ran(*arguments: object) -> str:
    """Run a benchmark and return its output."""
    code, output, errors = run(sys.executable, "-m", *arguments, cwd=ROOT)
    assert code == 0, errors
    return output


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out: Path = tmp_path_factory.mktemp("steps") / "steps.json"
    only = [word for name in (DGC, PLAIN) for word in ("--only", name)]
    told = ran("benchmarks.steps", "--quick", "--link", "200mbit", *only, "--out", out)
    if told.startswith("skipped"):
        pytest.skip(told.strip())
    return out


@pytest.mark.nightly
def test_contenders_are_timed_and_their_bytes_counted(file: Path) -> None:
    (workload,) = json.loads(file.read_text())["workloads"]
    rows: dict[str, dict[str, Any]] = {row["contender"]: row for row in workload["rows"]}
    assert rows.keys() == {ALONE, DGC, PLAIN}
    assert all(row["step_s"] > 0 and row["processor_s"] > 0 for row in rows.values())
    assert rows[ALONE]["efficiency"] == 1
    assert rows[ALONE]["sent"] < 1000
    parameters = sum(math.prod(shape) for _, shape in workload["work"]["layout"])
    for name in (DGC, PLAIN):  # a thousandth and its positions, and vectors whole: far less than 4 bytes each
        assert 4 * parameters / 1000 < rows[name]["sent"] < 4 * parameters / 50, name
    assert rows[DGC]["payload_sent"] < rows[DGC]["sent"]


@pytest.mark.nightly
def test_links_and_a_step_are_probed_on_the_same_hosts(file: Path) -> None:
    (workload,) = json.loads(file.read_text())["workloads"]
    rate = workload["networks"]["200mbit"]["bytes_a_second"]
    assert 0.1 * 25e6 < rate < 1.1 * 25e6  # a busy machine makes a link slower, never faster
    assert sum(workload["work"]["buckets"]) == 4 * sum(
        math.prod(shape) for _, shape in workload["work"]["layout"]
    )


@pytest.mark.nightly
def test_forecasts_stand_beside_what_was_measured(file: Path, tmp_path: Path) -> None:
    out = tmp_path / "predictions.json"
    ran("benchmarks.predictions", "--quick", "--of", file, "--out", out)
    (row,) = json.loads(out.read_text())["rows"]
    assert (row["workload"], row["contender"]) == ("gpt", DGC)
    assert row["forecast_s"] > 0
    assert row["error"] == pytest.approx(row["forecast_s"] / row["measured_s"] - 1)

"""The page of pipelines compares within a link and a number of stages, and shows only what was measured."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from benchmarks.common.results import Results
from benchmarks.pipeline import __main__ as pipeline
from benchmarks.pipeline import page as pipelines
from benchmarks.pipeline.workloads import AC48, CROSSINGS, DENSE, OURS, WORKLOADS

MACHINE = {"processor": "any", "cores": 2}


def speed(case: pipeline.Case, step_s: float) -> dict[str, Any]:
    hosts = case.hosts
    round_ = {name: [0.01] * hosts for name in ("forward_s", "backward_s", "encode_s", "decode_s")}
    round_ |= {"up": [1e6] * (hosts - 1) + [0], "down": [0] + [2e6] * (hosts - 1), "sent": [3e6] * hosts}
    return pipeline.summary(case, [round_ | {"step_s": step_s}] * 3) | {"machine": MACHINE}


@pytest.fixture
def stored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Results:
    monkeypatch.setattr(pipeline, "RUNS", Results(tmp_path / "results.jsonl"))
    return pipeline.RUNS


def keep(stored: Results, case: pipeline.Case, step_s: float) -> None:
    stored.put(case.key, speed(case, step_s))


def test_every_way_is_compared_with_dense_on_the_same_link(stored: Results) -> None:
    for stages, link, dense_s, coded_s in ((2, "100mbit", 2.0, 0.5), (4, "500mbit", 1.2, 0.8)):
        keep(stored, pipeline.Case("fast", stages, link, DENSE), dense_s)
        keep(stored, pipeline.Case("fast", stages, link, AC48), coded_s)
    text = pipelines.page()
    assert "| AC-SGD 4/8 | 6.0 | 0.50 (4.0 x) | 0.80 (1.5 x) |" in text
    assert "| dense | 6.0 | 2.00 | 1.20 |" in text
    assert "## With replicas" not in text and "## Loss" not in text
    assert "median of 3 rounds" in text


def test_what_compression_adds_is_against_float32_sent_the_same_way(stored: Results) -> None:
    for spec, step_s in ((DENSE, 2.0), (OURS, 1.2), (AC48, 0.4)):
        keep(stored, pipeline.Case("fast", 2, "100mbit", spec), step_s)
        keep(stored, pipeline.Case("computed", 2, "100mbit", spec), 2 * step_s)
    text = pipelines.page()
    assert "| dense | 6.0 | 2.00 |" in text
    assert "| dense, receives first | 6.0 | 1.20 (1.7 x) |" in text
    assert "| AC-SGD 4/8 | 6.0 | 0.40 (5.0 x, 3.0 x) |" in text
    assert "| 100 Mbit/s | AC-SGD 4/8 | 0.80 (5.0 x, 3.0 x) |" in text
    assert "| 100 Mbit/s | dense, receives first | 2.40 (1.7 x) |" in text


def test_replicas_are_compared_with_dense_stages_and_dense_replicas(stored: Results) -> None:
    keep(stored, pipeline.Case("fast", 2, "100mbit", DENSE, 2), 3.0)
    keep(stored, pipeline.Case("fast", 2, "100mbit", AC48, 2, "cgx(bits=4)"), 0.6)
    assert "| AC-SGD 4/8 | cgx | 0.60 (5.0 x) |" in pipelines.page()
    trained(stored, 0, 1.0, 6.0)
    assert pipelines.picture().count("<polyline") == 2, "a line for each way"


def trained(stored: Results, seed: int, loss: float, seconds: float) -> None:
    row = {
        "spec": DENSE, "seed": seed, "steps": [32, 64], "seconds": [seconds / 2, seconds],
        "loss": [2.0, loss], "train_loss": loss, "test_loss": 2 * loss, "machine": MACHINE,
        "settings": {"model": "gpt", "examples": 512, "batch": 16, "stages": 2, "link": "10mbit"},
    }  # fmt: skip
    stored.put(f"loss/{seed}", row)


def test_losses_are_means_over_seeds_and_seconds_medians(
    stored: Results, monkeypatch: pytest.MonkeyPatch
) -> None:
    for seed, (loss, seconds) in enumerate(((1.0, 6.0), (1.2, 6.0), (1.4, 60.0))):
        trained(stored, seed, loss, seconds)
    text = pipelines.page()
    assert "| dense | 1.2000 ± 0.2000 | 2.4000 ± 0.4000 | 6 | 3 |" in text
    assert "mean over seeds" in text and "median over seeds" in text
    drawn: list[list[Any]] = []
    monkeypatch.setattr(pipelines, "panel", lambda curves, *_, **__: drawn.append(curves) or "")
    pipelines.picture()
    (by_step,), (by_second,) = drawn
    assert [*by_step.y] == [*by_second.y] == pytest.approx([2.0, 1.2])
    assert [*by_second.x] == [3.0, 6.0]


def test_cases_have_keys_of_their_own_and_one_of_fewer_rounds_is_measured_again() -> None:
    case = pipeline.Case("fast", 2, "100mbit", DENSE)
    assert not pipeline.done(None, 1)
    assert pipeline.done(speed(case, 1.0), 3) and not pipeline.done(speed(case, 1.0), 4)
    cases = pipeline.cases(quick=False)
    assert len({case.key for case in cases}) == len(cases) == len(set(cases))
    assert {case.spec for case in cases} == set(CROSSINGS.values())
    for workload in WORKLOADS.values():
        size = sum(part.numel() for part in workload.recipe.build().parameters())
        assert size == pytest.approx(10.8e6, rel=0.01)
        assert workload.batch % workload.micro_batches == 0

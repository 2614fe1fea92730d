"""Each method at its own learning rate: the search ends where both neighbours are worse, and is resumed."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
from benchmarks.common.rates import next_rate
from benchmarks.common.results import Results, Row
from benchmarks.own_rates import __main__ as own_rates
from benchmarks.own_rates import curves, densities, page
from benchmarks.own_rates.__main__ import DIVERGED, Run, due, own_rate
from benchmarks.own_rates.families import FAMILIES, LONG_GPT, SEEDS

SGD = FAMILIES[0]


@pytest.fixture
def stored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Results:
    monkeypatch.setattr(own_rates, "RUNS", Results(tmp_path / "results.jsonl"))
    return own_rates.RUNS


def row_of(run: Run, best: float = 0.2) -> Row:
    """A training that is best at one rate, and diverges at 16 times as much."""
    if run.rate >= 16 * best:
        return {"lr": run.rate, DIVERGED: "too fast"}
    loss = 1 + abs(math.log2(run.rate / best)) / 10
    return {"lr": run.rate, "test_loss": loss, "accuracy": 0.5 - loss / 10, "sent_mb": 1.0}


def train(only: str | None = None, most: int = 10_000, best: float = 0.2) -> list[Run]:
    done: list[Run] = []
    for run in due(only):
        if len(done) == most:
            break
        own_rates.RUNS.put(run.key, row_of(run, best))
        done.append(run)
    return done


def test_the_search_goes_on_while_the_best_is_at_an_edge() -> None:
    assert next_rate({}, 0.05) == 0.05
    assert next_rate({0.05: 1.0}, 0.05) == 0.1
    assert next_rate({0.05: 1.0, 0.1: 0.9}, 0.05) == 0.2
    assert next_rate({0.05: 1.0, 0.1: 0.9, 0.2: math.inf}, 0.05) is None
    assert next_rate({0.05: 1.0, 0.1: 1.1}, 0.05) == 0.025
    assert next_rate({0.05: math.inf}, 0.05) == 0.025
    assert next_rate({0.05: math.inf, 0.025: 1.0}, 0.05) == 0.0125


def test_each_method_finds_its_rate_and_trains_the_other_seeds_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for best in (0.05, 0.2, 0.0125):
        monkeypatch.setattr(own_rates, "RUNS", Results(tmp_path / f"{best}.jsonl"))
        train("natural()", best=best)
        assert own_rate(SGD, "natural()") == best
        assert all(Run(SGD, "natural()", best, seed).read() is not None for seed in SEEDS)
        assert Run(SGD, "natural()", 4 * best, SEEDS[1]).read() is None


def test_one_method_brings_its_baseline_and_goes_on_where_it_stopped(stored: Results) -> None:
    first = train("natural()", most=3)
    rest = train("natural()")
    assert len(first) == 3 and not set(first) & set(rest)
    assert {run.spec for run in (*first, *rest)} == {"dense()", "natural()"}
    assert train("natural()") == []
    (lacking,) = page.incomplete(SGD)[:1]
    assert "`cgx(bits=4)` (0 of 3)" in lacking.replace("\n", " ") and "natural" not in lacking


def test_a_method_is_compared_at_its_own_rate_and_at_denses(stored: Results) -> None:
    assert not page.done()
    for seed, rate in ((0, 0.025), (0, 0.05), (0, 0.1), (1, 0.05), (2, 0.05)):
        stored.put((run := Run(SGD, "dense()", rate, seed)).key, row_of(run, 0.05))
    train("natural()", best=0.2)
    assert page.done()
    text = page.page()
    assert SGD.name in text
    (told,) = [line for line in text.splitlines() if line.startswith("| `natural()`")]
    dense, own = row_of(Run(SGD, "dense()", 0.05, 0), 0.05), row_of(Run(SGD, "natural()", 0.2, 0), 0.2)
    shared = row_of(Run(SGD, "natural()", 0.05, 0), 0.2)
    assert f"{100 * (dense['accuracy'] - own['accuracy']):.2f} ± 0.00" in told
    assert f"{100 * (dense['accuracy'] - shared['accuracy']):.2f}" in told
    assert "| 0.2 |" in told


def test_densities_are_drawn_against_bytes_once_a_method_has_two(stored: Results) -> None:
    train("topk(density=0.01)")
    assert densities.pictures(Path()) == {} and not [*densities.section()]
    train("topk(density=0.001)")
    (_, draw) = densities.pictures(Path()).popitem()
    assert densities.drawn() == ["topk"] and "topk" in draw()
    assert [round(mb, 3) for mb, _, _ in densities.points("topk")] == [1.0, 1.0]
    section = "\n".join(densities.section())
    assert densities.PICTURE in section and section in page.page()


def test_losses_are_drawn_by_steps_bytes_and_seconds(
    stored: Results, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert curves.pictures(Path()) == {} and not [*curves.section()]
    train("bf16()")
    for spec in ("dense()", "bf16()"):
        rate = own_rate(LONG_GPT, spec)
        assert rate is not None
        run = Run(LONG_GPT, spec, rate, SEEDS[0])
        stored.put(run.key, row_of(run) | {"curve": [[125, 4.0], [250, 3.0]], "sent_mb": 500.0})
    monkeypatch.setattr(curves, "forecasts", lambda: {})
    assert [*curves.pictures(Path())] == [Path(curves.BY_BYTES)]
    seconds = {"dense()": {"100mbit": 0.4, "1gbit": 0.1}, "bf16()": {"100mbit": 0.2, "1gbit": 0.1}}
    monkeypatch.setattr(curves, "forecasts", lambda: seconds)
    by_bytes, by_time = (draw() for draw in curves.pictures(Path()).values())
    assert "bf16()" in by_bytes and "1gbit" in by_time
    row = curves.trained()["bf16()"]
    assert [*curves.curve(row, row["sent_mb"] / LONG_GPT.steps).x] == [12.5, 25.0]
    section = "\n".join(curves.section())
    assert curves.BY_TIME in section and section in page.page()


def test_rates_may_come_from_shorter_runs_and_some_methods_have_one_seed(stored: Results) -> None:
    (family,) = (each for each in FAMILIES if each.folder == "shakespeare-5000")
    done = [run for run in train("bf16()", best=family.usual) if run.family is family]
    short = [run for run in done if run.searches]
    assert {run.steps for run in short} == {family.search_steps} and len({run.rate for run in short}) == 3
    full = [(run.spec, run.rate, run.seed, run.steps) for run in done if not run.searches]
    wanted = [("dense()", seed) for seed in SEEDS] + [("bf16()", SEEDS[0])]
    assert sorted(full) == sorted((spec, family.usual, seed, family.steps) for spec, seed in wanted)
    assert train("bf16()", best=family.usual) == []

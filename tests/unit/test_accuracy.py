"""The accuracy benchmark: what it trains next, what it says of the stored rows."""

from __future__ import annotations

import json
import math
from pathlib import Path
from xml.etree import ElementTree

import pytest
from benchmarks.accuracy import __main__ as accuracy
from benchmarks.accuracy import page as accuracy_page
from benchmarks.accuracy import trials
from benchmarks.accuracy.contenders import (
    CONTENDERS,
    MODELS,
    REDUCTIONS,
    SEEDS,
    SETS,
    SKEW,
    STRATEGIES,
    Contender,
)
from benchmarks.accuracy.scatter import scatter
from benchmarks.accuracy.standings import standings
from benchmarks.accuracy.trials import Trial, keep, kept, plan_of
from benchmarks.common.results import Results
from rich.console import Console
from tests.unit.shared import for_each

from laconic.core.errors import SpecError
from laconic.exchange.method import lift
from laconic.tools.report.ledger import slug
from laconic.tools.tasks.launcher import WorkerFailed

BY_SPEC = {contender.spec: contender for contender in CONTENDERS}


@pytest.fixture(autouse=True)
def empty(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setattr(trials, "RUNS", Results(tmp_path / "results.jsonl"))
    monkeypatch.setattr(trials, "SCRATCH", tmp_path / "scratch")
    return tmp_path


def found(accuracy: float | None, **others: object) -> dict[str, object]:
    figures = {"test_loss": 1.0, "wire_mb": 0.1, "smaller": 10.0, "zeros": 0.0, "diverged_at": None}
    return {"accuracy": accuracy} | figures | others


def place(spec: str, accuracies: list[float | None], task: str = "cifar10", **others: object) -> None:
    for seed, value in enumerate(accuracies):
        keep(Trial(BY_SPEC[spec], task, seed), found(value, **others))


def test_every_contender_is_a_method_and_has_its_dense_baseline() -> None:
    assert len(BY_SPEC) == len(CONTENDERS) > 20
    for contender in CONTENDERS:
        assert contender.against in BY_SPEC
        of_baseline, own = lift(contender.against).rules, lift(contender.spec).rules
        wants = {rule.wants for rule in of_baseline}
        assert not wants or wants == {rule.wants for rule in own}  # the same optimiser
    for contender in CONTENDERS:
        if contender.points is not None:
            assert all(type(route.feedback).__name__ == "NoFeedback" for route in lift(contender.spec).routes)


def test_keys_do_not_collide() -> None:
    assert len({slug(spec) for spec in BY_SPEC}) == len(BY_SPEC)
    every = [trial for contenders in SETS.values() for trial in trials.trials(contenders)]
    by_key = {trial.key: trial for trial in every}
    assert all(by_key[trial.key] == trial for trial in every), "one key, one training"
    shared = [trial for trial in every if trial.contender.text == "dense()" and trial.contender.workers == 8]
    assert len(every) - len(by_key) == len(shared) / 3  # reductions and strategies share that on like shards


def test_strategies_come_on_like_and_on_skewed_shards(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trials, "prepare", lambda task, folder, scratch: None)
    alike, skewed = ([each for each in STRATEGIES if each.skew == skew] for skew in (None, SKEW))
    assert {each.text for each in skewed} < {each.text for each in alike}
    assert {each.text for each in alike if each.points} == {"sgp()", "slowmo(every=48, base=sgp())"}
    assert not any(each.points for each in skewed)
    for contender in STRATEGIES:
        plan = plan_of(Trial(contender, "shakespeare", 0), steps=1000)
        assert (plan.workers, plan.skew) == (8, contender.skew)
        assert plan.lr is None and plan.spec == contender.spec
    assert Trial(skewed[1], "cifar10", 2).key == "cifar10-8-workers-skew-0.1/local_sgd-2"
    assert str(Trial(skewed[1], "cifar10", 2)) == "cifar10, skew 0.1, seed 2: local_sgd(every=8)"


def test_strategies_are_held_against_dense_on_the_same_shards() -> None:
    for contender in STRATEGIES:
        value = 0.7 if contender.text == "dense()" else 0.6
        for seed in range(SEEDS if contender.text == "sgp()" else 1):
            keep(Trial(contender, "cifar10", seed), found(value if contender.skew is None else value / 2))
    by_skew = {(each.contender.text, each.contender.skew): each for each in standings("cifar10", STRATEGIES)}
    assert by_skew["local_sgd(every=8)", None].lost.mean == pytest.approx(10)
    assert by_skew["local_sgd(every=8)", SKEW].lost.mean == pytest.approx(5)
    assert by_skew["sgp()", None].verdict == "outside"
    text = accuracy_page.page()
    assert "## Strategies: " in text and "## Strategies on skewed shards: " in text
    assert "Reductions that scale" not in text, "of which dense alone is there"
    assert "| `local_sgd()` | 1 | 30.00 | 5.00 |" in text


@for_each("contenders", SETS.values())
def test_all_methods_come_with_one_seed_before_the_next(contenders: tuple[Contender, ...]) -> None:
    order = [trial.seed for trial in trials.trials(contenders)]
    assert order == sorted(order) and len(order) == SEEDS * len(MODELS) * len(contenders)


@for_each("contenders", SETS.values())
def test_a_short_pass_tries_every_method_once_and_both_tasks(contenders: tuple[Contender, ...]) -> None:
    firsts = [trial for trial in trials.trials(contenders) if trial.seed == 0]
    tried = [trial for trial in firsts if trial.task == accuracy.turn_of(trial)]
    assert sorted(trial.contender.text for trial in tried) == sorted(each.text for each in contenders)
    assert {trial.task for trial in tried} == set(MODELS)


def test_reductions_are_held_against_dense_on_as_many_workers(empty: Path) -> None:
    for contender in REDUCTIONS:
        for seed in range(SEEDS):
            keep(Trial(contender, "cifar10", seed), found(0.65 if contender.text.startswith("cgx") else 0.7))
    place("dense()", [0.1, 0.1, 0.1])  # of 4 workers
    by_text = {each.contender.text: each for each in standings("cifar10", REDUCTIONS)}
    assert (
        by_text["cgx(bits=4)"].lost.mean == pytest.approx(5) and by_text["cgx(bits=4)"].verdict == "outside"
    )
    assert by_text["powersgd(rank=2)"].verdict == ""
    text = accuracy_page.page()
    assert "8 workers" in text and "| `cgx()` | 3 | 65.00 ± 0.00 | 5.00 ± 0.00 | outside |" in text


def test_what_is_done_is_not_done_again_and_a_failure_stores_no_row(monkeypatch: pytest.MonkeyPatch) -> None:
    chosen = [Trial(contender, "cifar10", 0) for contender in CONTENDERS[:3]]
    place(CONTENDERS[0].spec, [0.5])
    trained: list[str] = []

    def train(trial: Trial, steps: int) -> dict[str, object]:
        trained.append(trial.contender.spec)
        if trial is chosen[1] and len(trained) == 1:
            raise WorkerFailed("rank 2: broken")
        return found(0.25)

    monkeypatch.setattr(accuracy, "train", train)
    console = Console(quiet=True)
    assert accuracy.race(chosen, console, budget_s=math.inf, quick=False) == 1
    assert trained == [CONTENDERS[1].spec, CONTENDERS[2].spec]
    assert [trial.done for trial in chosen] == [True, False, True]
    assert kept(CONTENDERS[0], "cifar10")[0]["accuracy"] == 0.5
    assert accuracy.race(chosen, console, budget_s=math.inf, quick=False) == 0
    assert trained[2:] == [CONTENDERS[1].spec]
    assert accuracy.race(chosen, console, budget_s=math.inf, quick=False) == 0
    assert len(trained) == 3


def test_the_budget_holds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(accuracy, "train", lambda trial, steps: found(0.25))
    clock = iter(range(0, 100_000, 60))  # each look at the clock is a minute later
    monkeypatch.setattr(accuracy.time, "monotonic", lambda: float(next(clock)))
    chosen = [Trial(contender, "cifar10", 0) for contender in CONTENDERS]
    accuracy.race(chosen, Console(quiet=True), budget_s=900, quick=False)
    done = [trial for trial in chosen if trial.done]
    assert done == chosen[: len(done)] and 2 <= len(done) <= 7


def test_verdicts() -> None:
    place("dense()", [0.700, 0.702, 0.698])
    place("qsgd()" if "qsgd()" in BY_SPEC else "qsgd(levels=7)", [0.691, 0.693, 0.689])  # 0.9 points less
    place("natural()", [0.650, 0.652, 0.648])  # 5 points less
    place("nuqsgd()", [0.70, None, 0.70], diverged_at=12)
    place("sign()", [0.1, 0.1, 0.1])  # promises nothing
    by_spec = {standing.contender.spec: standing for standing in standings("cifar10")}
    assert {spec.partition("(")[0]: standing.verdict for spec, standing in by_spec.items()} == {
        "dense": "",
        "qsgd": "within",
        "nuqsgd": "outside",
        "natural": "outside",
        "sign": "",
    }
    natural = by_spec["natural()"]
    assert natural.lost.mean == pytest.approx(5) and natural.seeds == 3
    assert natural.lost.error == pytest.approx(100 * math.hypot(0.002, 0.002) / math.sqrt(3))


def test_the_standard_error_is_on_the_methods_side() -> None:
    place("dense()", [0.70, 0.72, 0.71])
    place("natural()", [0.6951, 0.6951, 0.6951])  # 1.49 points less, +- 0.58
    place("nuqsgd()", [None, None, None], diverged_at=3)
    place("qsgd()", [0.5])  # two seeds are still to come
    verdicts = {standing.contender.spec: standing.verdict for standing in standings("cifar10")}
    assert verdicts == {"dense()": "", "natural()": "within", "nuqsgd()": "outside", "qsgd()": ""}


def test_the_page_and_the_picture_show_what_is_there(empty: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    place("dense()", [0.70, 0.71, 0.72])
    place("natural()", [0.71], smaller=3.56)
    place("qcmd_adagrad(compressor=cutoff())", [0.60], zeros=0.25)
    text = accuracy_page.page()
    assert "| `dense()` | 3 | 71.00 ± 0.58 |" in text
    assert "| `natural()` | 1 | 71.00 | 0.00 |  |" in text
    assert "zero weights, %" in text and "| 25.0 |" in text
    assert "accuracy-methods-cifar10.svg" in text and "accuracy-methods-shakespeare.svg" not in text
    monkeypatch.setattr(accuracy, "DOCS", empty)
    accuracy.draw()
    drawn = (empty / "accuracy-methods-cifar10.svg").read_text()
    assert "natural</text>" in drawn and not (empty / "accuracy-methods-shakespeare.svg").exists()
    ElementTree.fromstring(drawn)


def test_the_picture_takes_one_method_and_many() -> None:
    place("dense()", [0.70])
    ElementTree.fromstring(scatter("cifar10", standings("cifar10")))
    for number, spec in enumerate(BY_SPEC):
        place(spec, [0.70 - 0.001 * number, 0.2 if number == 7 else 0.7], smaller=1.0 + number % 5)
    drawn = scatter("cifar10", standings("cifar10"))
    ElementTree.fromstring(drawn)
    assert drawn.count('class="spec name"') == len(BY_SPEC)  # every label has found a place


def test_a_kept_training_has_no_nan(empty: Path) -> None:
    trial = Trial(CONTENDERS[0], "shakespeare", 2)
    keep(trial, found(0.5, step_s=math.nan))
    text = trials.RUNS.file.read_text()
    assert json.loads(text, parse_constant=lambda word: pytest.fail(word))["step_s"] is None


def test_plans_are_those_of_the_command_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trials, "prepare", lambda task, folder, scratch: None)
    plan = plan_of(Trial(BY_SPEC["adam()"], "shakespeare", 1), steps=1000)
    assert (plan.spec, plan.model, plan.seed, plan.workers, plan.steps) == ("adam()", "lstm", 1, 4, 1000)
    assert plan.lr == BY_SPEC["adam()"].rates["shakespeare"] and plan.eval_every == 100
    with pytest.raises(SpecError):
        plan_of(Trial(Contender("no_such()", "x", "dense()"), "cifar10", 0), steps=1000)

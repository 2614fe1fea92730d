"""The time line of a pipeline: its bubble is the known one, and slow links take over."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from types import SimpleNamespace

import pytest
from tests.unit.shared import for_each, refuses
from typer.testing import CliRunner

from laconic.core.errors import SpecError
from laconic.pipeline.crossing import crossing
from laconic.tools.cli.main import app
from laconic.tools.plan.boundary import Visited, rehearse_crossing
from laconic.tools.plan.growth import Growth
from laconic.tools.plan.network import Network
from laconic.tools.plan.pipeline import Crossed, StageWork, pipeline_step
from laconic.tools.plan.pipelines import Cut, forecast
from laconic.tools.plan.rehearsal import Rehearsed, Traffic
from laconic.tools.plan.schedules import bubble, order

FREE = Network(1e30, 0.0)


def test_free_messages_leave_the_known_bubble() -> None:
    for schedule, stages, micro in product(("1f1b", "gpipe"), (1, 2, 4), (4, 16)):
        split = pipeline_step([StageWork(1.0, 2.0)] * stages, Crossed(7, 7), FREE, micro, schedule=schedule)
        assert split.step_s == pytest.approx(3.0 * (micro + stages - 1)), (schedule, stages, micro)
        assert split.waiting == pytest.approx((stages - 1) / (micro + stages - 1))
        assert split.nbytes == 14 * micro * (stages - 1)
    split = pipeline_step([StageWork(1, 1), StageWork(5, 5)], Crossed(0, 0), FREE, 100, schedule="gpipe")
    assert split.step_s == pytest.approx(1 + 1000 + 1), "the slowest stage sets the pace"


def test_a_slow_link_carries_every_byte_one_after_the_other() -> None:
    """Stages that compute nothing: by hand for two micro-batches of 10 bytes at a byte a second.

    Up: 0-10, 10-20. Down, full duplex: 10-20 and 20-30 as 1f1b goes back at once, 20-30 and 30-40 for gpipe.
    """
    link, nothing = Network(1.0, 0.0), [StageWork(0.0, 0.0)] * 2
    for schedule, step_s in (("1f1b", 30), ("gpipe", 40)):
        split = pipeline_step(nothing, Crossed(10, 10), link, 2, schedule=schedule)
        assert split.step_s == pytest.approx(step_s)
        assert split.waiting == 1.0
    for duplex, step_s in ((False, 160), (True, 90)):
        split = pipeline_step(nothing, Crossed(10, 10), link, 8, duplex=duplex)
        assert split.step_s == pytest.approx(step_s), "neighbours that take turns need the time of all bytes"
    for stages in (2, 3, 5):
        work, link = [StageWork(0.01, 0.02)] * stages, Network(12.5e6)
        times = [pipeline_step(work, Crossed(n, n), link, 8).step_s for n in (0, 1e4, 1e5, 1e6, 1e7)]
        assert times == sorted(times), "fewer bytes are never slower"


def test_latency_and_coding_count_once_a_message() -> None:
    link, work = Network(1.0, 0.5), [StageWork(1.0, 1.0)] * 2
    coded = Crossed(3, 2, encode_s=0.25, decode_s=0.125)
    split = pipeline_step(work, coded, link, 1, schedule="gpipe", update_s=4)
    up = 1 + 0.25 + 3 + 0.5 + 0.125
    down = 1 + 1 + 0.25 + 2 + 0.5 + 0.125
    assert split.step_s == pytest.approx(up + down + 1 + 4)


def test_what_no_pipeline_can_do_is_refused() -> None:
    work, nothing = StageWork(1, 1), Crossed(0, 0)
    words = "schedule must be gpipe, 1f1b or interleaved, got 'zb'"
    refuses(SpecError, words, pipeline_step, [work] * 2, nothing, FREE, 4, schedule="zb")
    words = r"micro_batches must be .* got 2; 1f1b needs as many as workers"
    refuses(SpecError, words, pipeline_step, [work] * 3, nothing, FREE, 2)


@for_each("workers, micro, turns", [(2, 2, 2), (2, 6, 2), (4, 8, 2), (4, 4, 3), (3, 3, 2)])
def test_the_interleaved_order_is_that_of_torch(workers: int, micro: int, turns: int) -> None:
    from torch.distributed.pipelining.schedules import ScheduleInterleaved1F1B

    torchs = SimpleNamespace(
        n_local_stages=turns, pp_group_size=workers, _n_microbatches=micro, number_of_rounds=micro // workers
    )
    torchs.microbatches_per_round = micro // torchs.number_of_rounds
    names = {"FORWARD": "forward", "FULL_BACKWARD": "backward"}
    for worker in range(workers):
        actions = ScheduleInterleaved1F1B._calculate_single_rank_operations(torchs, worker)
        expected = [
            (names[action.computation_type.name], action.stage_index, action.microbatch_index)
            for action in actions
            if action is not None
        ]
        assert order("interleaved", workers, worker, micro, turns) == expected


def test_two_stages_a_worker_halve_the_bubble() -> None:
    for workers, micro in ((2, 4), (4, 4), (4, 8)):
        work = [StageWork(1.0, 2.0)] * (2 * workers)
        split = pipeline_step(work, Crossed(7, 7), FREE, micro, schedule="interleaved", workers=workers)
        assert split.waiting == pytest.approx(bubble(workers, micro, turns=2))
        assert split.nbytes == 14 * micro * (2 * workers - 1)
        assert max(split.ends_s) == split.step_s
    cut = Cut(4, 1, 2, forward_s=6.0, backward_s=12.0, layers=6)
    assert [stage.forward_s for stage in cut.work()] == pytest.approx([0.5, 1.0, 0.5, 1.0])
    assert cut.schedules()["gpipe"] == "" and "got 2" in cut.schedules()["1f1b"]


def test_a_forecast_of_replicas_adds_what_backward_does_not_hide() -> None:
    """One call of 400 bytes for the model, 200 a stage, at a byte a second: nothing of it is hidden."""
    sent = Traffic(Growth((0, 0, 0, 1)), Growth((0, 0, 0, 400)))
    nothing = Growth((0, 0, 0, 0))
    between = Rehearsed("x()", {"exchange": sent}, nothing, nothing, "in step")
    cut = Cut(2, 2, 2, forward_s=4.0, backward_s=8.0, update_s=6.0, params=100)
    alone, link = replace(cut, replicas=1), Network(1.0, 0.0)
    found = forecast(crossing("dense()"), Visited(0, 0), cut, "gpipe", link, between)
    before = forecast(crossing("dense()"), Visited(0, 0), alone, "gpipe", link)
    assert before.step_s == pytest.approx(before.split.step_s + 3)
    assert found.step_s == pytest.approx(before.step_s + 200)
    assert found.exchange_s == pytest.approx(200)


@for_each(
    "spec, first, later, down",
    [
        ("dense()", None, 4 * 3 * 8 * 64, 4 * 3 * 8 * 64),
        ("direct(dense(), dense())", None, 24 + 4 * 1536, 24 + 4 * 1536),
        ("cast('fp16')", None, 24 + 2 * 1536, 24 + 2 * 1536),
        ("ac_sgd(4, 8, block=64)", 24 + 2 * 1536, 24 + 768 + 24 * 8, 24 + 1536 + 24 * 8),
        ("change(sparse(topk(density=0.25)), first='fp32')", 24 + 12 + 4 * 1536, None, None),
    ],
)
def test_what_crosses_is_counted_as_it_is_coded(spec, first, later, down) -> None:
    """A micro-batch of 3 x 8 x 64; by hand: a header of 24, bits, two floats a block, lengths of 4."""
    visits = rehearse_crossing(crossing(spec), (3, 8, 64))
    assert [each.first for each in visits] == ([True, False] if first is not None else [False])
    if first is not None:
        assert visits[0].up == first
    if later is not None:
        assert (visits[-1].up, visits[-1].down) == (later, down)
    else:
        assert 24 < visits[-1].up < first


def test_a_large_micro_batch_is_rehearsed_by_some_samples(monkeypatch) -> None:
    def up() -> list[int]:
        return [visit.up for visit in rehearse_crossing(crossing("ac_sgd()"), (8, 4, 128))]

    whole = up()
    monkeypatch.setattr("laconic.tools.plan.boundary.MAX_ELEMENTS", 2 * 4 * 128)
    assert up() == whole


PLAN = ["plan", "--stages", "2", "--activation", "8x16x64", "--link", "10mbit", "--backward", "20ms"]


def test_laconic_plan_ranks_what_crosses_stages(monkeypatch) -> None:
    monkeypatch.setenv("COLUMNS", "160")
    slow = ["--link", "1mbit"]  # where bytes decide, and not how fast this machine codes
    done = CliRunner().invoke(
        app, [*PLAN, *slow, "--replicas", "2", "--params", "50k", "--replicas-with", "cgx()"]
    )
    assert done.exit_code == 0, done.output
    for word in ("first", "later", "interleaved", "ac_sgd(forward=2, backward=6)", "cgx()", "MB a stage"):
        assert word in done.output
    advice = " ".join(done.output.split("messages take no time")[-1].split())
    assert ", ac_sgd(" in advice and "a first visit's step takes" in advice


@for_each("words, message", [
        ("--stages 1", "--stages must be a whole number in 2..256, got 1; one stage is not a pipeline"),
        ("--layers 1", "--stages must be at most 1, the layers of this model, got 2"),
        ("--micro-batches 1", "--micro-batches must divide the 8 samples of --activation and be 2 or more"),
        ("--micro-batches 3", "got 3: give 2, 4, 8"),
        ("--activation 8", "--activation must look like 32x256x384, samples first, got '8'"),
        ("--activation 1x16x64", "has 1 samples, which cannot be cut into 2 micro-batches or more"),
        ("--activation 8x0", "--activation must have 1 to"),
        ("--schedule zbv", "--schedule must be gpipe, 1f1b, interleaved, got 'zbv'"),
        ("--schedule interleaved --layers 3", "interleaved: 2 stages a worker need 4 layers, got 3"),
        ("--workers 4", "--workers and --stages cannot be combined"),
        ("--replicas 0", "--replicas must be a whole number in 1..256, got 0"),
        ("--replicas 2", "laconic plan needs --params"),
        ("--replicas-with cgx()", "--replicas-with needs --replicas of 2 or more"),
        ("--with dgc()", "is for workers that each hold the whole model"),
        ("--out x.svg", "--out draws methods by workers, not pipelines"),
    ])  # fmt: skip
def test_wrong_pipelines_are_refused_in_one_line(words: str, message: str) -> None:
    done = CliRunner().invoke(app, [*PLAN, *words.split(" ")])
    assert done.exit_code != 0
    assert message in " ".join(done.output.split())


def test_options_of_a_pipeline_need_stages() -> None:
    done = CliRunner().invoke(app, ["plan", "--micro-batches", "4"])
    assert done.exit_code != 0 and "--micro-batches is for a pipeline: add --stages" in done.output

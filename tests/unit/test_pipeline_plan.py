"""The time line of a pipeline: its bubble is the known one, and slow links take over."""

from __future__ import annotations

import pytest

from laconic.core.errors import SpecError
from laconic.plan.network import Network
from laconic.plan.pipeline import Crossed, StageWork, pipeline_step

FREE = Network(1e30, 0.0)


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe"])
@pytest.mark.parametrize(("stages", "micro"), [(1, 1), (2, 2), (2, 8), (4, 4), (4, 16)])
def test_free_messages_leave_the_known_bubble(schedule: str, stages: int, micro: int) -> None:
    split = pipeline_step([StageWork(1.0, 2.0)] * stages, Crossed(7, 7), FREE, micro, schedule=schedule)
    assert split.step_s == pytest.approx(3.0 * (micro + stages - 1))
    assert split.waiting == pytest.approx((stages - 1) / (micro + stages - 1))
    assert split.nbytes == 14 * micro * (stages - 1)


def test_the_slowest_stage_sets_the_pace() -> None:
    split = pipeline_step([StageWork(1, 1), StageWork(5, 5)], Crossed(0, 0), FREE, 100, schedule="gpipe")
    assert split.step_s == pytest.approx(1 + 1000 + 1)


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe"])
def test_a_slow_link_carries_every_byte_one_after_the_other(schedule: str) -> None:
    """Stages that compute nothing: by hand for two micro-batches of 10 bytes at a byte a second."""
    link, nothing = Network(1.0, 0.0), [StageWork(0.0, 0.0)] * 2
    split = pipeline_step(nothing, Crossed(10, 10), link, 2, schedule=schedule)
    # up: 0-10, 10-20. down, full duplex: 10-20 and 20-30 as 1f1b goes back at once, 20-30 and 30-40 for gpipe
    assert split.step_s == pytest.approx({"1f1b": 30, "gpipe": 40}[schedule])
    assert split.waiting == 1.0


def test_neighbours_that_take_turns_need_the_time_of_all_bytes() -> None:
    link, nothing = Network(1.0, 0.0), [StageWork(0.0, 0.0)] * 2
    split = pipeline_step(nothing, Crossed(10, 10), link, 8, duplex=False)
    assert split.step_s == pytest.approx(160)
    assert pipeline_step(nothing, Crossed(10, 10), link, 8).step_s == pytest.approx(90)


def test_latency_and_coding_count_once_a_message() -> None:
    link, work = Network(1.0, 0.5), [StageWork(1.0, 1.0)] * 2
    coded = Crossed(3, 2, encode_s=0.25, decode_s=0.125)
    split = pipeline_step(work, coded, link, 1, schedule="gpipe", update_s=4)
    up = 1 + 0.25 + 3 + 0.5 + 0.125
    down = 1 + 1 + 0.25 + 2 + 0.5 + 0.125
    assert split.step_s == pytest.approx(up + down + 1 + 4)


@pytest.mark.parametrize("stages", [2, 3, 5])
def test_fewer_bytes_are_never_slower(stages: int) -> None:
    work, link = [StageWork(0.01, 0.02)] * stages, Network(12.5e6)
    times = [pipeline_step(work, Crossed(n, n), link, 8).step_s for n in (0, 1e4, 1e5, 1e6, 1e7)]
    assert times == sorted(times)


def test_what_no_pipeline_can_do_is_refused() -> None:
    with pytest.raises(SpecError, match="schedule must be 1f1b or gpipe, got 'zb'"):
        pipeline_step([StageWork(1, 1)] * 2, Crossed(0, 0), FREE, 4, schedule="zb")
    with pytest.raises(SpecError, match=r"micro_batches must be .* got 2; 1f1b needs as many as stages"):
        pipeline_step([StageWork(1, 1)] * 3, Crossed(0, 0), FREE, 2)

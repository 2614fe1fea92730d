"""The planner: growth from small groups, the time line of a step, and the advice."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
from benchmarks.losses import TARGET, losses
from tests.laws.table import specs
from tests.unit.shared import for_each, refuses
from typer.testing import CliRunner

from laconic.core import units
from laconic.core.errors import SpecError
from laconic.core.layout import Layout
from laconic.core.spec import parse
from laconic.exchange.method import lift
from laconic.strategies.strategy import Strategy
from laconic.tools.cli.main import app
from laconic.tools.cli.plan import layout_of
from laconic.tools.plan.forecast import choice, forecasts
from laconic.tools.plan.growth import Growth
from laconic.tools.plan.network import Network
from laconic.tools.plan.rehearsal import (
    Played,
    Rehearsed,
    Traffic,
    costliest,
    excerpt,
    play,
    rehearse,
    steadily,
)
from laconic.tools.plan.stage import Gradients
from laconic.tools.plan.step import Work, buckets, time_line
from laconic.tools.plan.strategy_rehearsal import rehearse_strategies
from laconic.tools.report.plan_picture import picture

NOTHING, ONCE = Growth((0, 0, 0, 0)), Growth((0, 0, 0, 1))
SMALL = Layout.of((f"layer{i}.weight", (128, 256)) for i in range(6))


def costs(nbytes: float, coding_s: float = 0.0, spec: str = "x()") -> Rehearsed:
    """One message of so many bytes, whatever the number of workers."""
    traffic = {"exchange": Traffic(ONCE, Growth((0, 0, 0, nbytes)))}
    return Rehearsed(spec, traffic, Growth((0, 0, 0, coding_s)), NOTHING)


def test_a_growth_is_found_again_from_three_groups():
    lone = [(3.0, 0, 0, 0), (0, 2.0, 0, 0), (0, 0, 0.5, 0), (0, 0, 0, 7.0)]
    for parts in (*lone, (1.0, 0, 0, 5.0), (0, 4.0, 1.0, 0)):
        true = Growth(parts)
        found = Growth.fit({size: true.at(size) for size in (2, 4, 8)})
        assert found.at(256) == pytest.approx(true.at(256), rel=1e-9 if parts in lone else 0.25), parts
    found = Growth.fit({2: 1.0, 4: 1.02, 8: 1.03})
    assert found.at(256) == pytest.approx(1.0, rel=0.05), "noise is not read as growth"
    assert Growth.fit({2: 0.0, 4: 0.0, 8: 0.0}).at(64) == 0


def test_what_a_rule_exchanges_in_the_step_is_counted():
    """1-bit Adam: a bit an element and a scale a tensor, to servers and back, and not behind backward."""
    found = next(rehearse([lift("onebit_adam()")], SMALL))
    assert found.when == "in step"
    payload = 2 * 3 / 4 * SMALL.numel / 8  # and headers, as this model is small
    assert payload < found.nbytes(4) < 1.5 * payload
    slow = time_line(Work(1.0, 1.0, 1.0, (1,)), found, Network(1e3, 0.0), 4)
    assert slow.step_s > 3 + found.nbytes(4) / 1e3 - 1e-6
    (planned,) = forecasts([found], 4, Work(1.0, 1.0, 1.0, (1,)), Network(1e3))
    assert not planned.strategy


FORETOLD = (
    "dense() fp16() qsgd(levels=7) topk(density=0.01) deft(density=0.01) cgx(bits=4) powersgd(rank=2)"
    " stc(density=0.01) cltk(density=0.01) scatter_reduce(minmax(bits=4),pattern='ring')"
)


@for_each("spec", FORETOLD.split())
def test_bytes_among_sixteen_are_foretold_from_eight(spec):
    """Within a seventh: a position takes more bits where each worker sends fewer, and short sums among two
    take other messages than among more, whose headers count in a model as small as this."""
    method = lift(spec)
    foretold = next(rehearse([method], SMALL)).nbytes(16)
    played = sum(costliest(play(method, SMALL, 16, Gradients(SMALL))).nbytes.values())
    assert foretold == pytest.approx(played, rel=1 / 7)


@for_each(
    "spec, bytes_a_parameter",
    [
        ("local_sgd(every=8)", 2 * 3 / 4 * 4 / 8),  # an all-reduce every eighth step
        ("diloco(every=100)", 2 * 3 / 4 * 4 / 100),
        ("sgp()", 4.0),  # one peer at each step
        ("dpsgd()", 8.0),  # both neighbours in a ring
        ("local_sgd(every=4, compressor=minmax(bits=8))", 3 * 1 / 4),  # an all-gather of bytes
    ],
)
def test_bytes_of_a_strategy_are_means_over_its_period(spec, bytes_a_parameter):
    (found,) = rehearse_strategies([parse(spec)], SMALL, sizes=(4,))
    assert found.nbytes(4) / SMALL.numel == pytest.approx(bytes_a_parameter, rel=0.1)  # and headers


@for_each("spec", [spec for spec in specs(Strategy) if not parse(spec).clocked])
def test_every_strategy_can_be_rehearsed(spec):
    (found,) = rehearse_strategies([parse(spec)], SMALL, sizes=(4,))
    assert found.spec == spec
    assert found.nbytes(4) > 0 < found.encode_s.at(4)
    assert found.when == ("next step" if parse(spec).overlaps else "after update")


def test_parameters_are_waited_for_or_travel_beside_the_next_step():
    work, network = Work(1.0, 2.0, 0.5, (100,)), Network(10.0, 0.0, toll_s_a_byte=0.01)
    after = replace(costs(20.0, 0.25), when="after update")
    assert time_line(work, after, network, 2).step_s == pytest.approx(3.5 + 0.25 + 2.0)
    beside = replace(after, when="next step")
    assert time_line(work, beside, network, 2).step_s == pytest.approx(3.5 + 0.25 + 20 * 0.01)
    assert time_line(work, beside, replace(network, bytes_a_second=1.0), 2).step_s == pytest.approx(20.0)


def test_a_rehearsal_begins_after_the_warm_up_and_messages_are_latencies_and_bytes():
    methods = [lift("dgc(density=0.01, warmup_steps=100)"), lift("dense()")]
    warm, dense = rehearse(methods, SMALL, sizes=(2,))
    assert warm.nbytes(2) < 0.1 * dense.nbytes(2)
    ring = Rehearsed("", {"all_reduce": Traffic(ONCE, Growth((0, 2e6, 0, 0)))}, NOTHING, NOTHING)
    assert Network(1e6, 0.01).seconds(ring, 5) == pytest.approx(8 * 0.01 + 2 * 4 / 5)
    assert Network(1e6, 0.01).seconds(ring, 1) == 0


def test_an_excerpt_keeps_first_and_last_and_stays_below_its_limit():
    """The embedding of a language model keeps its width; factors of a shape (1, n) would never pay."""
    inner = ((f"w{i}", (40, 10)) for i in range(20))
    part = excerpt(Layout.of([("first", (5,)), *inner, ("last", (7,))]), 2000)
    assert (part.names[0], part.names[-1]) == ("first", "last")
    assert 1000 < part.numel <= 2000
    assert excerpt(Layout.of([("a", (10**6, 1)), ("b", (3, 3))]), 1000).numel <= 1000
    assert excerpt(Layout.of([("a", (10**6, 1))]), 1000).numel == 1000
    inner = ((f"w{i}", (768, 3072)) for i in range(12))
    layout = Layout.of([("wte", (50257, 768)), *inner, ("norm", (768,))])
    part = excerpt(layout)
    assert part["wte"].shape[1] == 768 and part["norm"].shape == (768,) and part.numel <= 1 << 23
    powersgd, scale = lift("powersgd(rank=2)"), layout.numel / part.numel
    assert powersgd.nbytes(part) * scale == pytest.approx(powersgd.nbytes(layout), rel=0.5)


def test_the_time_line_hides_what_fits_behind_backward():
    work = Work(1.0, 4.0, 0.5, (100, 100, 100, 100))
    slow, fast = (time_line(work, costs(nbytes), Network(1.0, 0.0), 2) for nbytes in (8.0, 0.4))
    assert fast.step_s == pytest.approx(1 + 4 + 0.1 + 0.5)  # only the last bucket's message is seen
    assert slow.step_s == pytest.approx(1 + 1 + 8 + 0.5)  # from the first bucket on, messages never cease
    assert slow.hidden_s == pytest.approx(3.0)
    assert time_line(work, costs(8.0), Network(1.0), 1).step_s == work.alone_s == 5.5


def test_coding_lengthens_backward_where_cores_are_few():
    both, one = (Work(0.0, 4.0, 0.0, (100,) * 4, cores) for cores in (2.0, 1.0))
    coded = costs(0.0, coding_s=2.0)
    assert time_line(both, coded, Network(1.0, 0.0), 2).step_s == pytest.approx(4.5)
    assert time_line(one, coded, Network(1.0, 0.0), 2).step_s == pytest.approx(6.0)


def test_messages_are_slower_beside_backward_and_take_their_toll_of_it():
    """One bucket is ready in the middle of 4 s of backward, the other at its end: 4 bytes each."""
    work, sent = Work(0.0, 4.0, 0.0, (100, 100)), costs(8.0)
    within = time_line(work, sent, Network(1e9, 0.5, busy_latency_s=1.5), 2)
    assert (within.step_s, within.communicate_s) == pytest.approx((4.5, 1.5 + 0.5))
    half = time_line(work, sent, Network(1e9, 0.5, busy_latency_s=4.0), 2)  # 2 s of 4, then half of 0.5 s
    assert (half.step_s, half.communicate_s) == pytest.approx((2 + 2 + 0.25 + 0.5, 2.25 + 0.5))
    tolled = time_line(work, sent, Network(1e9, 0.5, toll_s_a_byte=0.01), 2)
    assert tolled.step_s == pytest.approx(4.0 + 4 * 0.01 + 0.5)


def test_losses_are_what_trainings_say_and_what_is_told_can_be_read():
    assert TARGET.read_text() == losses(), "run python -m benchmarks.losses"
    assert sum(buckets(10**9)) == 10**9
    assert buckets(1000) == (1000,)
    for text in ("", "1", "1 gbit/s", "-1gbit", "1e999gbit", "gbit", "nangbit"):
        refuses(SpecError, "--link must be", units.bits_a_second, "--link", text)
    assert units.format_rate(100e6) == "100 Mbit/s"
    assert units.share("--loss", "1%") == units.share("--loss", "0.01") == 0.01
    refuses(SpecError, "at most 100%", units.share, "--loss", "150%")


def test_a_rehearsal_that_is_not_steady_is_repeated_and_says_so():
    def plays(*steps):
        left = [[Played({}, {}, sum(each) / 2, 0.0, each)] for each in steps]
        return left, lambda: left.pop(0)

    left, act = plays((1.0, 1.01), (9.0, 9.0))
    assert steadily(act).spread < 0.01 and len(left) == 1, "steady at once"
    left, act = plays((1.0, 9.0), (2.0, 2.2), (2.1, 2.1), (5.0, 5.0))
    found = steadily(act)
    assert found.encode_s == 2.1 and len(left) == 1, "the median of three"
    assert found.spread == pytest.approx(0.1 / 2.1), "1, 2, 2.1, 2.1, 2.2, 9: the median distance from 2.1"


@for_each("params", [1, 7, 100, 200_000, 1_000_000, 1_048_577, 25_600_000, 10**9])
def test_a_model_known_by_its_size_is_dozens_of_matrices(params):
    """PowerSGD sends nothing less of one row, and hardly anything of one square: neither is like a model."""
    stood = layout_of(params)
    assert stood.numel == params
    matrices = [entry.shape for entry in stood if len(entry.shape) == 2]
    assert len(matrices) >= min(params, 24)
    rows, columns = max(matrices)
    assert rows == columns <= 1024
    assert sum(entry.numel for entry in stood if len(entry.shape) == 1) < columns


def planned(words: str, *more: str):
    return CliRunner().invoke(app, [*f"plan {words}".split(), *more])


def test_laconic_plan_ranks_and_advises(tmp_path):
    drawn = tmp_path / "plan.svg"
    slow = "--params 200k --link 10mbit --backward 20ms --with fp16()"
    said = planned(f"{slow} --workers 2..8 --with topk(density=0.01) -o {drawn}")
    assert said.exit_code == 0, said.output
    assert said.stderr == "laconic: rehearsing 3 methods\n"
    assert "2 to 8 workers: topk(density=0.01)" in said.stdout
    assert said.stdout.index("topk") < said.stdout.index("fp16") < said.stdout.index("dense")
    assert drawn.read_text().startswith("<svg")
    said = planned(f"{slow} --workers 4 --with local_sgd(every=64)")
    assert said.exit_code == 0, said.output
    words = " ".join(said.output.split())
    assert "4 workers: fp16()" in words
    assert "A step is shorter with local_sgd(every=64)" in words


def test_of_methods_that_send_as_much_the_one_that_loses_least_is_taken():
    work, network = Work(0.0, 0.001, 0.0, (100,)), Network(1e6, 0.0)
    both = [costs(100.0, spec=spec) for spec in ("cgx()", "dense()")]
    for rehearsed in (both, both[::-1]):
        assert choice(forecasts(rehearsed, 4, work, network)).spec == "dense()"


def test_a_picture_shows_the_first_and_the_fastest():
    work = Work(0.0, 0.001, 0.0, (100,))
    found = [costs(9.0, spec="dense()"), *(costs(8.0 - i / 10, spec=f"m{i}()") for i in range(12))]
    drawn = picture(found, [2, 4], work, Network(1.0, 0.0), "a plan")
    assert all(f">{each.spec}</text>" in drawn for each in found), "all methods"
    assert len(set(re.findall(r"<polyline (.*?) points", drawn))) == len(found), "no two lines alike"
    assert re.findall(r'class="tick" [^>]*>([^<]*)<', drawn) == ["2", "4"] * 2, "ticks at the workers"


def test_a_picture_that_cannot_be_written_is_refused_before_any_work(tmp_path, monkeypatch):
    monkeypatch.setattr("laconic.tools.cli.plan.rehearse_all", None)
    words = "--params 1M --workers 2 --link 1gbit --backward 1ms --out"
    svg = "must end in .svg"
    for out, why in {"a/p.svg": "there is no folder", "p.png": svg, ".": svg}.items():
        said = planned(words, str(tmp_path / out))
        assert said.exit_code == 2 and why in said.output, said.output


@for_each(
    "change, message",
    [
        ({"--link": "100"}, "--link must be a rate such as 1gbit"),
        ({"--link": "0mbit"}, "above 0"),
        ({"--params": "many"}, "--params must be a count such as 25.6M"),
        ({"--backward": "120"}, "--backward must be a time such as 2ms"),
        ({"--workers": "4-8"}, "--workers must look like 8"),
        ({"--workers": "8..4"}, "from a smaller number to a larger"),
        ({"--workers": "1"}, "one worker sends nothing"),
        ({"--cores": "0"}, "--cores must be above 0"),
        ({"--with": "adpsgd()"}, "depends on which worker is faster"),
        ({"--with": "by_machine(local_sgd(), ranks_per_node=5)"}, "leave it out of the plan"),
        ({"--with": "topkk(density=1)"}, "topk"),
        ({"--probe": "missing.json"}, "there is no file missing.json"),
    ],
)
def test_wrong_plans_are_refused_with_the_way_out(change, message):
    usual = {"--params": "1k", "--workers": "2", "--link": "1gbit", "--backward": "1ms", "--with": "fp16()"}
    words = [word for pair in (usual | change).items() for word in pair]
    said = CliRunner().invoke(app, ["plan", *words])
    assert said.exit_code == 2
    assert message in " ".join(said.output.split())

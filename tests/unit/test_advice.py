"""The advice of a plan: what weighs time against accuracy, and what it says for it."""

from __future__ import annotations

from dataclasses import replace

from benchmarks.pages.situations import SITUATIONS
from tests.unit.shared import for_each

from laconic.tools.cli.entries import figures
from laconic.tools.plan.contenders import contenders
from laconic.tools.plan.forecast import choice, faster_strategies, forecasts, reason
from laconic.tools.plan.growth import Growth
from laconic.tools.plan.losses import without_warm_up
from laconic.tools.plan.network import Network
from laconic.tools.plan.rehearsal import Rehearsed, Traffic
from laconic.tools.plan.step import Work, buckets

NOTHING, ONCE = Growth((0, 0, 0, 0)), Growth((0, 0, 0, 1))


def costs(nbytes: float, spec: str) -> Rehearsed:
    """One message of so many bytes, whatever the number of workers."""
    return Rehearsed(spec, {"exchange": Traffic(ONCE, Growth((0, 0, 0, nbytes)))}, NOTHING, NOTHING)


def test_the_advice_weighs_time_against_what_was_lost():
    """Of what keeps accuracy the fastest; what loses some only where it is three times as fast."""
    work = Work(0.0, 1.0, 0.0, (100,) * 10)
    found = [costs(9.0, spec="dense()"), costs(0.9, spec="cgx()"), costs(0.85, spec="natural()")]
    found += [costs(0.41, spec="dgc(density=0.01)"), costs(0.4, spec="demo()")]
    slow = forecasts(found, 2, work, Network(1.0, 0.0))
    assert choice(slow).spec == "cgx()", "of two about as fast, the one that sends most"
    assert "it lost 0.1 points of accuracy" in reason(choice(slow), slow, slow[-1])
    quick = forecasts(found, 2, work, Network(1e3, 0.0))
    assert choice(quick).spec == "dense()"
    assert "nothing as accurate is faster by more than" in reason(choice(quick), quick, choice(quick))

    found[3:] = [costs(0.2, spec="dgc(density=0.01)"), costs(0.15, spec="demo()")]
    slower = forecasts(found, 2, work, Network(0.1, 0.0))
    assert choice(slower).spec == "dgc(density=0.01)", "of two that lose, the one that loses less"
    assert "it lost 4.5 points of accuracy" in reason(choice(slower), slower, slower[-1])
    unknown = forecasts([found[0], costs(0.1, spec="mine()")], 2, work, Network(0.1, 0.0))
    assert choice(unknown).spec == "mine()"
    assert "not measured, so try it on your task" in reason(choice(unknown), unknown, unknown[-1])

    apart = replace(costs(0.001, spec="apart()"), when="after update")
    ranked = forecasts([*found, apart], 2, work, Network(0.1, 0.0))
    assert choice(ranked).spec == choice(slower).spec, "a strategy is not advised"
    assert [each.spec for each in faster_strategies(choice(ranked), ranked)] == ["apart()"]


def test_little_time_costs_no_accuracy_and_much_time_not_much_of_it():
    """Three times as fast for five points: comp_ams, with 8.5, is no reason to take terngrad, with 2.3."""
    work = Work(0.0, 1.0, 0.0, (100,) * 10)
    found = [costs(90.0, spec="dense()"), costs(6.4, spec="cgx()"), costs(5.8, spec="terngrad()")]
    found.append(costs(2.0, spec="comp_ams()"))
    ranked = forecasts(found, 2, work, Network(1.0, 0.0))
    assert 3 * ranked[0].split.step_s < ranked[-2].split.step_s < 1.2 * ranked[-3].split.step_s
    assert choice(ranked).spec == "cgx()"
    why = reason(choice(ranked), ranked, ranked[-1])
    assert "comp_ams() takes 2.1 s, 3.1 times as fast, but it lost 8.5 points" in why
    found[-1] = costs(0.2, spec="comp_ams()")
    ranked = forecasts(found, 2, work, Network(0.01, 0.0))
    assert choice(ranked).spec == "comp_ams()", "32 times as fast"


def test_no_link_is_said_to_need_no_compression_where_a_lossy_method_is_faster():
    work, network = Work(0.0, 1.0, 0.0, (100,) * 10), Network(1.0, 0.0)
    ranked = forecasts([costs(9.0, spec="dense()"), costs(4.0, spec="powersgd(rank=2)")], 2, work, network)
    assert choice(ranked).spec == "dense()"
    assert reason(choice(ranked), ranked, choice(ranked)) == (
        "dense takes 9.1 s a step and nothing as accurate is faster; powersgd(rank=2) takes 4.1 s,"
        " 2.2 times as fast, but it lost 5.1 points of accuracy in short trainings"
    )


@for_each("title, link", [("A fast link", 100e9), ("1 Gbit/s Ethernet", 1e9), ("100 Mbit/s and less", 100e6)])
def test_the_advice_is_that_of_the_choosing_page(title, link):
    """ResNet-50 on four workers, with the bytes of the catalogue: the first pick for this link."""
    (situation,) = (each for each in SITUATIONS if each.title == title)
    n = 25_600_000
    counted = {without_warm_up(spec): each.growth for spec, each in figures().items()}
    found = [
        Rehearsed(
            spec, {"exchange": Traffic(ONCE, counted[without_warm_up(spec)] * (n / 8))}, NOTHING, NOTHING
        )
        for spec in map(repr, contenders())
    ]
    ranked = forecasts(found, 4, Work(0.06, 0.12, 0.0, buckets(4 * n)), Network(link / 8))
    assert choice(ranked).spec == situation.picks[0].spec

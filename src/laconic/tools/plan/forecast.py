"""Forecast of each method's step, and a recommendation.

The recommendation weighs time against measured losses of accuracy:

1. Of the methods that lost at most `KEEPS` points of accuracy, including dense: the fastest; among those
   within `NEAR` of it, the one that sends most, since unsent entries are lost or late.
2. The others in the order of their loss, unmeasured ones last: each replaces the choice so far if it is
   `FASTER` times as fast; if it loses more than `POINTS` points more, FASTER ** (points / POINTS) times.

Strategies are forecast but not recommended.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from laconic.core.units import format_seconds
from laconic.tools.plan.losses import points_lost
from laconic.tools.plan.network import Network
from laconic.tools.plan.rehearsal import Rehearsed
from laconic.tools.plan.step import Split, Work, time_line

NEAR = 1.05
KEEPS = 0.5
FASTER = 3.0
POINTS = 5.0


@dataclass(frozen=True)
class Forecast:
    """One method among `size` workers. `nbytes`: on the wire, per step and worker, of the busier direction.

    `spread_s`: uncertainty of `split.step_s`. `lost`: see `points_lost`.
    """

    spec: str
    size: int
    nbytes: float
    split: Split
    strategy: bool = False
    spread_s: float = 0.0
    lost: float | None = None

    @property
    def keeps(self) -> bool:
        return self.lost is not None and self.lost <= KEEPS


def forecasts(rehearsed: Sequence[Rehearsed], size: int, work: Work, network: Network) -> list[Forecast]:
    found = [
        Forecast(
            each.spec,
            size,
            each.nbytes(size),
            time_line(work, each, network, size),
            strategy=each.when in ("after update", "next step"),
            spread_s=_spread_s(work, each, network, size),
            lost=points_lost(each.spec),
        )
        for each in rehearsed
    ]
    return sorted(found, key=lambda each: each.split.step_s)


def _spread_s(work: Work, each: Rehearsed, network: Network, size: int) -> float:
    slow, quick = (time_line(work, each.scaled(1 + sign * each.spread), network, size) for sign in (1, -1))
    return (slow.step_s - quick.step_s) / 2


def choice(ranked: Sequence[Forecast]) -> Forecast:
    methods = [each for each in ranked if not each.strategy]
    keepers = [each for each in methods if each.keeps]
    limit = NEAR * keepers[0].split.step_s
    near = [each for each in keepers if each.split.step_s <= limit]
    chosen = max(near, key=lambda each: (each.nbytes, -_worst(each), -each.split.step_s))
    for each in sorted((each for each in methods if not each.keeps), key=_worst):
        if chosen.split.step_s >= _needed(chosen, each) * each.split.step_s:
            chosen = each
    return chosen


def _worst(each: Forecast) -> float:
    return math.inf if each.lost is None else each.lost


def _needed(chosen: Forecast, each: Forecast) -> float:
    if each.lost is None or chosen.lost is None:
        return FASTER
    return float(FASTER ** max(1.0, (each.lost - chosen.lost) / POINTS))


def faster_strategies(chosen: Forecast, ranked: Sequence[Forecast]) -> list[Forecast]:
    return [each for each in ranked if each.strategy and each.split.step_s < chosen.split.step_s]


def reason(chosen: Forecast, ranked: Sequence[Forecast], dense: Forecast) -> str:
    step = format_seconds(chosen.split.step_s)
    methods = [each for each in ranked if not each.strategy]
    keepers = [each for each in methods if each.keeps]
    lossy = next((each for each in methods if not each.keeps), None)
    gained = chosen.split.step_s / lossy.split.step_s if lossy else 0.0
    if chosen.spec == dense.spec:
        gain = 1 - keepers[0].split.step_s / dense.split.step_s
        faster = f"is faster by more than {gain:.1%}" if gain else "is faster"
        said = f"dense takes {step} a step and nothing as accurate {faster}"
        if lossy and gained > NEAR:
            return f"{said}; {_offer(lossy, gained)}"
        return f"{said}: this link needs no compression"
    times = dense.split.step_s / chosen.split.step_s
    waits = chosen.split.step_s - chosen.split.alone_s
    if waits < 0.05 * chosen.split.alone_s:
        rest = "its exchange hides behind the backward pass"
    else:
        rest = f"{format_seconds(waits)} of it wait for the exchange"
    if chosen.keeps:
        lost = "it keeps accuracy" if chosen.lost == 0 else f"it lost {chosen.lost:.1f} points of accuracy"
        lost += ", and of those about as fast it sends most"
        if lossy and gained >= FASTER:
            lost += f"; {_offer(lossy, gained)}"
    else:
        keeper = keepers[0]
        takes = format_seconds(keeper.split.step_s)
        lost = f"{_lost(chosen)}; {keeper.spec} keeps accuracy and takes {takes}"
    return f"{step} a step, {times:.1f} times as fast as dense; {rest}; {lost}"


def _offer(lossy: Forecast, times: float) -> str:
    takes = format_seconds(lossy.split.step_s)
    return f"{lossy.spec} takes {takes}, {times:.1f} times as fast, but {_lost(lossy)}"


def _lost(each: Forecast) -> str:
    if each.lost is None:
        return "what it loses was not measured, so try it on your task first"
    return f"it lost {each.lost:.1f} points of accuracy in short trainings"

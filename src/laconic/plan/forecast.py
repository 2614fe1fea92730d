"""A forecast: every method's step at every number of workers, and which one to take.

The advice is the least compression that the link allows: of all methods within a twentieth of the fastest
step, the one that sends most, since what is not sent is lost or late. Where that is dense, nothing is to be
gained. Strategies are forecast but not advised: what they send tells nothing of what they lose.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from laconic.core.units import format_seconds
from laconic.plan.network import Network
from laconic.plan.rehearsal import Rehearsed
from laconic.plan.step import Split, Work, time_line

NEAR = 1.05  # times the fastest step


@dataclass(frozen=True)
class Forecast:
    """One method among `size` workers. `nbytes`: on the wire, a step and worker, of the fuller direction.

    `strategy`: whether it is a strategy, which exchanges parameters.
    """

    spec: str
    size: int
    nbytes: float
    split: Split
    strategy: bool = False


def forecasts(rehearsed: Sequence[Rehearsed], size: int, work: Work, network: Network) -> list[Forecast]:
    """Of all methods, the fastest step first."""
    found = [
        Forecast(
            each.spec,
            size,
            each.nbytes(size),
            time_line(work, each, network, size),
            strategy=each.when != "backward",
        )
        for each in rehearsed
    ]
    return sorted(found, key=lambda each: each.split.step_s)


def choice(ranked: Sequence[Forecast]) -> Forecast:
    """What to take: of the methods about as fast as the fastest of them, the one that sends most."""
    methods = [each for each in ranked if not each.strategy]
    limit = NEAR * methods[0].split.step_s
    return max((each for each in methods if each.split.step_s <= limit), key=lambda each: each.nbytes)


def faster_strategies(chosen: Forecast, ranked: Sequence[Forecast]) -> list[Forecast]:
    """The strategies whose step is shorter than that of the chosen method, the fastest first."""
    return [each for each in ranked if each.strategy and each.split.step_s < chosen.split.step_s]


def reason(chosen: Forecast, ranked: Sequence[Forecast], dense: Forecast) -> str:
    """Why, in one sentence."""
    step = format_seconds(chosen.split.step_s)
    ranked = [each for each in ranked if not each.strategy]
    if chosen.spec == dense.spec:
        gain = 1 - ranked[0].split.step_s / dense.split.step_s
        faster = f"is faster by more than {gain:.1%}" if gain else "is faster"
        return f"dense takes {step} a step and nothing {faster}: this link needs no compression"
    times = dense.split.step_s / chosen.split.step_s
    waits = chosen.split.step_s - chosen.split.alone_s
    if waits < 0.05 * chosen.split.alone_s:
        rest = "its exchange hides behind the backward pass"
    else:
        rest = f"{format_seconds(waits)} of it wait for the exchange"
    return (
        f"{step} a step, {times:.1f} times as fast as dense; {rest};"
        " of all that are about as fast it sends most, so it loses least"
    )

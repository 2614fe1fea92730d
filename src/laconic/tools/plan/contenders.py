"""Methods and strategies that a plan compares."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import chain

from laconic.core.layout import Layout
from laconic.exchange.method import Method
from laconic.strategies.distribute import strategy_or_method
from laconic.strategies.strategy import Strategy
from laconic.tools.plan.rehearsal import Rehearsed, rehearse
from laconic.tools.plan.strategy_rehearsal import rehearse_strategies

DENSE = "dense()"
USUAL = (  # from docs/choosing.md, with measured losses
    "fp16()",
    "natural()",
    "qsgd()",
    "cgx()",
    "terngrad()",
    "powersgd(rank=2)",
    "sign()",
    "stc(density=0.01)",
    "dgc(density=0.01, warmup_steps=100)",
    "deft(density=0.01)",
    "oktopk(density=0.01)",
)


def contenders(specs: Sequence[str] = ()) -> list[Method | Strategy]:
    return [strategy_or_method(spec) for spec in dict.fromkeys((DENSE, *(specs or USUAL)))]


def rehearse_all(asked: Sequence[Method | Strategy], layout: Layout) -> Iterator[Rehearsed]:
    methods = [each for each in asked if isinstance(each, Method)]
    strategies = [each for each in asked if isinstance(each, Strategy)]
    return chain(rehearse(methods, layout), rehearse_strategies(strategies, layout))

"""Forecast of pipelines: coding between stages, method between replicas, and schedule.

Replicas exchange a stage's gradients from its last backward on, as if they had the link alone.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

from laconic.core.errors import SpecError
from laconic.pipeline.crossing import Crossing
from laconic.tools.plan.boundary import Visited
from laconic.tools.plan.forecast import KEEPS, NEAR
from laconic.tools.plan.losses import points_lost
from laconic.tools.plan.network import Network
from laconic.tools.plan.pipeline import Crossed, PipelineSplit, StageWork, pipeline_step
from laconic.tools.plan.rehearsal import Rehearsed, Traffic
from laconic.tools.plan.schedules import SCHEDULES, check
from laconic.tools.plan.step import Work, buckets, time_line

CROSSINGS = (
    "dense()",
    "cast('fp16')",
    "direct(minmax(bits=4, block=128), backward=minmax(bits=8, block=128))",
    "ac_sgd(forward=4, backward=8)",
    "ac_sgd(forward=2, backward=6)",
)
BETWEEN = ("dense()", "fp16()", "cgx()", "onebit_adam()")
TURNS = 2  # stages per worker in the interleaved schedule


@dataclass(frozen=True)
class Cut:
    """A model in stages: figures of the whole model for a replica's batch. Without `layers`, equal stages."""

    stages: int
    replicas: int
    micro_batches: int
    forward_s: float
    backward_s: float
    update_s: float = 0.0
    params: int = 0
    layers: int | None = None

    def work(self, turns: int = 1) -> list[StageWork]:
        shares = self.shares(self.stages * turns)
        return [
            StageWork(
                self.forward_s * share / self.micro_batches, self.backward_s * share / self.micro_batches
            )
            for share in shares
        ]

    def shares(self, stages: int) -> list[float]:
        if self.layers is None:
            return [1 / stages] * stages
        ends = [i * self.layers // stages for i in range(stages + 1)]
        return [(end - start) / self.layers for start, end in itertools.pairwise(ends)]

    def schedules(self) -> dict[str, str]:
        found = {}
        for name in SCHEDULES:
            turns = turns_of(name)
            try:
                check(name, self.stages, self.micro_batches, turns)
                found[name] = ""
            except SpecError as error:
                found[name] = str(error)
            if self.layers is not None and not found[name] and self.stages * turns > self.layers:
                found[name] = f"{turns} stages a worker need {self.stages * turns} layers, got {self.layers}"
        return found


@dataclass(frozen=True)
class PipelineForecast:
    """One combination. `spec`: coding between stages; `between`: replicas' method, "" for one replica.

    `exchange_s`: additional seconds for replicas. `remembers`: whether samples are sent as changes.
    """

    spec: str
    between: str
    schedule: str
    visited: Visited
    split: PipelineSplit
    step_s: float
    exchange_s: float = 0.0
    remembers: bool = False
    strategy: bool = False

    @property
    def lost(self) -> float | None:
        return points_lost(self.between) if self.between else 0.0


def turns_of(schedule: str) -> int:
    return TURNS if schedule == "interleaved" else 1


def forecast(
    crossing: Crossing,
    visited: Visited,
    cut: Cut,
    schedule: str,
    network: Network,
    between: Rehearsed | None = None,
    *,
    cores: float = 2.0,
) -> PipelineForecast:
    """Forecast one step. Torch's stages, `dense()`, are half duplex except in gpipe."""
    split = split_of(visited.wire, cut, schedule, network, duplex=schedule == "gpipe" or not crossing.dense)
    done_s = max(split.ends_s)
    step_s = done_s
    if between is not None and cut.replicas > 1:
        late_s = _exchange_s(cut, schedule, between, network, cores)
        step_s = max(ended + late for ended, late in zip(split.ends_s, late_s, strict=True))
    update_s = cut.update_s / cut.stages
    return PipelineForecast(
        crossing.spec,
        between.spec if between is not None else "",
        schedule,
        visited,
        split,
        step_s + update_s,
        step_s - done_s,
        crossing.remembers,
        between is not None and between.when in ("after update", "next step"),
    )


def split_of(
    crossed: Crossed, cut: Cut, schedule: str, network: Network, *, duplex: bool = True
) -> PipelineSplit:
    stages = cut.work(turns_of(schedule))
    return pipeline_step(
        stages, crossed, network, cut.micro_batches, schedule=schedule, workers=cut.stages, duplex=duplex
    )


def bubble_of(cut: Cut, schedule: str) -> float:
    return split_of(Crossed(0, 0), cut, schedule, Network(float("inf"), 0.0)).waiting


def _exchange_s(cut: Cut, schedule: str, between: Rehearsed, network: Network, cores: float) -> list[float]:
    turns = turns_of(schedule)
    shares, works = cut.shares(cut.stages * turns), cut.work(turns)
    found = []
    for worker in range(cut.stages):
        share = sum(shares[worker :: cut.stages])
        last_s = works[worker].backward_s  # of a worker's first stage
        part = between_part(between, share)
        alone = Work(0.0, last_s, 0.0, buckets(max(1, round(4 * cut.params * share))), cores)
        found.append(time_line(alone, part, network, cut.replicas).step_s - last_s)
    return found


def between_part(whole: Rehearsed, share: float) -> Rehearsed:
    traffic = {kind: Traffic(each.calls, each.nbytes * share) for kind, each in whole.traffic.items()}
    return Rehearsed(
        whole.spec,
        traffic,
        whole.encode_s * share,
        whole.decode_s * share,
        whole.when,
        whole.spread,
    )


def choice(found: Sequence[PipelineForecast]) -> PipelineForecast:
    """Return the recommendation at later visits: the fastest whose replicas' method keeps accuracy.

    At equal speeds, prefer stored samples, as changes lose less in the same bits, then large messages.
    """
    kept = [each for each in found if not each.strategy and each.lost is not None and each.lost <= KEEPS]
    fastest = min(kept, key=lambda each: each.step_s)
    near = [each for each in kept if each.step_s <= NEAR * fastest.step_s]
    dense = [each for each in near if each.spec == CROSSINGS[0]]
    return max(dense or near, key=lambda each: (each.remembers, each.visited.up + each.visited.down))

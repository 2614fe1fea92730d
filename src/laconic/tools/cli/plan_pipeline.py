"""`laconic plan --stages N`: forecasts of a pipeline's traffic and step time."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table
from rich.text import Text

from laconic.core import arguments, units
from laconic.core.errors import SpecError
from laconic.core.layout import Layout
from laconic.pipeline.crossing import Crossing, crossing
from laconic.tools.cli.console import console, working
from laconic.tools.cli.tables import shown
from laconic.tools.plan.boundary import Visited, rehearse_crossing
from laconic.tools.plan.contenders import contenders, rehearse_all
from laconic.tools.plan.network import Network
from laconic.tools.plan.pipelines import (
    BETWEEN,
    CROSSINGS,
    Cut,
    PipelineForecast,
    bubble_of,
    choice,
    forecast,
)
from laconic.tools.plan.rehearsal import Rehearsed
from laconic.tools.plan.schedules import SCHEDULES
from laconic.tools.plan.step import Work

MOST_STAGES, MOST_MICRO = 256, 4096
MOST_ELEMENTS = 1 << 34
PER_STAGE = 2
MB = 1e6


@dataclass(frozen=True)
class PipelineAsked:
    stages: int | None
    activation: str | None
    micro_batches: int | None
    replicas: int | None
    between: tuple[str, ...]
    layers: int | None
    schedule: str | None

    @property
    def pipeline(self) -> bool:
        if self.stages is not None:
            return True
        given = {
            "--activation": self.activation,
            "--micro-batches": self.micro_batches,
            "--replicas": self.replicas,
            "--replicas-with": self.between or None,
            "--layers": self.layers,
            "--schedule": self.schedule,
        }
        for option, value in given.items():
            if value is not None:
                raise SpecError(f"{option} is for a pipeline: add --stages, such as --stages 2")
        return False

    def check(self, *, workers: str | None, out: Path | None) -> None:
        arguments.whole("--stages", self.stages, 2, MOST_STAGES, hint="one stage is not a pipeline")
        assert self.stages is not None
        if workers is not None:
            raise SpecError(
                "--workers and --stages cannot be combined: a pipeline has one worker a stage and replica,"
                " so give --replicas"
            )
        if out is not None:
            raise SpecError("--out draws methods by workers, not pipelines: remove it with --stages")
        if self.layers is not None:
            arguments.whole("--layers", self.layers, 1)
            if self.stages > self.layers:
                raise SpecError(
                    f"--stages must be at most {self.layers}, the layers of this model, got {self.stages}"
                )
        if self.replicas is not None:
            arguments.whole("--replicas", self.replicas, 1, MOST_STAGES)
        if self.between and (self.replicas or 1) == 1:
            raise SpecError(
                "--replicas-with needs --replicas of 2 or more: one replica exchanges no gradients of weights"
            )
        if self.schedule is not None and self.schedule not in SCHEDULES:
            raise SpecError(f"--schedule must be {', '.join(SCHEDULES)}, got {self.schedule!r}")
        self.micro()

    @property
    def shape(self) -> tuple[int, ...]:
        if self.activation is None:
            raise SpecError(
                "laconic plan --stages needs --activation, the shape of a stage's output in a step of one"
                " replica, samples first: 32x256x384 for 32 windows of 256 letters, 384 wide"
            )
        if not re.fullmatch(r"\d+(x\d+)+", self.activation):
            raise SpecError(f"--activation must look like 32x256x384, samples first, got {self.activation!r}")
        found = tuple(map(int, self.activation.split("x")))
        elements = 1
        for each in found:
            elements *= each
        if not 0 < elements <= MOST_ELEMENTS:
            raise SpecError(
                f"--activation must have 1 to {MOST_ELEMENTS:,} elements, got {self.activation!r}"
            )
        return found

    def micro(self) -> int:
        samples, stages = self.shape[0], self.stages
        assert stages is not None
        least = 1 if self.schedule == "gpipe" else stages
        parts = [n for n in range(least, min(samples, MOST_MICRO) + 1) if samples % n == 0]
        if not parts:
            raise SpecError(
                f"--activation {self.activation} has {samples} samples, which cannot be cut into {stages}"
                " micro-batches or more, one a stage: give more samples, fewer --stages, or --schedule gpipe"
            )
        if self.micro_batches is None:
            return max((n for n in parts if n <= PER_STAGE * stages), default=parts[0])
        if self.micro_batches not in parts:
            few = "" if least == 1 else f" and be {stages} or more, one a stage, except with --schedule gpipe"
            raise SpecError(
                f"--micro-batches must divide the {samples} samples of --activation{few}, got"
                f" {self.micro_batches}: give {', '.join(map(str, parts[:8]))}"
            )
        return self.micro_batches


def plan_pipeline(
    asked: PipelineAsked, specs: Sequence[str], layout: Layout, work: Work, network: Network
) -> None:
    assert asked.stages is not None
    cut = Cut(
        asked.stages,
        asked.replicas or 1,
        asked.micro(),
        work.forward_s,
        work.backward_s,
        work.update_s,
        layout.numel,
        asked.layers,
    )
    schedules = cut.schedules()
    if asked.schedule is not None:
        if schedules[asked.schedule]:
            raise SpecError(f"--schedule {asked.schedule}: {schedules[asked.schedule]}")
        schedules = {asked.schedule: ""}
    usable = [name for name, refused in schedules.items() if not refused]
    crossings = {each.spec: each for each in map(crossing, (CROSSINGS[0], *(specs or CROSSINGS)))}
    shape = (asked.shape[0] // cut.micro_batches, *asked.shape[1:])
    methods = contenders(asked.between or BETWEEN) if cut.replicas > 1 else []
    screen = console()
    with working(screen, f"rehearsing {len(crossings)} methods between stages"):
        visits = {spec: rehearse_crossing(each, shape) for spec, each in crossings.items()}
        between: list[Rehearsed | None] = [*rehearse_all(methods, layout)] or [None]

    def played(each: Crossing, visited: Visited, schedule: str, method: Rehearsed | None) -> PipelineForecast:
        return forecast(each, visited, cut, schedule, network, method, cores=work.cores)

    later = [
        played(each, visits[spec][-1], schedule, method)
        for spec, each in crossings.items()
        for schedule in usable
        for method in between
    ]
    best = choice(later)
    method = next((each for each in between if each is not None and each.spec == best.between), None)
    rows = [
        {name: played(each, visited, name, method) for name in usable}
        for spec, each in crossings.items()
        for visited in visits[spec]
    ]
    _show_crossings(screen, rows, cut, best)
    if method is not None:
        others = [each for each in later if (each.spec, each.schedule) == (best.spec, best.schedule)]
        _show_methods(screen, others, between, cut, best)
    for name, refused in schedules.items():
        waits = refused or f"a worker waits for {bubble_of(cut, name):.0%} of a step if messages take no time"
        screen.print(Text.assemble((f"{name}: ", "bold"), waits))
    first = visits[best.spec][0]
    _advise(screen, best, later, played(crossings[best.spec], first, best.schedule, method), network)


def _show_crossings(
    screen: Console, rows: list[dict[str, PipelineForecast]], cut: Cut, best: PipelineForecast
) -> None:
    usable = [*rows[0]]
    table = Table(box=None, padding=(0, 1), header_style="bold")
    table.add_column("between stages", style="cyan", overflow="fold")
    table.add_column("visits")
    table.add_column("MB up", justify="right")
    table.add_column("MB down", justify="right")
    for name in usable:
        table.add_column(f"ms, {name}", justify="right")
    table.add_column("waits", justify="right")
    for row in sorted(rows, key=lambda row: min(each.step_s for each in row.values())):
        quickest = min(row.values(), key=lambda each: each.step_s)
        up, down = quickest.visited.sent(cut.micro_batches)
        visits = ("first" if quickest.visited.first else "later") if quickest.remembers else "all"
        taken = quickest.spec == best.spec and not quickest.visited.first
        cells = [
            Text(shown(1e3 * row[name].step_s), "bold green" if taken and name == best.schedule else "")
            for name in usable
        ]
        waits = f"{quickest.split.waiting:.0%}"
        table.add_row(quickest.spec, visits, shown(up / MB), shown(down / MB), *cells, waits)
    screen.print(table)
    screen.print(
        f"{cut.stages} stages, {cut.micro_batches} micro-batches"
        + (f", {cut.replicas} replicas with {best.between}" if best.between else "")
        + ". MB: on the wire of one boundary in a step, activations up and their gradients down, with all"
        " headers and acknowledgements. Waits: share of a step in which a stage does not compute, in the"
        " fastest schedule. Coding is assumed to be as fast as on this machine. Its loss of accuracy is not"
        " included: see docs/pipelines_measured.md.",
        style="dim",
    )


def _show_methods(
    screen: Console,
    found: list[PipelineForecast],
    between: Sequence[Rehearsed | None],
    cut: Cut,
    best: PipelineForecast,
) -> None:
    costs: Mapping[str, Rehearsed] = {each.spec: each for each in between if each is not None}
    table = Table(box=None, padding=(0, 1), header_style="bold")
    table.add_column(f"gradients of weights, {cut.replicas} replicas", style="cyan", overflow="fold")
    for head in ("points lost", "MB a stage", "ms after backward", "ms a step"):
        table.add_column(head, justify="right")
    for each in sorted(found, key=lambda each: each.step_s):
        lost = "-" if each.lost is None else f"{each.lost:.1f}"
        largest = max(cut.shares(cut.stages))
        nbytes = largest * costs[each.between].nbytes(cut.replicas)
        step = Text(shown(1e3 * each.step_s), "bold green" if each is best else "")
        table.add_row(each.between, lost, shown(nbytes / MB), shown(1e3 * each.exchange_s), step)
    screen.print(table)


def _advise(
    screen: Console,
    best: PipelineForecast,
    later: Sequence[PipelineForecast],
    first: PipelineForecast,
    network: Network,
) -> None:
    rate = units.format_rate(8 * network.bytes_a_second)
    dense = min((each for each in later if _is_dense(each)), key=lambda each: each.step_s)
    names = [best.schedule, best.spec, *([f"{best.between} among replicas"] if best.between else [])]
    said = f"{units.format_seconds(best.step_s)} a step over {rate}"
    if best.spec == dense.spec and best.between in ("", dense.between):
        said += ", and nothing that keeps accuracy is faster by 5 %: this link needs no compression"
    else:
        said += f", {dense.step_s / best.step_s:.1f} times as fast as with nothing compressed"
    if best.remembers:
        said += (
            f"; a first visit's step takes {units.format_seconds(first.step_s)}, and a training of one epoch"
            " has no others"
        )
    screen.print(Text.assemble((", ".join(names), "cyan"), f": {said}."))


def _is_dense(each: PipelineForecast) -> bool:
    return each.spec == CROSSINGS[0] and each.between in ("", CROSSINGS[0])

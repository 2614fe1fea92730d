"""Options of `laconic train` for a pipeline of stages."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from laconic.core import arguments
from laconic.core.errors import SpecError
from laconic.exchange.method import Method
from laconic.strategies.distribute import strategy_or_method
from laconic.tools.cli.fits import check_fit, normal
from laconic.tools.tasks.blockwise import is_blockwise
from laconic.tools.tasks.large_batch import LargeBatch
from laconic.tools.tasks.options import TrainingOptions, flag, info, option, options
from laconic.tools.tasks.settings import Pipeline
from laconic.tools.tasks.task import Recipe, Task

if TYPE_CHECKING:
    from laconic.tools.cli.settings import Settings

SCHEDULES = ("1f1b", "gpipe")
PER_STAGE = 2  # default micro-batches
STAGES = "Pipelines"


@dataclass(frozen=True, kw_only=True)
class PipelineOptions:
    stages: int | None = option(
        "cut the model into this many stages, one per worker; --with then codes their messages, such as"
        ' "ac_sgd(forward=4, backward=8)" [default: every worker has the whole model]',
        group=STAGES,
        recorded=False,
    )
    replicas: int | None = option(
        "with --stages: number of pipelines, each with separate examples", group=STAGES, recorded=False
    )
    replicas_with: str | None = option(
        "with --replicas: the method or strategy that keeps them together [default: dense()]",
        group=STAGES,
        metavar="SPEC",
        recorded=False,
    )
    micro_batches: int | None = option(
        "with --stages: parts of a replica's batch [default: two per stage, if that divides the batch]",
        group=STAGES,
        recorded=False,
    )
    schedule: str | None = option(
        "with --stages: 1f1b or gpipe [default: 1f1b]", group=STAGES, recorded=False
    )

    def pipeline_of(self, workers: int | None, batch: int) -> Pipeline | None:
        if self.stages is None:
            self._check_nothing_else()
            return None
        arguments.whole("--stages", self.stages, 2, hint="without --stages every worker has the whole model")
        replicas = self._replicas(workers)
        if self.replicas_with is not None and replicas == 1:
            raise SpecError(
                "--replicas-with needs --replicas of 2 or more: one replica exchanges no gradients of weights"
            )
        schedule = SCHEDULES[0] if self.schedule is None else self.schedule
        if schedule not in SCHEDULES:
            raise SpecError(f"--schedule must be {' or '.join(SCHEDULES)}, got {schedule!r}")
        between = normal(self.replicas_with or "dense()")
        return Pipeline(self.stages, replicas, self._micro_batches(batch, schedule), schedule, between)

    def _check_nothing_else(self) -> None:
        for each in options(PipelineOptions):
            if getattr(self, each.name) is not None:
                raise SpecError(f"{flag(each)} is for a pipeline: add --stages, such as --stages 2")

    def _replicas(self, workers: int | None) -> int:
        assert self.stages is not None
        if self.replicas is not None:
            arguments.whole("--replicas", self.replicas, 1)
        if workers is None:
            return self.replicas or 1
        needed = self.stages * (self.replicas or max(1, workers // self.stages))
        if workers != needed:
            of = f" and --replicas {self.replicas}" if self.replicas else ""
            raise SpecError(
                f"--stages {self.stages}{of} needs {needed} workers, one a stage of each replica, got"
                f" --workers {workers}: give --workers {needed}, or remove --workers"
            )
        return workers // self.stages

    def _micro_batches(self, batch: int, schedule: str) -> int:
        assert self.stages is not None
        parts = [n for n in range(1, batch + 1) if batch % n == 0]
        if schedule == "1f1b":
            parts = [n for n in parts if n >= self.stages]
            if not parts:
                raise SpecError(
                    f"1f1b needs at least one micro-batch per stage, and --batch {batch} is less than"
                    f" --stages {self.stages}: give a larger --batch, or --schedule gpipe"
                )
        if self.micro_batches is None:
            return max((n for n in parts if n <= PER_STAGE * self.stages), default=parts[0])
        if self.micro_batches not in parts:
            raise SpecError(
                f"--micro-batches must divide --batch {batch}, and be as many as stages or more for 1f1b, got"
                f" {self.micro_batches}: give {', '.join(map(str, parts))}"
            )
        return self.micro_batches


def check_cut(pipeline: Pipeline, task: Task, model: str, recipe: Recipe) -> None:
    if recipe.cut is None:
        can = [name for name, other in task.models.items() if other.cut is not None]
        hint = f"use --model {' or '.join(can)}" if can else "use the task shakespeare, whose GPTs can"
        raise SpecError(f"--stages: {task.name}'s model {model} cannot be cut into stages; {hint}")
    with torch.device("meta"):
        whole = recipe.build()
    recipe.cut(whole, 0, pipeline.stages)
    if pipeline.replicas > 1:
        check_fit(pipeline.between, pipeline.replicas, recipe, LargeBatch())


def check_alone(settings: Settings, what: str = "--stages") -> None:
    for each in options(TrainingOptions):
        if not info(each).with_stages and getattr(settings, each.name) != each.default:
            raise SpecError(f"{flag(each)} and {what} cannot be combined: give one of the two")


def warm_at(pipeline: Pipeline | None, specs: tuple[str, ...]) -> dict[str, int]:
    if pipeline is None:
        return {spec: strategy_or_method(spec).warm_at for spec in specs if not is_blockwise(spec)}
    between = strategy_or_method(pipeline.between)
    return {pipeline.between: between.warm_at} if isinstance(between, Method) else {}

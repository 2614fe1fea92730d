"""Settings of `laconic train`, checked before anything starts."""

from __future__ import annotations

import json
import platform
import time
from dataclasses import MISSING, asdict, dataclass, fields
from itertools import filterfalse
from pathlib import Path
from typing import Any

import torch

from laconic.core import arguments
from laconic.core.errors import SpecError, StateError
from laconic.pipeline.crossing import crossing
from laconic.strategies.distribute import strategy_or_method
from laconic.tools.cli.blocks import check_blocks
from laconic.tools.cli.files import check_free, check_name, default_name, fresh_folder
from laconic.tools.cli.fits import (
    check_bits,
    check_fit,
    check_patience,
    check_transforms,
    normal,
    normal_sparsity,
)
from laconic.tools.cli.pipelining import PipelineOptions, check_alone, check_cut
from laconic.tools.cli.presets import BRIEFLY
from laconic.tools.cli.versions import version_of
from laconic.tools.report.ledger import CONFIG
from laconic.tools.tasks import find
from laconic.tools.tasks import precision as precisions
from laconic.tools.tasks.blockwise import is_blockwise
from laconic.tools.tasks.options import (
    TrainingOptions,
    at_least,
    check_each,
    fixed,
    info,
    option,
    options,
    whole,
)
from laconic.tools.tasks.settings import Pipeline
from laconic.tools.tasks.task import Recipe
from laconic.transforms.transform import Option as Kind

WORKERS = 2
WAY_OUT = "give another --name, --resume to continue it, or --overwrite to delete it"


def _percentage(flag: str, value: float) -> None:
    if not 0 < value <= 100:
        raise SpecError(f"{flag} must be a percentage in (0, 100], got {value:g}")


@dataclass(frozen=True, kw_only=True)
class Options(PipelineOptions, TrainingOptions):
    """Options as given; None: not given."""

    task: str = option("digits, mnist, cifar10 or shakespeare", MISSING, fixed=True)
    workers: int | None = option(
        "number of processes on this machine [default: 2, or stages times replicas]",
        check=at_least(1),
        fixed=True,
    )
    methods: tuple[str, ...] = option(
        f"a method or strategy; may be repeated: {BRIEFLY}", (), flag="--with", fixed=True
    )
    against: tuple[str, ...] = option("a baseline; may be repeated; ratios compare with the first", ())
    seeds: int = option(
        "trainings per method, with seeds from --seed upwards", 1, check=at_least(1), fixed=True
    )
    seed: int = option("the first seed", 0, check=whole(0), recorded=False)
    steps: int | None = option("steps per training [default: the task's]", check=at_least(1), fixed=True)
    batch: int | None = option(
        "batch size per worker, or per replica [default: the task's]", check=at_least(1), fixed=True
    )
    examples: int | None = option(
        "number of training examples, spread evenly over all [default: all]", check=whole(1), fixed=True
    )
    model: str | None = option("one of the task's models [default: its first]", fixed=True)
    data: Path | None = option("folder of the data set [default: $LACONIC_DATA]", recorded=False)
    out: Path = option("folder for all runs", Path("runs"), recorded=False)
    name: str | None = option("name of the run's folder [default: task, time]")
    eval_every: int | None = option(
        "steps between tests; 0: none but the last [default: a tenth of --steps]", check=at_least(0)
    )
    target: float | None = option(
        "report the time until tests reach this accuracy, such as 97", metavar="PERCENT", check=_percentage
    )
    resume: bool = option("resume the run of this --name", False, recorded=False)
    overwrite: bool = option("delete the run that --name has, if there is one", False, recorded=False)


@dataclass(frozen=True, kw_only=True)
class Settings(Options):
    model: str
    workers: int
    steps: int
    batch: int
    eval_every: int
    name: str
    pipeline: Pipeline | None = None

    @classmethod
    def of(cls, options: Options) -> Settings:
        task = find(options.task)
        check_each(Options, options)
        steps = task.steps if options.steps is None else options.steps
        batch = task.batch if options.batch is None else options.batch
        pipeline = options.pipeline_of(options.workers, batch)
        workers = WORKERS if options.workers is None else options.workers
        spelled = normal if pipeline is None else lambda spec: crossing(spec).spec
        found = {
            "task": task.name,
            "model": options.model or next(iter(task.models)),
            "methods": tuple(spelled(spec) for spec in options.methods),
            "against": tuple(spelled(spec) for spec in options.against),
            "steps": steps,
            "batch": batch,
            "workers": workers if pipeline is None else pipeline.workers,
            "pipeline": pipeline,
            "eval_every": max(1, steps // 10) if options.eval_every is None else options.eval_every,
            "name": default_name(options.task) if options.name is None else options.name,
            "precision": precisions.normal(options.precision),
            "sparsity": None if options.sparsity is None else normal_sparsity(options.sparsity),
        }
        checked = cls(**({each.name: getattr(options, each.name) for each in fields(options)} | found))
        name = options.name
        if checked.resume and name is None:
            raise SpecError("--resume needs the --name of the run to resume")
        if checked.resume and checked.overwrite:
            raise SpecError(
                "--resume keeps the run of this --name and --overwrite deletes it: give one of the two"
            )
        checked._check(task.recipe(options.model))
        return checked

    def _check(self, recipe: Recipe) -> None:
        if not self.specs:
            such = '"auto()" or "cgx()"' if self.pipeline is None else '"ac_sgd()" between stages'
            raise SpecError(
                f"no method given: choose one, such as --with {such}; `laconic methods` lists all"
            )
        if self.pipeline is not None:
            check_alone(self)
        else:
            check_blocks(self, recipe)
        if self.bits is not None:
            check_bits(self.bits, recipe)
        given: dict[Kind, str | None] = {
            "lowbit": self.lowbit,
            "sparsity": self.sparsity,
            "activations": self.activations,
        }
        check_transforms(given, self.specs, self.bits, recipe, self.large_batch, self.steps)
        if self.sparsity is None and (masked := [spec for spec in self.specs if spec.startswith("masked(")]):
            raise SpecError(
                f"{masked[0]} sends the entries in use by masks; without --sparsity there are none: add it"
                ' too, such as --sparsity "rigl(density=0.1)"'
            )
        if self.patience is not None:
            check_patience(self.specs)
            if self.checkpoint_every:
                raise SpecError(
                    "--patience and --checkpoint-every cannot be combined: a checkpoint needs a part from"
                    " every worker, and a lost worker writes none; give one of the two"
                )
        if self.quorum is not None:
            hint = "it counts --workers, and these are all there are"
            arguments.whole("--quorum", self.quorum, 1, self.workers, hint)
            if self.patience is None:
                raise SpecError(
                    "--quorum limits the workers that continue after a loss, but without --patience none do:"
                    " add it, such as --patience 30"
                )
        if self.restarts and self.patience is None:
            raise SpecError(
                "--restarts needs a strategy that continues without a killed worker: add --patience, such"
                " as --patience 30; for methods, use `laconic run --max-restarts`"
            )
        check_name(self.name, self.out)
        self.large_batch.check(self.workers, self.skew)
        if self.pipeline is not None:
            check_cut(self.pipeline, find(self.task), self.model, recipe)
            return
        for spec in filterfalse(is_blockwise, self.specs):
            check_fit(spec, self.workers, recipe, self.large_batch)
            precisions.check_strategy(self.precision, strategy_or_method(spec), self.patience)

    @property
    def folder(self) -> Path:
        return self.out / self.name

    @property
    def specs(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(self.against + self.methods))

    @property
    def all_seeds(self) -> range:
        return range(self.seed, self.seed + self.seeds)

    def config(self) -> dict[str, Any]:
        recorded = [each.name for each in options(Options) if info(each).recorded]
        return {name: getattr(self, name) for name in recorded} | {
            "title": find(self.task).title,
            "lr": "default" if self.lr is None else self.lr,
            "pipeline": None if self.pipeline is None else asdict(self.pipeline),
            "first_seed": self.seed,
            "methods": list(self.specs),
            "against": list(self.against),
            "versions": f"laconic {version_of('laconic')}, torch {torch.__version__}, "
            f"Python {platform.python_version()}",
            "machine": f"{platform.machine()}, {platform.system()}",
            "started": time.strftime("%Y-%m-%d %H:%M"),
        }

    def check_folder(self) -> None:
        if self.resume:
            self._check_same()
        else:
            check_free(self.folder, overwrite=self.overwrite, way_out=WAY_OUT)

    def open_folder(self) -> None:
        if self.resume:
            self._check_same()
        else:
            fresh_folder(self.folder, overwrite=self.overwrite, way_out=WAY_OUT)

    def _check_same(self) -> None:
        path = self.folder / CONFIG
        if not path.exists():
            raise StateError(
                f"--resume: no run in {self.folder} (no {CONFIG} there); start it without --resume"
            )
        try:
            before = json.loads(path.read_text())
        except ValueError as error:
            raise StateError(f"{path} is damaged: {error}; start a new run with another --name") from error
        now = self.config()
        for name in (*fixed(Options), "first_seed", "pipeline"):
            if before.get(name) != now[name]:
                raise StateError(
                    f"--resume: {self.folder} started with {name}={before.get(name)!r}, not {now[name]!r};"
                    " give the same settings, or another --name"
                )

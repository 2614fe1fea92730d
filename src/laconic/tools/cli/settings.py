"""Settings of a `laconic train` run, checked as a whole before anything starts."""

from __future__ import annotations

import json
import platform
import time
from dataclasses import asdict, dataclass
from itertools import filterfalse
from pathlib import Path
from typing import Any

import torch

from laconic.core import arguments
from laconic.core.errors import SpecError, StateError
from laconic.data.copies_sampler import Across
from laconic.pipeline.crossing import crossing
from laconic.recipes.large_batch import Kind
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
from laconic.tools.cli.versions import version_of
from laconic.tools.report.ledger import CONFIG
from laconic.tools.tasks import find
from laconic.tools.tasks import precision as precisions
from laconic.tools.tasks.blockwise import is_blockwise
from laconic.tools.tasks.enlarged import Enlarged
from laconic.tools.tasks.settings import Pipeline
from laconic.tools.tasks.skew import check_skew
from laconic.tools.tasks.task import Recipe
from laconic.transforms.transform import Option

FIXED_ON_RESUME = (  # a different value would give different bits
    *("task", "model", "workers", "steps", "batch", "lr", "skew", "bits", "precision", "lowbit"),
    "sparsity",
    *("methods", "seeds", "first_seed", "recipe", "copies", "across", "micro_batch_size"),
    *("pipeline", "examples", "activations"),
)
WORKERS = 2
WAY_OUT = "give another --name, --resume to continue it, or --overwrite to delete it"


@dataclass(frozen=True)
class Settings:
    """A whole run. `against` are baselines, `methods` are compared with them."""

    task: str
    model: str
    methods: tuple[str, ...]
    against: tuple[str, ...]
    workers: int
    seeds: int
    seed: int
    steps: int
    batch: int
    lr: float | None
    eval_every: int
    checkpoint_every: int
    data: Path | None
    out: Path
    name: str
    resume: bool
    overwrite: bool = False
    skew: float | None = None
    bits: int | None = None
    precision: str | None = None  # None: float32
    lowbit: str | None = None
    sparsity: str | None = None
    patience: float | None = None
    quorum: int | None = None
    restarts: int = 0
    recipe: Kind | None = None
    copies: int = 1
    across: Across = "ranks"
    micro_batch_size: int | None = None
    pipeline: Pipeline | None = None
    examples: int | None = None
    activations: str | None = None
    target: float | None = None  # percent of test accuracy

    @classmethod
    def of(
        cls,
        *,
        task: str,
        model: str | None,
        methods: tuple[str, ...],
        against: tuple[str, ...],
        steps: int | None,
        batch: int | None,
        eval_every: int | None,
        name: str | None,
        precision: str | None = None,
        workers: int | None,
        pipelining: PipelineOptions = PipelineOptions(),  # noqa: B008  # frozen
        sparsity: str | None = None,
        **given: Any,
    ) -> Settings:
        """Return settings, with the task's defaults for None. Raises `SpecError` if a value is invalid."""
        its_task = find(task)
        total = its_task.steps if steps is None else steps
        size = its_task.batch if batch is None else batch
        pipeline = pipelining.pipeline(workers, size)
        spelled = normal if pipeline is None else lambda spec: crossing(spec).spec
        if workers is None:
            workers = WORKERS if pipeline is None else pipeline.workers
        checked = cls(
            task=its_task.name,
            model=model or next(iter(its_task.models)),
            methods=tuple(spelled(spec) for spec in methods),
            against=tuple(spelled(spec) for spec in against),
            steps=total,
            batch=size,
            workers=workers,
            pipeline=pipeline,
            eval_every=max(1, total // 10) if eval_every is None else eval_every,
            name=default_name(task) if name is None else name,
            precision=precisions.normal(precision),
            sparsity=None if sparsity is None else normal_sparsity(sparsity),
            **given,
        )
        if checked.resume and name is None:
            raise SpecError("--resume needs the --name of the run to resume")
        if checked.resume and checked.overwrite:
            raise SpecError(
                "--resume keeps the run of this --name and --overwrite deletes it: give one of the two"
            )
        checked._check(its_task.recipe(model))  # raises if the model is unknown
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
        for option, least in (("workers", 1), ("seeds", 1), ("steps", 1), ("batch", 1), ("eval_every", 0)):
            if getattr(self, option) < least:
                raise SpecError(
                    f"--{option.replace('_', '-')} must be {least} or more, got {getattr(self, option)}"
                )
        if self.checkpoint_every < 0:
            raise SpecError(f"--checkpoint-every must be 0 (none) or more, got {self.checkpoint_every}")
        if self.lr is not None and not 0 < self.lr < float("inf"):
            raise SpecError(f"--lr must be a number above 0, got {self.lr}")
        if self.target is not None and not 0 < self.target <= 100:
            raise SpecError(f"--target must be a percentage in (0, 100], got {self.target:g}")
        if self.examples is not None:
            arguments.whole("--examples", self.examples, 1)
        if self.skew is not None:
            check_skew(self.skew)
        if self.bits is not None:
            check_bits(self.bits, recipe)
        given: dict[Option, str | None] = {
            "lowbit": self.lowbit,
            "sparsity": self.sparsity,
            "activations": self.activations,
        }
        check_transforms(given, self.specs, self.bits, recipe, self.enlarged, self.steps)
        if self.sparsity is None and (masked := [spec for spec in self.specs if spec.startswith("masked(")]):
            raise SpecError(
                f"{masked[0]} sends the entries in use by masks; without --sparsity there are none: add it"
                ' too, such as --sparsity "rigl(density=0.1)"'
            )
        if self.patience is not None:
            arguments.number("--patience", self.patience, above=0)
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
        if self.restarts < 0:
            raise SpecError(f"--restarts must be 0 (none) or more, got {self.restarts}")
        if self.restarts and self.patience is None:
            raise SpecError(
                "--restarts needs a strategy that continues without a killed worker: add --patience, such"
                " as --patience 30; for methods, use `laconic run --max-restarts`"
            )
        check_name(self.name, self.out)
        self.enlarged.check(self.workers, self.skew)
        if self.pipeline is not None:
            check_cut(self.pipeline, find(self.task), self.model, recipe)
            return
        for spec in filterfalse(is_blockwise, self.specs):
            check_fit(spec, self.workers, recipe, self.enlarged)
            precisions.check_strategy(self.precision, strategy_or_method(spec), self.patience)

    @property
    def enlarged(self) -> Enlarged:
        """Recipe, copies and micro-batches."""
        return Enlarged(self.recipe, self.copies, self.across, self.micro_batch_size)

    @property
    def folder(self) -> Path:
        """Folder of all files of this run."""
        return self.out / self.name

    @property
    def specs(self) -> tuple[str, ...]:
        """All methods, baselines first, without duplicates."""
        return tuple(dict.fromkeys(self.against + self.methods))

    @property
    def all_seeds(self) -> range:
        """The seeds, in order."""
        return range(self.seed, self.seed + self.seeds)

    def config(self) -> dict[str, Any]:
        """Return the content of `config.json`."""
        return {
            "name": self.name,
            "title": find(self.task).title,
            "task": self.task,
            "model": self.model,
            "workers": self.workers,
            "steps": self.steps,
            "batch": self.batch,
            "lr": "default" if self.lr is None else self.lr,
            "skew": self.skew,
            "bits": self.bits,
            "precision": self.precision,
            "lowbit": self.lowbit,
            "sparsity": self.sparsity,
            "patience": self.patience,
            "quorum": self.quorum,
            "restarts": self.restarts,
            **asdict(self.enlarged),
            "pipeline": None if self.pipeline is None else asdict(self.pipeline),
            "examples": self.examples,
            "activations": self.activations,
            "seeds": self.seeds,
            "first_seed": self.seed,
            "target": self.target,
            "methods": list(self.specs),
            "against": list(self.against),
            "versions": f"laconic {version_of('laconic')}, torch {torch.__version__}, "
            f"Python {platform.python_version()}",
            "machine": f"{platform.machine()}, {platform.system()}",
            "started": time.strftime("%Y-%m-%d %H:%M"),
        }

    def check_folder(self) -> None:
        """Raise `StateError` if this run's folder holds another run, or cannot be resumed."""
        if self.resume:
            self._check_same()
        else:
            check_free(self.folder, overwrite=self.overwrite, way_out=WAY_OUT)

    def open_folder(self) -> None:
        """Make the run's folder, unless this run resumes. Raises `StateError` as `check_folder` does."""
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
        for name in FIXED_ON_RESUME:
            if before.get(name) != now[name]:
                raise StateError(
                    f"--resume: {self.folder} started with {name}={before.get(name)!r}, not {now[name]!r};"
                    " give the same settings, or another --name"
                )

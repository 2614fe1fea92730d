"""What `laconic train` was asked for, checked as a whole before anything starts."""

from __future__ import annotations

import json
import platform
import shutil
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from laconic.cli.versions import version_of
from laconic.core import arguments
from laconic.core.errors import AttachError, LaconicError, SpecError, StateError
from laconic.report.ledger import CONFIG
from laconic.strategies.distribute import strategy_or_method
from laconic.strategies.strategy import Strategy
from laconic.tasks import find
from laconic.tasks.skew import check_skew
from laconic.tasks.task import Recipe
from laconic.tasks.training import built

OF_THE_BITS = (
    *("task", "model", "workers", "steps", "batch", "lr", "skew", "bits"),
    *("methods", "seeds", "first_seed"),
)


@dataclass(frozen=True)
class Settings:
    """A whole run. `against` are baselines, `methods` what is compared with them."""

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
    skew: float | None = None
    bits: int | None = None
    patience: float | None = None
    restarts: int = 0

    @classmethod
    def of(
        cls,
        *,
        task: str,
        model: str | None,
        methods: tuple[str, ...],
        against: tuple[str, ...],
        workers: int,
        seeds: int,
        seed: int,
        steps: int | None,
        batch: int | None,
        lr: float | None,
        eval_every: int | None,
        checkpoint_every: int,
        data: Path | None,
        out: Path,
        name: str | None,
        resume: bool,
        skew: float | None = None,
        bits: int | None = None,
        patience: float | None = None,
        restarts: int = 0,
    ) -> Settings:
        """Settings, with the task's own for what is not given. Raises `SpecError` for what is wrong."""
        known = find(task)
        known.recipe(model)  # refuses an unknown one
        chosen = model or next(iter(known.models))
        total = known.steps if steps is None else steps
        checked = cls(
            task=known.name,
            model=chosen,
            methods=tuple(normal(spec) for spec in methods),
            against=tuple(normal(spec) for spec in against),
            workers=workers,
            seeds=seeds,
            seed=seed,
            steps=total,
            batch=known.batch if batch is None else batch,
            lr=lr,
            eval_every=max(1, total // 10) if eval_every is None else eval_every,
            checkpoint_every=checkpoint_every,
            data=data,
            out=out,
            name=name or f"{task}-{time.strftime('%Y%m%d-%H%M%S')}",
            resume=resume,
            skew=skew,
            bits=bits,
            patience=patience,
            restarts=restarts,
        )
        if not checked.specs:
            raise SpecError('no method: say which with --with "dgc(density=0.01)"; see `laconic methods`')
        for option, least in (("workers", 1), ("seeds", 1), ("steps", 1), ("batch", 1), ("eval_every", 0)):
            if getattr(checked, option) < least:
                raise SpecError(
                    f"--{option.replace('_', '-')} must be {least} or more, got {getattr(checked, option)}"
                )
        if checkpoint_every < 0:
            raise SpecError(f"--checkpoint-every must be 0 (none) or more, got {checkpoint_every}")
        if lr is not None and not 0 < lr < float("inf"):
            raise SpecError(f"--lr must be a number above 0, got {lr}")
        if skew is not None:
            check_skew(skew)
        if bits is not None:
            check_bits(bits, known.recipe(model))
        if patience is not None:
            arguments.number("--patience", patience, above=0)
            if checkpoint_every:
                raise SpecError(
                    "--patience and --checkpoint-every do not go together: a checkpoint is whole when every"
                    " worker has written its part, and a lost one does not; give one of the two"
                )
        if restarts < 0:
            raise SpecError(f"--restarts must be 0 (none) or more, got {restarts}")
        if restarts and patience is None:
            raise SpecError(
                "--restarts is of strategies that go on without a killed worker: give --patience too, such as"
                " --patience 30; for methods take `laconic run --max-restarts`"
            )
        if not checked.name or Path(checked.name).name != checked.name:
            raise SpecError(f"--name is one folder's name in {out}, got {checked.name!r}")
        if resume and name is None:
            raise SpecError("--resume needs the --name of the run to go on with")
        for spec in checked.specs:
            check_fit(spec, workers, known.recipe(model))
        return checked

    @property
    def folder(self) -> Path:
        """Where everything of this run is written."""
        return self.out / self.name

    @property
    def specs(self) -> tuple[str, ...]:
        """All methods, baselines first, each once."""
        return tuple(dict.fromkeys(self.against + self.methods))

    @property
    def all_seeds(self) -> range:
        """The seeds, in order."""
        return range(self.seed, self.seed + self.seeds)

    def config(self) -> dict[str, Any]:
        """What `config.json` says."""
        return {
            "name": self.name,
            "title": find(self.task).title,
            "task": self.task,
            "model": self.model,
            "workers": self.workers,
            "steps": self.steps,
            "batch": self.batch,
            "lr": "the usual" if self.lr is None else self.lr,
            "skew": self.skew,
            "bits": self.bits,
            "patience": self.patience,
            "restarts": self.restarts,
            "seeds": self.seeds,
            "first_seed": self.seed,
            "methods": list(self.specs),
            "against": list(self.against),
            "versions": f"laconic {version_of('laconic')}, torch {torch.__version__}, "
            f"Python {platform.python_version()}",
            "machine": f"{platform.machine()}, {platform.system()}",
            "started": time.strftime("%Y-%m-%d %H:%M"),
        }

    def warnings(self) -> list[str]:
        """A line for each method that would still be warming up at the last step."""
        warm = {spec: strategy_or_method(spec).warm_at for spec in self.specs}
        return [
            f"{spec} warms up for {first:,} steps and this run has {self.steps:,}: nothing is seen of what it"
            " is for; give it a shorter warm-up, or more --steps"
            for spec, first in warm.items()
            if first >= self.steps
        ]

    def open_folder(self) -> None:
        """Make the run's folder. An older run moves to NAME.old; with `resume` it must be like this one."""
        if self.resume:
            self._check_same()
        elif self.folder.exists():
            if not (self.folder / CONFIG).exists():
                raise StateError(f"{self.folder} is there and holds no run of ours: give another --name")
            aside = self.folder.with_name(f"{self.name}.old")
            if aside.exists():
                shutil.rmtree(aside)
            self.folder.rename(aside)
        self.folder.mkdir(parents=True, exist_ok=True)

    def _check_same(self) -> None:
        path = self.folder / CONFIG
        if not path.exists():
            raise StateError(f"--resume: no run in {self.folder} (no {CONFIG}); start it without --resume")
        try:
            before = json.loads(path.read_text())
        except ValueError as error:
            raise StateError(f"{path} is damaged: {error}; start another run with another --name") from error
        now = self.config()
        for name in OF_THE_BITS:
            if before.get(name) != now[name]:
                raise StateError(
                    f"--resume: {self.folder} was begun with {name}={before.get(name)!r}, not {now[name]!r}: "
                    "give the same settings, or another --name"
                )


def normal(text: str) -> str:
    """A spec as its `repr` spells it: one name a method. Raises `SpecError` for what cannot be trained by."""
    try:
        return repr(strategy_or_method(text))
    except SpecError:
        raise
    except LaconicError as error:
        raise SpecError(f"{text}: {error}") from error


def check_fit(spec: str, workers: int, recipe: Recipe) -> None:
    """Raise `SpecError` or `AttachError` for a strategy that is not for so many workers or this optimiser."""
    strategy = strategy_or_method(spec)
    if isinstance(strategy, Strategy):
        strategy.check(workers, recipe.optimizer(nn.Linear(1, 1), by=strategy))


def check_bits(bits: int, recipe: Recipe) -> None:
    """Raise `SpecError` for a number of bits that there is not, and for a model that has no such form."""
    arguments.whole("--bits", bits, 2, 8)
    try:
        built(recipe, bits)
    except AttachError as error:
        raise SpecError(f"{error}; take cifar10, mnist or digits, or convert in a script") from error

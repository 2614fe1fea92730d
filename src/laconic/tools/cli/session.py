"""One run of `laconic train`: every method with every seed."""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections import Counter, defaultdict
from pathlib import Path

from rich.console import Console

from laconic.tools.cli.interrupts import Interrupts
from laconic.tools.cli.progress import Progress
from laconic.tools.cli.settings import Settings
from laconic.tools.report import Ledger, check_packages
from laconic.tools.report.ledger import read_events, slug
from laconic.tools.tasks import checkpoint, find
from laconic.tools.tasks.launcher import WorkerFailed, launch, prepare_to_launch
from laconic.tools.tasks.loading import prepare
from laconic.tools.tasks.options import TrainingOptions, options
from laconic.tools.tasks.precision import check_device
from laconic.tools.tasks.settings import TrainingSettings
from laconic.tools.tasks.shard import Shard
from laconic.tools.tasks.steps import due


class Session:
    def __init__(self, settings: Settings, console: Console, interrupts: Interrupts) -> None:
        self.settings = settings
        self.interrupts = interrupts
        self.console = console
        self.started = False
        self._finished = finished(settings) if settings.resume else set()

    def train_all(self) -> None:
        check_packages()
        settings = self.settings
        settings.check_folder()
        prepare_to_launch()
        with tempfile.TemporaryDirectory(prefix="laconic-") as scratch:
            data = Path(scratch) / "data.pt"
            with self.console.status(f"reading {settings.task}, starting workers"):
                tensors = prepare(
                    find(settings.task), settings.data, data, model=settings.model, examples=settings.examples
                )
            sharers = settings.workers if settings.pipeline is None else settings.pipeline.replicas
            Shard(len(tensors["train_y"]), settings.batch, 0, sharers, 0)  # checks the batch
            check_device(settings.precision, find(settings.task), settings.model, tensors)
            settings.open_folder()
            self.started = True
            with (
                Ledger(settings.folder, settings.config()) as ledger,
                Progress(self.console, settings) as progress,
            ):
                for seed in settings.all_seeds:
                    for spec in settings.specs:
                        self._train_one(spec, seed, data, ledger, progress)

    def _train_one(self, spec: str, seed: int, data: Path, ledger: Ledger, progress: Progress) -> None:
        settings = self.settings
        folder = settings.folder / slug(spec) / f"seed{seed}"
        resume_from = on_record(settings, spec, seed, folder) if settings.resume else None
        if settings.resume:
            if (spec, seed) in self._finished:
                progress.skip(spec, seed)
                return
            first = checkpoint.step_of(resume_from) if resume_from else 0
            for later in (each for each in checkpoint.complete(folder) if checkpoint.step_of(each) > first):
                checkpoint.remove(later)  # its parts will be written again, one by one
            progress.print_line(f"{spec}, seed {seed}: resumes from {resume_from or 'the start'}")
            ledger.rewrite(
                lambda event: (event["method"], event["seed"]) != (spec, seed) or event["step"] <= first
            )
        training = TrainingSettings(
            **{each.name: getattr(settings, each.name) for each in options(TrainingOptions)},
            task=settings.task,
            model=settings.model,
            spec=spec,
            seed=seed,
            workers=settings.workers,
            steps=settings.steps,
            batch=settings.batch,
            eval_every=settings.eval_every,
            data=data,
            folder=folder,
            threads=max(1, (os.cpu_count() or 1) // settings.workers),
            resume_from=resume_from,
            pipeline=settings.pipeline,
        )
        progress.begin(spec, seed, sent_before(settings.folder, spec, seed) if settings.resume else 0.0)
        try:
            with contextlib.closing(launch(training)) as events:
                for event in events:
                    labelled = {"method": spec, "seed": seed} | event
                    with self.interrupts.held():
                        ledger.write(labelled)
                        progress.show(labelled)
        except WorkerFailed as failure:
            raise failure.within(f"{spec}, seed {seed}") from None
        progress.end(spec, seed)


def sent_before(folder: Path, spec: str, seed: int) -> float:
    sent = (
        event["network_sent"]
        for event in read_events(folder)
        if (event["kind"], event["method"], event["seed"], event["rank"]) == ("step", spec, seed, 0)
    )
    return float(sum(sent)) / 1e6


def on_record(settings: Settings, spec: str, seed: int, folder: Path) -> Path | None:
    """Return the newest checkpoint whose events are all written, else the oldest, or None.

    Workers run ahead of the written events.
    """
    done: defaultdict[int, set[int]] = defaultdict(set)
    tested: Counter[int] = Counter()
    for event in read_events(settings.folder):
        if (event["method"], event["seed"]) == (spec, seed):
            if event["kind"] == "step":
                done[event["rank"]].add(event["step"])
            tested[event["step"]] += event["kind"] == "eval"

    def recorded(step: int) -> bool:
        steps = [sum(each <= step for each in ranks) for ranks in done.values()]
        return steps == [step] * settings.workers and (
            not due(settings, step) or tested[step] == settings.workers
        )

    places = checkpoint.complete(folder)
    found = (place for place in reversed(places) if recorded(checkpoint.step_of(place)))
    return next(found, next(iter(places), None))


def finished(settings: Settings) -> set[tuple[str, int]]:
    """Return the (method, seed) pairs whose remaining workers have tested the last step."""
    last: Counter[tuple[str, int]] = Counter()
    lost: defaultdict[tuple[str, int], set[int]] = defaultdict(set)
    for event in read_events(settings.folder):
        training = event["method"], event["seed"]
        last[training] += event["kind"] == "eval" and event["step"] == settings.steps
        if event["kind"] == "lost":
            lost[training].add(event["rank"])
        if event["kind"] == "back":
            lost[training].discard(event["rank"])
    return {
        training
        for training, ranks in last.items()
        if ranks and ranks == settings.workers - len(lost[training])
    }

"""Progress of a run: a live table on a terminal, else plain lines."""

from __future__ import annotations

import itertools
import time
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any

from rich.console import Console
from rich.live import Live
from rich.table import Table

from laconic.core.spec import parse
from laconic.core.units import format_count
from laconic.sparsity import Sparsifier
from laconic.tools.cli.settings import Settings
from laconic.tools.tasks.blockwise import is_blockwise

REDRAWS_PER_S = 4
SMOOTHING = 0.1  # weight of the newest step


@dataclass
class Shown:
    seed: int | None = None
    seeds_done: int = 0
    step: int = 0
    ended: bool = False
    loss: float | None = None
    step_s: float | None = None
    megabytes: float = 0.0
    accuracy: float | None = None
    stepped_at: float = 0.0
    test_s: float | None = None
    residual: float | None = None
    flips: float | None = None
    density: float | None = None
    changed: float = 0.0
    tested: dict[int, list[tuple[int, int]]] = field(default_factory=dict)
    lost: set[int] = field(default_factory=set)

    @property
    def first_living(self) -> int:
        return next(rank for rank in itertools.count() if rank not in self.lost)

    def add_step(self, event: dict[str, Any]) -> None:
        self.step = event["step"]
        self.megabytes += event["network_sent"] / 1e6
        first = self.step <= 2
        self.step_s = event["step_s"] if first else _smooth(self.step_s, event["step_s"])
        self.stepped_at = time.monotonic()

    def add_loss(self, loss: float) -> None:
        self.loss = _smooth(self.loss, loss)

    def add_test(self, event: dict[str, Any], workers: int) -> bool:
        self.residual = event.get("residual", self.residual)
        self.flips = event.get("flips", self.flips)
        parts = self.tested.setdefault(event["step"], [])
        parts.append((event["right"], event["answers"]))
        if len(parts) < workers:
            return False
        self.accuracy = sum(right for right, _ in parts) / sum(answers for _, answers in parts)
        self.test_s = _smooth(self.test_s, time.monotonic() - self.stepped_at)
        return True


class Progress:
    def __init__(self, console: Console, settings: Settings) -> None:
        self.console = console
        self.settings = settings
        self.rows = {spec: Shown() for spec in settings.specs}
        self._masked = settings.sparsity is not None and isinstance(parse(settings.sparsity), Sparsifier)
        self._live = (
            Live(self._table(), console=console, refresh_per_second=REDRAWS_PER_S, transient=True)
            if console.is_terminal
            else None
        )
        self._drawn = 0.0
        stages = 1 if settings.pipeline is None else settings.pipeline.stages
        self._loss_at = {  # first rank that knows the loss
            spec: settings.workers - 1 if is_blockwise(spec) else stages - 1 for spec in settings.specs
        }

    def __enter__(self) -> Progress:
        if self._live:
            self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._live:
            self._live.stop()

    def print_line(self, line: str) -> None:
        self.console.print(line, markup=False)

    def begin(self, spec: str, seed: int, sent_mb: float = 0.0) -> None:
        row = self.rows[spec]
        self.rows[spec] = Shown(
            seed=seed,
            seeds_done=row.seeds_done,
            step_s=row.step_s,
            test_s=row.test_s,
            megabytes=sent_mb,
        )

    def skip(self, spec: str, seed: int) -> None:
        self.rows[spec].seeds_done += 1
        self.print_line(f"{spec}, seed {seed}: already done")

    def end(self, spec: str, seed: int) -> None:
        self.rows[spec].seeds_done += 1
        self.rows[spec].ended = True
        self._redraw(now=True)

    def show(self, event: dict[str, Any]) -> None:
        row = self.rows[event["method"]]
        if event["kind"] == "start" and not self._live:
            self.print_line(
                f"{event['method']}  trains with {event['optimiser']}, learning rate {event['lr']:g}"
            )
        elif event["kind"] == "lost":
            row.lost.add(event["rank"])
            self.print_line(
                f"{event['method']}  {event['message']}, after step {event['step']}; the others go on"
            )
        elif event["kind"] == "back":
            row.lost.discard(event["rank"])
            self.print_line(f"{event['method']}  rank {event['rank']} is back, from step {event['step']} on")
        elif event["kind"] == "masks":
            row.density, row.changed = event["density"], event["changed"]
        elif event["kind"] == "decision":
            self.print_line(f"{event['method']}  {event['message']}")
        elif event["kind"] == "step":
            if event["rank"] == row.first_living:
                row.add_step(event)
                if event.get("skipped"):
                    self.print_line(
                        f"{event['method']}  step {event['step']}: gradients overflow at a loss scale of"
                        f" {event['loss_scale']:g}, so all workers skip it and halve the scale"
                    )
            if event["rank"] == row.first_living + self._loss_at[event["method"]]:
                row.add_loss(event["loss"])
        elif (
            event["kind"] == "eval"
            and row.add_test(event, self.settings.workers - len(row.lost))
            and not self._live
        ):
            self.print_line(self._line(event["method"]))
        self._redraw()

    def _redraw(self, *, now: bool = False) -> None:
        if self._live and (now or time.monotonic() - self._drawn > 1 / REDRAWS_PER_S):
            self._live.update(self._table())
            self._drawn = time.monotonic()

    def _cells(self, spec: str) -> tuple[str, ...]:
        row, settings = self.rows[spec], self.settings
        seed = "-" if row.seed is None else f"{row.seed - settings.seed + 1}/{settings.seeds}"
        left = (settings.seeds - row.seeds_done) * settings.steps - (0 if row.ended else row.step)
        return (
            spec,
            seed,
            f"{row.step}/{settings.steps}",
            "-" if row.loss is None else f"{row.loss:.4f}",
            "-" if row.accuracy is None else f"{100 * row.accuracy:.2f} %",
            f"{row.megabytes:.2f}",
            "-" if row.step_s is None else f"{1000 * row.step_s:.1f} ms",
            "-" if row.step_s is None else duration(max(0, left) * row.step_s + self._tests_s(row)),
            *((self._density(row),) if self._masked else ()),
        )

    def _tests_s(self, row: Shown) -> float:
        steps, every = self.settings.steps, self.settings.eval_every or self.settings.steps
        done = steps if row.ended else row.step
        whole = -(-steps // every)
        left = (self.settings.seeds - row.seeds_done - (not row.ended)) * whole + whole - done // every
        left -= whole if row.ended else 0
        return max(0, left) * (row.test_s or 0.0)

    def _density(self, row: Shown) -> str:
        return "-" if row.density is None else f"{100 * row.density:.1f} % ({100 * row.changed:.1f} % new)"

    def _line(self, spec: str) -> str:
        _, seed, step, loss, accuracy, megabytes, step_s, left, *density = self._cells(spec)
        return (
            f"{spec}  seed {seed}  step {step}  loss {loss}  accuracy {accuracy}  sent {megabytes} MB  "
            f"step {step_s}  left {left}{self._residual(spec)}"
            + "".join(f"  density {each}" for each in density)
        )

    def _residual(self, spec: str) -> str:
        residual, flips = self.rows[spec].residual, self.rows[spec].flips
        if flips is not None:
            return f"  flips {100 * flips:.2f} %"
        return "" if residual is None else f"  residual {residual:.4f}"

    def _table(self) -> Table:
        settings = self.settings
        cut = "" if settings.pipeline is None else f", {settings.pipeline}"
        table = Table(
            title=f"{settings.task}, {format_count(settings.workers, 'worker')}{cut}",
            title_justify="left",
            box=None,
            padding=(0, 2),
        )
        table.add_column("method", style="cyan", no_wrap=True)
        heads = ("seed", "step", "loss", "accuracy", "MB sent", "step time", "left")
        for name in (*heads, "density") if self._masked else heads:
            table.add_column(name, justify="right", no_wrap=True)
        for spec in self.rows:
            table.add_row(*self._cells(spec))
        return table


def duration(seconds: float) -> str:
    """Format a duration.

    >>> duration(4.2), duration(75), duration(4000)
    ('4 s', '1:15', '1 h 06')
    """
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60}:{whole % 60:02d}"
    return f"{whole // 3600} h {whole % 3600 // 60:02d}"


def _smooth(before: float | None, value: float) -> float:
    return value if before is None else before + SMOOTHING * (value - before)

"""Rounds of a federated run: one series per seed, and their means."""

from __future__ import annotations

import json
import math
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from laconic.tools.report.ledger import CONFIG, read_events
from laconic.tools.report.series import Array
from laconic.tools.report.summary import MB, Figure


@dataclass(frozen=True)
class SeedRun:
    seed: int
    up: Array
    down: Array
    chosen_clients: Array  # per round
    failed: int
    tested: Array
    accuracy: Array
    test_loss: Array
    turns: Counter[int]  # rounds by chosen client


@dataclass(frozen=True)
class SchemeRuns:
    spec: str
    seeds: tuple[SeedRun, ...]

    @property
    def rounds(self) -> int:
        return min(len(seed.up) for seed in self.seeds)

    def mean_mb(self, way: str) -> Array:
        mean: Array = np.stack([getattr(seed, way)[: self.rounds] for seed in self.seeds]).mean(axis=0) / MB
        return mean

    def tests(self) -> tuple[Array, Array]:
        common = min(len(seed.tested) for seed in self.seeds)
        return self.seeds[0].tested[:common], np.stack([seed.accuracy[:common] for seed in self.seeds])


@dataclass(frozen=True)
class Row:
    """A line of the table. `smaller`: bytes of the first baseline divided by this scheme's, or NaN."""

    spec: str
    seeds: int
    rounds: int
    accuracy: Figure
    test_loss: Figure
    up_mb: float
    down_mb: float
    smaller: float
    up_kb_each: float
    down_kb_each: float
    failed: int


@dataclass(frozen=True)
class FederatedRun:
    config: dict[str, Any]
    schemes: tuple[SchemeRuns, ...]

    @property
    def complete(self) -> bool:
        found = [seed for scheme in self.schemes for seed in scheme.seeds]
        due = len(self.config["schemes"]) * self.config["seeds"]
        return len(found) == due and all(len(seed.up) == self.config["rounds"] for seed in found)

    def rows(self) -> list[Row]:
        rows = [_row(scheme) for scheme in self.schemes]
        first = next((row for row in rows if row.spec in self.config["against"]), None)
        total = math.nan if first is None else first.up_mb + first.down_mb
        return [Row(**{**vars(row), "smaller": total / (row.up_mb + row.down_mb)}) for row in rows]


def read_federated_run(folder: Path) -> FederatedRun:
    config = json.loads((folder / CONFIG).read_text())
    events: dict[tuple[str, int], list[dict[str, Any]]] = {}
    for event in read_events(folder):
        events.setdefault((event["scheme"], event["seed"]), []).append(event)
    schemes = []
    for spec in config["schemes"]:
        seeds = [_seed_run(seed, found) for (scheme, seed), found in sorted(events.items()) if scheme == spec]
        if seeds:
            schemes.append(SchemeRuns(spec, tuple(seeds)))
    return FederatedRun(config, tuple(schemes))


def _seed_run(seed: int, events: list[dict[str, Any]]) -> SeedRun:
    tests = [event for event in events if "accuracy" in event]

    def array(values: Any) -> Array:
        return np.array([*values], dtype=np.float64)

    return SeedRun(
        seed=seed,
        up=array(event["up"] for event in events),
        down=array(event["down"] for event in events),
        chosen_clients=array(len(event["chosen"]) for event in events),
        failed=sum(len(event["failed"]) for event in events),
        tested=array(event["round"] for event in tests),
        accuracy=array(event["accuracy"] for event in tests),
        test_loss=array(event["test_loss"] for event in tests),
        turns=Counter(client for event in events for client in event["chosen"]),
    )


def _row(scheme: SchemeRuns) -> Row:
    up, down = scheme.mean_mb("up").sum(), scheme.mean_mb("down").sum()
    each = max(1.0, float(np.mean([seed.chosen_clients[: scheme.rounds].sum() for seed in scheme.seeds])))
    return Row(
        spec=scheme.spec,
        seeds=len(scheme.seeds),
        rounds=scheme.rounds,
        accuracy=Figure.of(seed.accuracy[-1] if len(seed.accuracy) else np.nan for seed in scheme.seeds),
        test_loss=Figure.of(seed.test_loss[-1] if len(seed.test_loss) else np.nan for seed in scheme.seeds),
        up_mb=float(up),
        down_mb=float(down),
        smaller=1.0,
        up_kb_each=float(up) * 1000 / each,
        down_kb_each=float(down) * 1000 / each,
        failed=sum(seed.failed for seed in scheme.seeds),
    )

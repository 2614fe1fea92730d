"""A run's events as arrays, averaged over ranks."""

from __future__ import annotations

import json
from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from laconic.tools.report.ledger import CONFIG, read_events
from laconic.tools.report.noise import NoiseSeries, read_noise
from laconic.tools.report.notes import Notes, read_notes
from laconic.tools.report.side_by_side import BlockSeries, read_blocks

Array = NDArray[np.float64]
PER_STEP = (
    "loss",
    "payload_sent",
    "network_sent",
    "dense",
    "step_s",
    "forward_s",
    "backward_s",
    "update_s",
    "encode_s",
    "communicate_s",
    "decode_s",
)
WIRE = ("activations_sent", "gradients_sent", "replicas_sent")
WAITED = ("waited_s",)


@dataclass(frozen=True)
class SeedSeries:
    """Arrays over one training's steps and evaluations. Bytes and seconds are per worker and step."""

    seed: int
    steps: Array
    values: dict[str, Array]
    eval_steps: Array
    accuracy: Array
    test_loss: Array
    zeros: Array
    optimiser: str
    consensus: Array
    residual: Array
    flips: Array
    notes: Notes
    kept: Array  # bytes saved for backward, coded or as inputs under SWAT
    kept_dense: Array
    counted: Array  # bytes sent by hosts in a lab
    noise: NoiseSeries
    loss_scale: Array = field(default_factory=lambda: np.zeros(0))  # by step
    skipped: int = 0
    blocks: BlockSeries | None = None
    density: Array = field(default_factory=lambda: np.zeros(0))
    changed: Array = field(default_factory=lambda: np.zeros(0))

    def __getitem__(self, name: str) -> Array:
        return self.values[name]


@dataclass(frozen=True)
class MethodSeries:
    spec: str
    seeds: tuple[SeedSeries, ...]

    @property
    def common(self) -> int:
        return min((len(seed.steps) for seed in self.seeds), default=0)

    def over_seeds(self, name: str) -> Array:
        return np.stack([seed[name][: self.common] for seed in self.seeds])


@dataclass(frozen=True)
class Run:
    config: dict[str, Any]
    methods: tuple[MethodSeries, ...]

    @property
    def complete(self) -> bool:
        steps, seeds = self.config["steps"], self.config["seeds"]
        return len(self.methods) == len(self.config["methods"]) and all(
            len(method.seeds) == seeds and method.common == steps for method in self.methods
        )


def read_run(folder: Path) -> Run:
    config = json.loads((folder / CONFIG).read_text())
    grouped: dict[tuple[str, int], list[dict[str, Any]]] = defaultdict(list)
    for event in read_events(folder):
        grouped[event["method"], event["seed"]].append(event)
    methods = []
    for spec in config["methods"]:
        found = sorted(seed for method, seed in grouped if method == spec)
        seeds = [seed_series(seed, grouped[spec, seed]) for seed in found]
        seeds = [seed for seed in seeds if len(seed.steps)]
        if seeds:
            methods.append(MethodSeries(spec, tuple(seeds)))
    return Run(config, tuple(methods))


def seed_series(seed: int, events: list[dict[str, Any]]) -> SeedSeries:
    steps: dict[int, list[dict[str, Any]]] = defaultdict(list)
    evals: dict[int, list[dict[str, Any]]] = defaultdict(list)
    optimiser = ""
    counted: list[int] = []
    masks: dict[int, dict[str, Any]] = {}
    for event in events:
        if event["kind"] == "start":
            optimiser = f"{event['optimiser']} {event['lr']:g}"
        elif event["kind"] == "interface":
            counted.append(event["sent"])
        elif event["kind"] == "masks":
            masks[event["step"]] = event
        elif event["kind"] in ("step", "eval"):
            (steps if event["kind"] == "step" else evals)[event["step"]].append(event)
    done, measured = sorted(steps), sorted(evals)
    scales = [steps[step][0].get("loss_scale") for step in done]
    answers = [sum(event["answers"] for event in evals[step]) for step in measured]
    right = [sum(event["right"] for event in evals[step]) for step in measured]
    losses = [sum(event["loss_sum"] for event in evals[step]) for step in measured]
    return SeedSeries(
        seed=seed,
        steps=np.array(done, dtype=np.float64),
        values={
            name: np.array([_mean(name, steps[step]) for step in done])
            for name in (*PER_STEP, *WIRE, *WAITED)
        },
        eval_steps=np.array(measured, dtype=np.float64),
        accuracy=np.array(right, dtype=np.float64) / np.array(answers, dtype=np.float64),
        test_loss=np.array(losses, dtype=np.float64) / np.array(answers, dtype=np.float64),
        zeros=np.array([evals[step][0].get("zeros", 0.0) for step in measured], dtype=np.float64),
        optimiser=optimiser,
        consensus=np.array([evals[step][0].get("consensus", 0.0) for step in measured], dtype=np.float64),
        residual=np.array([evals[step][0].get("residual", 0.0) for step in measured], dtype=np.float64),
        flips=np.array([evals[step][0].get("flips", 0.0) for step in measured], dtype=np.float64),
        kept=np.array([_mean("kept", evals[step]) for step in measured], dtype=np.float64),
        kept_dense=np.array([_mean("kept_dense", evals[step]) for step in measured], dtype=np.float64),
        notes=read_notes(event for step in done for event in steps[step]),
        counted=np.array(counted, dtype=np.float64),
        noise=read_noise(steps),
        loss_scale=np.array([scale for scale in scales if scale is not None], dtype=np.float64),
        skipped=sum(any(event.get("skipped") for event in steps[step]) for step in done),
        blocks=read_blocks(steps),
        density=np.array([masks[step]["density"] for step in sorted(masks)], dtype=np.float64),
        changed=np.array([masks[step]["changed"] for step in sorted(masks)], dtype=np.float64),
    )


def _mean(name: str, events: list[dict[str, Any]]) -> float:
    known = [event[name] for event in events if event.get(name) is not None]
    return float(np.mean(known)) if known else 0.0

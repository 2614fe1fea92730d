"""ADMM towards tables: an LSTM on Shakespeare beside float32, straight-through training and plain rounding.

    python -m benchmarks.admm              every run that is missing
    python -m benchmarks.admm --times 4    some of them 4 times as long, to see what becomes of the gap
    python -m benchmarks.admm --width 400  some of them with a wider model, to see the same
    python -m benchmarks.admm --quick      30 steps of each in a scratch folder, to see that all works

Runs are in benchmarks/admm/results.jsonl; keys begin with another length or width. A stopped benchmark goes
on where it stopped; `make docs` writes page and picture. All runs of a seed see the same batches for equal
steps. Each variant searches its peak rate with the first seed: it tries its usual one, then twice and half of
what was best, until both neighbours of the best end with a higher loss.
"""

from __future__ import annotations

import argparse
import io
import math
import tempfile
import time
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.common.machine import machine
from benchmarks.common.rates import next_rate
from benchmarks.common.results import Results
from laconic.core.errors import NonFiniteError
from laconic.lowbit import admm, straight_through
from laconic.tools.tasks.shakespeare import LSTM, inputs, load
from laconic.tools.tasks.task import Recipe, cross_entropy

RUNS = Results(Path(__file__).with_name("results.jsonl"))
WIDTH, BATCH, STEPS, SEEDS, TESTS = 200, 16, 3000, (0, 1, 2), 15
DIVERGED = "diverged"  # key of the reason
PART = 400  # windows of the test set for the curve; the last figure is of all
EXTRA = "admm, ternary, extra-gradient"
PLAIN_EXTRA = "admm, ternary, extra-gradient, no momentum"
RATE = 3.0  # as of the task's LSTM of 128
RATES = {EXTRA: 0.1, PLAIN_EXTRA: 0.5}  # with momentum it drifts at 0.3, without it diverges at 3
FLOOR = 0.05  # of the peak rate: G moves on to the end, and the weights have to be able to follow
START, EVERY = 900, 60  # steps before the penalty; from one update of G to the next
GAMMA, GROWTH = 5e-4, 1.14  # as of one seed, in shorter runs


def penalty(times: float, every: int = EVERY, start: int = START) -> dict[str, Any]:
    """The penalty of trainings so many times as long as `STEPS`."""
    slow = {"every": max(1, round(times * every)), "start": round(times * start)}
    return {"gamma": GAMMA, "growth": GROWTH, **slow}


VARIANTS: dict[str, Any] = {
    "float": None,
    "admm, ternary": lambda m, o, t: admm(m, o, "ternary", **penalty(t)),
    "straight-through, ternary": lambda m, o, t: straight_through(m, o, "ternary"),
    "admm, binary": lambda m, o, t: admm(m, o, "binary", **penalty(t)),
    "straight-through, binary": lambda m, o, t: straight_through(m, o, "binary"),
    "admm, quinary": lambda m, o, t: admm(m, o, "quinary", **penalty(t)),
    "admm, ternary, one scale a layer": lambda m, o, t: admm(m, o, "ternary", "layer", **penalty(t)),
    "admm, ternary, default penalty": lambda m, o, t: admm(m, o, "ternary"),
    EXTRA: lambda m, o, t: admm(m, o, "ternary", **penalty(t, every=30, start=450), extragradient=True),
    PLAIN_EXTRA: lambda m, o, t: admm(m, o, "ternary", **penalty(t, every=30, start=450), extragradient=True),
}
SOME = ("float", "admm, ternary", "straight-through, ternary")
ROUNDED = ("binary", "ternary", "quinary")  # the float run's weights, rounded afterwards


def train(variant: str, rate: float, seed: int, steps: int, width: int) -> dict[str, Any]:
    """Train at a peak rate; return losses in nats a letter, in float32 and quantised, and the packed size.

    Raises `NonFiniteError` if the training diverges.
    """
    torch.set_num_threads(1)
    data, rng = load(), torch.Generator().manual_seed(seed)
    torch.manual_seed(seed)
    recipe = Recipe(lambda: LSTM(width), lr=rate, weight_decay=0.0)
    model = recipe.build()
    optimizer = recipe.optimizer(model)
    if variant == PLAIN_EXTRA:
        optimizer = torch.optim.SGD(model.parameters(), lr=rate)
    attach = VARIANTS[variant]
    handle = None if attach is None else attach(model, optimizer, steps / STEPS)
    curve, began = [], time.thread_time()
    for step in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = max(FLOOR * recipe.lr, recipe.rate(recipe.lr, step, steps))
        chosen = torch.randint(0, len(data["train_x"]), (BATCH,), generator=rng)
        loss = cross_entropy(model(inputs(data["train_x"][chosen], None)), data["train_y"][chosen])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if (step + 1) % max(1, steps // TESTS) == 0:
            x, y = data["test_x"][:PART], data["test_y"][:PART]
            point = {"step": step + 1, "loss": tested(model, x, y)}
            if handle is not None:
                with handle.quantised():
                    point["quantised"] = tested(model, x, y)
                point["residual"] = handle.residual()
            curve.append(point)
    spent = time.thread_time() - began
    row = {"variant": variant, "rate": rate, "seed": seed, "steps": steps}
    row |= {"cpu_s": round(spent, 1), "curve": curve}
    x, y = data["test_x"], data["test_y"]
    row["float"] = tested(model, x, y)
    if not math.isfinite(row["float"]):
        raise NonFiniteError(f"the test loss is {row['float']}")
    if handle is None:
        row["rounded"] = {table: rounded(model, table, x, y) for table in ROUNDED}
        row["dense"] = sum(4 * each.numel() for each in model.parameters())
    else:
        row |= packed(handle, x, y)
    return row | {"machine": machine()}


def packed(handle: Any, x: Tensor, y: Tensor) -> dict[str, Any]:
    """The packed model's loss, its bytes in memory and on disk, and whether it equals G in float32."""
    handle.finish()
    small, size = handle.pack(), handle.size()
    assert torch.equal(small(inputs(x[:20], None)), handle.model(inputs(x[:20], None)))
    files = {"file": stored(small), "dense_file": stored(handle.model)}
    about = {"smaller": size.smaller, "bits": size.bits, "packed": size.packed}
    return {"quantised": tested(small, x, y)} | about | asdict(size) | files


def rounded(model: nn.Module, table: Any, x: Tensor, y: Tensor) -> float:
    """The loss after rounding to a table, without training."""
    handle = admm(model, torch.optim.SGD(model.parameters(), lr=1.0), table)
    with handle.quantised():
        loss = tested(model, x, y)
    handle.remove()
    return loss


def tested(model: nn.Module, x: Tensor, y: Tensor) -> float:
    """Mean cross-entropy in nats over these windows."""
    model.eval()
    with torch.no_grad():
        parts = zip(x.split(250), y.split(250), strict=True)
        total = sum(len(a) * float(cross_entropy(model(inputs(a, None)), b)) for a, b in parts)
    model.train()
    return total / len(x)


def stored(model: nn.Module) -> int:
    """Bytes of the file of a `state_dict`, with all that torch adds."""
    file = io.BytesIO()
    torch.save(model.state_dict(), file)
    return file.tell()


def usual(variant: str) -> float:
    """Return the first rate of a variant's search."""
    return RATES.get(variant, RATE)


def loss_of(row: dict[str, Any]) -> float:
    """Return the loss of the quantised model, if there is one, else of the model; infinite if diverged."""
    return math.inf if DIVERGED in row else float(row.get("quantised", row["float"]))


def own_rates(rows: Iterable[dict[str, Any]]) -> dict[str, float]:
    """Return each variant's rate with the lowest loss of the first seed."""
    first = [row for row in rows if row["seed"] == SEEDS[0]]
    return {row["variant"]: row["rate"] for row in sorted(first, key=loss_of, reverse=True)}


def run_all(
    runs: Results, group: str, steps: int, width: int, seeds: tuple[int, ...], variants: list[str]
) -> None:
    """Every run that is not stored yet: the search of all rates, then the other seeds.

    A group with a name has the usual rates only.
    """

    def row(variant: str, rate: float, seed: int) -> dict[str, Any]:
        name = f"{variant.replace(', ', '-').replace(' ', '-')}-{rate:g}-{seed}"
        key = f"{group}/{name}" if group else name
        if (before := runs.get(key)) is None or before["steps"] != steps:
            try:
                before = train(variant, rate, seed, steps, width)
            except NonFiniteError as error:
                before = {"variant": variant, "rate": rate, "seed": seed, "steps": steps}
                before |= {DIVERGED: str(error), "machine": machine()}
            runs.put(key, before)
            print(variant, rate, seed, round(loss_of(before), 4), flush=True)
        return before

    own = dict(zip(variants, map(usual, variants), strict=True))
    if not group:
        for variant in variants:
            done = [each for each in runs.rows() if (each["variant"], each["seed"]) == (variant, seeds[0])]
            losses = {each["rate"]: loss_of(each) for each in done if each["steps"] == steps}
            while (rate := next_rate(losses, usual(variant))) is not None:
                losses[rate] = loss_of(row(variant, rate, seeds[0]))
            own[variant] = min(losses, key=lambda rate: losses[rate])
    for seed in seeds:
        for variant in variants:
            row(variant, own[variant], seed)


def main() -> None:
    """Run what is missing."""
    options = argparse.ArgumentParser(prog="benchmarks.admm")
    options.add_argument("--quick", action="store_true", help="few steps, one seed, in a scratch folder")
    options.add_argument("--only", action="append", choices=tuple(VARIANTS), help="this; may be repeated")
    options.add_argument("--seeds", type=int, default=len(SEEDS), help="how many seeds")
    options.add_argument("--times", type=int, default=1, help="trainings so many times as long")
    options.add_argument("--width", type=int, default=WIDTH, help="units of the model [default: %(default)s]")
    given = options.parse_args()
    other = [f"times{given.times}"] * (given.times > 1) + [f"width{given.width}"] * (given.width != WIDTH)
    variants = given.only or list(SOME if other else VARIANTS)
    if given.quick:
        with tempfile.TemporaryDirectory() as folder:
            run_all(Results(Path(folder) / "results.jsonl"), "quick", 30, WIDTH, SEEDS[:1], variants)
        return
    run_all(RUNS, "-".join(other), given.times * STEPS, given.width, SEEDS[: given.seeds], variants)


if __name__ == "__main__":
    main()

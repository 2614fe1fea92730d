"""auto() beside each of its candidates alone: seconds of a step, a link that drops, and the loss at the end.

    python -m benchmarks.auto             writes benchmarks/auto/results.json: an hour
    python -m benchmarks.auto --part steps --part drop    some of it; the file keeps what it has of the rest
    python -m benchmarks.auto --quick     one link, one round; writes only with --out

Steps: the GPT of `benchmarks.steps` on two hosts of a lab, over each link; auto() is timed after it has
decided. Drop: auto() trains at 1 Gbit/s, then at 50 Mbit/s; 60 steps after that are timed. Loss: a small GPT
on Shakespeare's plays, two workers, over each link: auto(), and the candidate whose step was fastest in a
short run of all, with 3 seeds each. Alike: the same at 100 Mbit/s and unshaped, with one seed: dense once,
auto() three times, as its choices depend on clocks. Needs what `laconic lab` needs; the losses need
LACONIC_DATA.

Bars: auto()'s step takes at most 1.1 times the best candidate's on each link; within 50 steps of the drop,
steps stay within 1.1 times the best candidate's there; its loss is at most the fastest candidate's, but for
two standard errors of the difference; its three runs end at most 1 % above dense.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.common.machine import machine
from benchmarks.steps.__main__ import WARM_UP, Ranks, timed
from benchmarks.steps.contenders import AUTO, SETTLE
from laconic.reducers.autotune import CANDIDATES
from laconic.tools.lab import Lab, Link, missing

RESULTS = Path(__file__).with_name("results.json")
FIXED = tuple(map(repr, CANDIDATES))
PARTS = ("steps", "drop", "loss", "alike")
LINKS = ("1gbit", "100mbit", None)  # None: held back by nothing but the machine
BEFORE, AFTER = "1gbit", "50mbit"
AFTERWARDS, CHUNK = 60, 4
BAR, WITHIN_STEPS, ERRORS = 1.1, 50, 2.0  # times the best candidate's step; after a drop; of a loss
MOST, ROUNDS, SEEDS = 16, 3, 3
SHORT, LONG = 40, 300  # steps of a training
RUNS, ABOVE_DENSE = 3, 0.01  # of auto() with one seed; of the test loss
Row = dict[str, Any]


def main() -> None:
    """Measure, print a line a figure, write the JSON."""
    parser = argparse.ArgumentParser(prog="benchmarks.auto")
    parser.add_argument("--quick", action="store_true", help="writes only with --out")
    parser.add_argument("--rounds", type=int, default=ROUNDS, help="of steps [default: %(default)s]")
    parser.add_argument("--part", action="append", choices=PARTS, help="may be repeated [default: all]")
    parser.add_argument("--out", type=Path, help="where the JSON goes")
    given = parser.parse_args()
    if reason := missing():
        print(f"skipped: {reason}")
        return
    links, rounds = (LINKS[:1], 1) if given.quick else (LINKS, given.rounds)
    parts = given.part or PARTS
    found: Row = {}
    if {"steps", "drop"} & {*parts}:
        with Lab(2) as lab, Ranks(lab, "gpt") as ranks:
            if "steps" in parts:
                found["steps"] = all_steps(ranks, links, rounds)
            if "drop" in parts:
                found["drop"] = drop(ranks)
    trains = not given.quick and bool(os.environ.get("LACONIC_DATA"))
    if "loss" in parts and trains:
        found["loss"] = [losses(link) for link in links]
    if "alike" in parts and trains:
        found["alike"] = [alike(link) for link in ("100mbit", None)]
    if out := given.out or (None if given.quick else RESULTS):
        before = json.loads(out.read_text()) if given.part and out.exists() else {}
        about = {} if before and "steps" not in parts else {"machine": machine(), "rounds": rounds}
        out.write_text(json.dumps(before | about | {"seeds": SEEDS} | found, indent=1) + "\n")
    for bar in bars(found):
        print(f"{'kept' if bar.kept else 'MISSED':>8}: {bar.aim}: {bar.found}", flush=True)


class Bar(NamedTuple):
    """An aim in words, what was found, and whether that keeps it."""

    aim: str
    found: str
    kept: bool


def bars(found: Row) -> list[Bar]:
    """The aims of whatever was measured."""
    rows = []
    for row in found.get("steps", ()):
        aim = f"{named(row['link'])}: a step at most {BAR:g} times the best candidate's"
        rows.append(Bar(aim, f"{row['ratio']:.2f}", row["ratio"] <= BAR))
    if drop := found.get("drop"):
        steps = adapted(drop)
        aim = f"{drop['before']} to {drop['after']}: steps stay within {BAR:g} times the best candidate's"
        ever = steps < len(drop["seconds"])
        words = f"from step {steps} on" if ever else "in none of the steps that followed"
        aim += f", from step {WITHIN_STEPS} at the latest"
        rows.append(Bar(aim, words, ever and steps <= WITHIN_STEPS))
    for each in found.get("loss", ()):
        fastest, ours = (row["test_loss"] for row in each["rows"])
        more, error = ours["mean"] - fastest["mean"], math.hypot(ours["error"], fastest["error"])
        aim = f"{named(each['link'])}: a final loss at most that of the fastest candidate"
        rows.append(Bar(aim, f"{more:+.4f} ± {error:.4f}", more <= ERRORS * error))
    for each in found.get("alike", ()):
        aim = f"{named(each['link'])}: {RUNS} runs with one seed end at most {ABOVE_DENSE:.0%} above dense"
        above = [loss / each["dense"] - 1 for loss in each["auto"]]
        rows.append(Bar(aim, ", ".join(f"{more:+.2%}" for more in above), max(above) <= ABOVE_DENSE))
    return rows


def named(link: str | None) -> str:
    """A link in words."""
    return link or "unshaped"


def adapted(drop: Row) -> int:
    """The step after the drop from which on the median of three stays as fast as it should."""
    seconds, limit = drop["seconds"], BAR * drop["best_s"]
    late = [i for i in range(len(seconds)) if statistics.median(seconds[i : i + 3]) > limit]
    return late[-1] + 1 if late else 0


def all_steps(ranks: Ranks, links: Sequence[str | None], rounds: int) -> list[Row]:
    """A row a link: each candidate's step, medians over rounds, and auto()'s against the best."""
    rows = []
    for link in links:
        seconds: dict[str, list[float]] = {spec: [] for spec in (*FIXED, AUTO)}
        said: list[str] = []
        for _ in range(rounds):
            for spec, found in seconds.items():
                found.append(one(ranks, spec, link))
            said += ranks.ask(do="said")[0]["said"]
        middle = {spec: statistics.median(found) for spec, found in seconds.items()}
        best = min(FIXED, key=lambda spec: middle[spec])
        row = {"link": link, "seconds": seconds, "best": best, "said": said}
        row["ratio"] = middle[AUTO] / middle[best]
        rows.append(row)
        print(
            f"{named(link):>8}: best {best} {middle[best]:.3f} s, auto() {middle[AUTO]:.3f} s",
            flush=True,
        )
        print("\n".join(f"          {each}" for each in said), flush=True)
    return rows


def one(ranks: Ranks, spec: str, link: str | None) -> float:
    """A step's seconds."""
    if spec == AUTO:
        ranks.over(None, do="build", contender=spec, steps=0)
        ranks.over(link, do="steps", count=SETTLE[AUTO])
    else:
        ranks.over(None, do="build", contender=spec, steps=WARM_UP)
    return float(timed(ranks, link, MOST)["step_s"])


def drop(ranks: Ranks) -> Row:
    """Steps of auto() after its link has dropped, and of the best candidate there."""
    best = min(one(ranks, spec, AFTER) for spec in FIXED)
    ranks.over(None, do="build", contender=AUTO, steps=0)
    ranks.over(BEFORE, do="steps", count=SETTLE[AUTO])
    ranks.ask(do="said")
    seconds: list[float] = []
    for _ in range(AFTERWARDS // CHUNK):
        answers = ranks.over(AFTER, do="steps", count=CHUNK)
        seconds += map(max, zip(*(each["seconds"] for each in answers), strict=True))
    said = ranks.ask(do="said")[0]["said"]
    print("\n".join(f"          {each}" for each in said), flush=True)
    return {"before": BEFORE, "after": AFTER, "best_s": best, "seconds": seconds, "said": said}


def losses(link: str | None) -> Row:
    """The loss that auto() ends with, and that of the fastest candidate."""
    short = trained(link, [*FIXED], SHORT, 1)
    best = min(short, key=lambda row: row["step_s"]["mean"])["spec"]
    rows = trained(link, [best, AUTO], LONG, SEEDS)
    for row in rows:
        print(f"{named(link):>8}: {row['spec']} test loss {row['test_loss']}", flush=True)
    return {"link": link, "steps": LONG, "rows": rows}


def alike(link: str | None) -> Row:
    """The test losses of dense and of several runs of auto() with one seed, on the GPT."""
    dense, *runs = (trained(link, [spec], LONG, 1)[0] for spec in ("dense()", *[AUTO] * RUNS))
    row: Row = {"link": link, "steps": LONG, "machine": machine()}
    row |= {"dense": dense["test_loss"]["mean"], "auto": [run["test_loss"]["mean"] for run in runs]}
    row["smaller"] = [dense["total_mb"] / run["total_mb"] for run in runs]
    print(f"{named(link):>8}: GPT, {row}", flush=True)
    return row


def trained(link: str | None, specs: Sequence[str], steps: int, seeds: int) -> list[Row]:
    """Rows of the summary of `laconic train` on two hosts of a lab."""
    options = [f"--with={spec}" for spec in specs]
    with tempfile.TemporaryDirectory() as folder, Lab(2, Link(link)) as lab:
        program = str(Path(sys.executable).with_name("laconic"))
        asked = ["--workers=2", f"--steps={steps}", f"--seeds={seeds}", f"--out={folder}", "--name=it"]
        lab.run_once([program, "train", "shakespeare", "--model=gpt", *asked, *options], timeout_s=3600)
        rows: list[Row] = json.loads((Path(folder) / "it" / "summary.json").read_text())["rows"]
    return rows


if __name__ == "__main__":
    main()

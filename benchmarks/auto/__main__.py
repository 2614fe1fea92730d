"""auto() beside each of its candidates alone: seconds of a step, a link that drops, and the loss at the end.

    python -m benchmarks.auto             writes benchmarks/auto/results.json: an hour
    python -m benchmarks.auto --part steps --part drop    some of it; the file keeps the rest
    python -m benchmarks.auto --quick     one link, one round; writes only with --out

Steps: the GPT of `benchmarks.steps` with SGD and momentum on two hosts of a lab, over each link; auto() is
timed after 150 steps, beside the candidates that it may choose and plain DDP, each next to a step without
communication, as a shared machine varies in speed. One: the same on one host. Drop: auto() trains at 1
Gbit/s, then at 50 Mbit/s; 60 steps after that are timed. Loss: a small GPT by SGD on Shakespeare's plays,
two workers, over each link: auto(), and the candidate whose step was fastest in a short run of all, with 3
seeds each. Alike: the same at 100 Mbit/s and unshaped, with one seed: dense once, auto() three times, as its
choices depend on clocks. Needs what `laconic lab` needs; the losses need LACONIC_DATA.

Bars: auto()'s step takes at most 1.1 times the best candidate's on each link, and at most 1.05 times plain
DDP's on an unshaped link and on one host; within 50 steps of the drop, steps stay within 1.1 times the best
candidate's there; its loss is at most the fastest candidate's, but for two standard errors of the difference;
its three runs end at most 1 % above dense.
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
from benchmarks.steps.__main__ import WARM_UP, Ranks, beside_alone
from benchmarks.steps.contenders import DENSE
from laconic.methods.auto import SAFE, SAFE_WITH_SGD
from laconic.reducers.autotune import CANDIDATES
from laconic.tools.lab import Lab, Link, missing

RESULTS = Path(__file__).with_name("results.json")
AUTO, SETTLE = "auto()", 150  # steps over a link before it is timed
FIXED = tuple(map(repr, CANDIDATES[: CANDIDATES.index(SAFE_WITH_SGD) + 1]))
FIXED_WITH_ADAM = FIXED[: CANDIDATES.index(SAFE) + 1]
PARTS = ("steps", "one", "drop", "loss", "alike")
LINKS = ("1gbit", "100mbit", None)  # None: held back by nothing but the machine
BEFORE, AFTER = "1gbit", "50mbit"
AFTERWARDS, CHUNK = 60, 4
BAR, OF_DENSE = 1.1, 1.05  # times the best candidate's step, and plain DDP's
WITHIN_STEPS, ERRORS = 50, 2.0  # after a drop; of a loss
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
    if "one" in parts:
        with Lab(1) as lab, Ranks(lab, "gpt") as ranks:
            found["one"] = measure((DENSE, AUTO), ranks, None, rounds)
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
        if row["link"] is None and DENSE in row["seconds"]:
            rows.append(beside_dense("unshaped", row))
    if one := found.get("one"):
        rows.append(beside_dense("one host", one))
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


def beside_dense(where: str, row: Row) -> Bar:
    """The aim that auto() costs nearly nothing where compression cannot help."""
    ratio = relative(row, AUTO) / relative(row, DENSE)
    return Bar(f"{where}: a step at most {OF_DENSE:g} times plain DDP's", f"{ratio:.2f}", ratio <= OF_DENSE)


def relative(row: Row, spec: str) -> float:
    """Times that a step takes as long as one without communication, which is timed next to it."""
    return statistics.median(a / b for a, b in zip(row["seconds"][spec], row["alone"][spec], strict=True))


def named(link: str | None) -> str:
    """A link in words."""
    return link or "unshaped"


def adapted(drop: Row) -> int:
    """The step after the drop from which on the median of three stays as fast as it should."""
    seconds, limit = drop["seconds"], BAR * drop["best_s"]
    late = [i for i in range(len(seconds)) if statistics.median(seconds[i : i + 3]) > limit]
    return late[-1] + 1 if late else 0


def all_steps(ranks: Ranks, links: Sequence[str | None], rounds: int) -> list[Row]:
    """A row a link: each candidate's step in each round, and auto()'s against the best."""
    rows = []
    for link in links:
        row = measure((DENSE, *FIXED, AUTO), ranks, link, rounds)
        best = min(FIXED, key=lambda spec: relative(row, spec))
        said: list[str] = ranks.ask(do="said")[0]["said"]
        row |= {"link": link, "best": best, "said": said, "ratio": relative(row, AUTO) / relative(row, best)}
        rows.append(row)
        print(f"{named(link):>8}: best {best}, auto() takes {row['ratio']:.2f} times as long", flush=True)
        print("\n".join(f"          {each}" for each in said), flush=True)
    return rows


def measure(specs: Sequence[str], ranks: Ranks, link: str | None, rounds: int) -> Row:
    """Seconds of a step of each spec in each round, and of one without communication at the same time."""
    row: Row = {name: {spec: [] for spec in specs} for name in ("seconds", "alone")}
    for _ in range(rounds):
        for spec in specs:
            found = beside(ranks, spec, link)
            row["seconds"][spec].append(found["step_s"])
            row["alone"][spec].append(found["alone_s"])
    return row


def beside(ranks: Ranks, spec: str, link: str | None) -> Row:
    """A step's seconds, and those of a step without communication."""
    if spec == AUTO:
        ranks.over(None, do="build", contender=spec, steps=0)
        ranks.over(link, do="steps", count=SETTLE)
    else:
        ranks.over(None, do="build", contender=spec, steps=WARM_UP)
    return beside_alone(ranks, spec, link, MOST)


def drop(ranks: Ranks) -> Row:
    """Steps of auto() after its link has dropped, and of the best candidate there."""
    best = min(beside(ranks, spec, AFTER)["step_s"] for spec in FIXED)
    ranks.over(None, do="build", contender=AUTO, steps=0)
    ranks.over(BEFORE, do="steps", count=SETTLE)
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
    short = trained(link, FIXED_WITH_ADAM, SHORT, 1)
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

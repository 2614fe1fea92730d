"""docs/zerofl.md: from benchmarks/zerofl/results.jsonl."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from typing import Any

from benchmarks.common.tables import table
from benchmarks.zerofl.__main__ import (
    ALPHAS,
    BATCH,
    CLIENTS,
    LOCAL_BATCHES,
    LOWER,
    LR_FIRST,
    LR_LAST,
    MASKS,
    PER_ROUND,
    RATIOS,
    ROUNDS,
    RUNS,
    SEEDS,
    SPARSITY,
)

SPLITS = {"iid": "Equal shares of every label", "dirichlet": "Skewed shares of the labels"}
WHOLE = {"fedavg": "dense FedAvg", "swat": "SWAT, the whole model"}
RATED = [f"{name}@{rate:g}" for name in WHOLE for rate in LOWER]  # the same at other rates
HEAD = """\
# ZeroFL's uplink masks

CIFAR-10, the small CNN of `laconic train`, {clients} clients with disjoint examples, {some} of them in
each of {rounds} rounds. A client trains {batches} batches of {batch} by plain SGD at {sparsity:g} %
sparsity by [SWAT](sparse_training.md), first and last layer dense; the rate falls from {first:g} to
{last:g} over the rounds. No model is trained to convergence: compare the rows with each other.

`make docs` writes this page from the results of `python -m benchmarks.zerofl`:
{found} of {planned} runs are done.

A sends the largest weights, B the differences at the largest weights, C the largest differences; rho =
{least:.1f} + r of each sparse layer, and unsent entries count as zero. Uplink: size of a client's message;
CSR: size by the paper's formula. Test accuracy: mean ± standard error over seeds. A seed is *collapsed* if
its loss is not finite in the end: it is counted, but is not in the mean. Rows with a rate begin there instead
of at {first:g}, and fall to a tenth of it as well.

B sends fewer entries than rho: in a round, half or more of the large weights of the dense layer get
gradients of exactly zero, since their inputs were not saved or their outputs not active, and a difference of
zero is not sent."""
Runs = dict[tuple[str, str], list[dict[str, Any]]]  # by split and name, one of each seed


def page() -> str:
    """The whole page."""
    return written(RUNS.rows())


def written(found: Sequence[dict[str, Any]]) -> str:
    """The page of these runs."""
    runs: Runs = {}
    for run in found:
        runs.setdefault((run["split"], run["name"]), []).append(run)
    planned = len(SPLITS) * SEEDS * len(names())
    lines = [
        HEAD.format(
            clients=CLIENTS,
            some=PER_ROUND,
            rounds=ROUNDS,
            batches=LOCAL_BATCHES,
            batch=BATCH,
            sparsity=100 * SPARSITY,
            first=LR_FIRST,
            last=LR_LAST,
            least=1 - SPARSITY,
            found=len(found),
            planned=planned,
        )
    ]
    for split, title in SPLITS.items():
        if rows := [cells(runs[split, name]) for name in names() if (split, name) in runs]:
            heads = ("sent", "seeds", "test accuracy, %", "uplink, kB", "smaller than dense", "CSR, kB")
            lines += ["", f"## {title}: Dirichlet({ALPHAS[split]:g})", "", *table(heads, rows)]
            lines += tuned(runs, split)
    if claims := [row for row in shape(runs) if row]:
        lines += [
            "",
            "## Comparison with the paper",
            "",
            "ResNet-18 with 90 % sparsity, 700 rounds (skew: Dirichlet(1)) in the paper; points of accuracy.",
            "",
            *table(("the paper's finding", "the paper", "here", "confirmed"), claims),
        ]
    return "\n".join(lines) + "\n"


def names() -> list[str]:
    """All runs of a split and seed, in the order of the tables."""
    masks = [f"{letter}-{ratio:g}" for letter in MASKS for ratio in RATIOS]
    return [*sorted([*WHOLE, *RATED], key=lambda name: name.partition("@")[0]), *masks]


def cells(runs: list[dict[str, Any]]) -> tuple[str, ...]:
    """One row: a mask and ratio, over its seeds."""
    first, letter, ratio = runs[0], *runs[0]["name"].partition("-")[::2]
    whole, _, rate = first["name"].partition("@")
    what = WHOLE.get(whole) or f"{letter}, `{MASKS[letter].__name__}`, r = {ratio}"
    what += f", rate {rate}" if rate else ""
    uplink = statistics.mean(run["uplink_bytes"] for run in runs)
    csr = f"{first['csr_bytes'] / 1e3:,.0f}" if first["csr_bytes"] else ""
    smaller = f"{first['dense_bytes'] / uplink:.1f} times"
    trained = [run for run in runs if not collapsed(run)]
    seeds = f"{len(trained)}" + (
        f", {len(runs) - len(trained)} collapsed" if len(trained) < len(runs) else ""
    )
    return what, seeds, percent(trained), f"{uplink / 1e3:,.0f}", smaller, csr


def collapsed(run: dict[str, Any]) -> bool:
    """Whether the loss is infinite or NaN in the end."""
    return not math.isfinite(run.get("test_loss", 0.0))


def tuned(runs: Runs, split: str) -> list[str]:
    """A sentence on dense training and plain SWAT, each at the best of its rates without a collapsed seed."""
    found = [best(runs, split, name) for name in WHOLE]
    if not all(found):
        return []
    (dense_rate, dense), (rate, sparse) = found
    return [
        "",
        f"Each at the best rate without a collapsed seed, dense FedAvg ({dense_rate}) reaches"
        f" {percent(dense)} % and plain SWAT ({rate}) {percent(sparse)} %.",
    ]


def best(runs: Runs, split: str, name: str) -> tuple[str, list[dict[str, Any]]] | None:
    """The best rate of dense training or plain SWAT, and its runs; None before a lower rate was tried."""
    rates = {f"{LR_FIRST:g}": name} | {each.partition("@")[2]: each for each in RATED if name in each}
    found = {rate: runs[split, each] for rate, each in rates.items() if (split, each) in runs}
    whole = {rate: its for rate, its in found.items() if len(its) == SEEDS and not any(map(collapsed, its))}
    if len(found) < 2 or not whole:
        return None
    return max(whole.items(), key=lambda item: statistics.mean(run["accuracy"] for run in item[1]))


def percent(runs: list[dict[str, Any]]) -> str:
    """Mean accuracy in %, with its standard error where there are several seeds."""
    values = [100 * run["accuracy"] for run in runs]
    if not values:
        return "-"
    if len(values) == 1:
        return f"{values[0]:.2f}"
    return f"{statistics.mean(values):.2f} ± {statistics.stdev(values) / len(values) ** 0.5:.2f}"


def shape(runs: Runs) -> list[tuple[str, ...]]:
    """What the paper's table shows, and whether it is so here: rows whose runs are not there are left out."""
    rows = [
        row(
            f"{SPLITS[split].lower()}: r = 0.1 above r = 0, mean of the masks",
            theirs,
            gain(runs, split, [f"{letter}-0.1" for letter in MASKS], [f"{letter}-0" for letter in MASKS]),
        )
        for split, theirs in (("iid", 5.68), ("dirichlet", 6.60))
    ]
    rows += [
        row(
            f"{SPLITS[split].lower()}: r = 0.2 {'above' if theirs > 0 else 'below'} the whole model, mask A",
            theirs,
            gain(runs, split, ["A-0.2"], ["swat"]),
        )
        for split, theirs in (("iid", -0.20), ("dirichlet", 0.42))
    ]
    return [each for each in rows if each is not None]


def gain(runs: Runs, split: str, above: list[str], below: list[str]) -> list[float]:
    """Points of accuracy between the means of two sets of runs, for each seed that all of them have."""
    sets = [
        {run["seed"]: run["accuracy"] for run in runs.get((split, name), []) if not collapsed(run)}
        for name in above + below
    ]
    higher, lower = sets[: len(above)], sets[len(above) :]
    return [
        100 * (statistics.mean(each[seed] for each in higher) - statistics.mean(each[seed] for each in lower))
        for seed in sorted(set.intersection(*(set(each) for each in sets)))
    ]


def row(finding: str, theirs: float, ours: list[float]) -> tuple[str, ...] | None:
    """A row of the comparison with the paper: open with one seed, and within one standard error."""
    if not ours:
        return None
    mean = statistics.mean(ours)
    if len(ours) == 1:
        return finding, f"{theirs:+.2f}", f"{mean:+.2f}", "open: one seed"
    error = statistics.stdev(ours) / len(ours) ** 0.5
    said = "open" if abs(mean) <= error else "yes" if mean * theirs > 0 else "**no**"
    return finding, f"{theirs:+.2f}", f"{mean:+.2f} ± {error:.2f}", said

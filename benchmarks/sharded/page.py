"""The block of docs/sharded.md: bytes and loss, from benchmarks/sharded/results.jsonl."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from benchmarks.common.tables import table
from benchmarks.sharded.__main__ import DENSE, OTHERS, SEEDS, STEPS, WITHIN, WORKERS, Contender, Row, done

PLANNED = (1 + len(OTHERS)) * len(SEEDS)


def block() -> str:
    """The block of the runs that are done."""
    return block_of({each.name: done(each) for each in (DENSE, *OTHERS)})


def block_of(runs: dict[str, list[Row]]) -> str:
    """The block of these runs, by contender."""
    count = sum(map(len, runs.values()))
    lines = [
        f"The GPT of 10.8 million parameters of `laconic train shakespeare`, AdamW, {STEPS} steps on",
        f"{WORKERS} ranks over gloo: bytes that rank 0 puts on the wire per step, headers included, and the",
        "test loss at the end, mean ± standard error over seeds. *Loss*: change from full precision at",
        "equal seeds.",
        f"`python -m benchmarks.sharded` starts the missing runs: {count} of {PLANNED} are done.",
    ]
    dense = {row["seed"]: row for row in runs[DENSE.name]}
    if not dense:
        return "\n".join(lines)
    rows = [_line(each, runs[each.name], dense) for each in (DENSE, *OTHERS) if runs[each.name]]
    heads = ("gradients", "parameters", "all-gather, MB", "smaller", "reduce-scatter, MB", "smaller")
    lines += ["", *table((*heads, "test loss", "loss, %", "seeds"), rows)]
    judged = [_judged(each, own, dense) for each in OTHERS if _above(own := runs[each.name], dense)]
    return "\n".join([*lines, "", *judged])


def _loss(row: Row) -> float:
    return float(row["curve"][-1][1])


def _above(runs: Sequence[Row], dense: dict[int, Row]) -> list[float]:
    """By how much of full precision's loss each run is above it."""
    pairs = [(_loss(row), _loss(dense[row["seed"]])) for row in runs if row["seed"] in dense]
    return [mine / full - 1 for mine, full in pairs]


def _smaller(runs: Sequence[Row], dense: dict[int, Row], what: str) -> float:
    return float(next(iter(dense.values()))[what] / runs[0][what])


def _line(each: Contender, runs: Sequence[Row], dense: dict[int, Row]) -> list[str]:
    cells = [f"`{each.spec}`", f"`{each.parameters}`"]
    for what in ("all_gather", "reduce_scatter"):
        cells += [f"{runs[0][what] / STEPS / 1e6:.2f}", f"{_smaller(runs, dense, what):.2f}"]
    losses = [_loss(row) for row in runs]
    error = f" ± {statistics.stdev(losses) / len(losses) ** 0.5:.4f}" if len(losses) > 1 else ""
    above = _above(runs, dense)
    beside = f"{100 * statistics.mean(above):+.2f}" if above else "-"
    return [*cells, f"{statistics.mean(losses):.4f}{error}", beside, str(len(runs))]


def _judged(each: Contender, runs: Sequence[Row], dense: dict[int, Row]) -> str:
    """What was asked of this contender, and whether it is so."""
    least = min(_smaller(runs, dense, what) for what in ("all_gather", "reduce_scatter"))
    above = 100 * statistics.mean(_above(runs, dense))
    fewer = "met" if least >= each.bar else "**missed**"
    near = "met" if abs(above) <= 100 * WITHIN else "**missed**"
    return (
        f"- `{each.spec}`, `{each.parameters}`: the goal of {each.bar:g} times fewer bytes is {fewer};"
        f" the goal of a loss within {100 * WITHIN:g} % is {near}."
    )

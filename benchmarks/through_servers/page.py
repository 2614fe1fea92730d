"""The part of docs/scaling.md on `down=`: from benchmarks/through_servers/results.json."""

from __future__ import annotations

from itertools import groupby
from textwrap import wrap
from typing import Any

from benchmarks.common.results import read
from benchmarks.common.tables import WIDTH, table
from benchmarks.through_servers.__main__ import WORKERS

MOST = 2.0  # times: how much what a rank sends may grow from the fewest workers to the most
Group = dict[int, dict[str, Any]]  # rows of one model and method, by workers


def section() -> list[str]:
    """Lines of the page, with a heading."""
    groups = _groups()
    few, many = min(WORKERS), max(WORKERS)
    rows = [
        (
            f"{group[many]['entries'] / 1e6:.1f} M",
            group[many]["model"],
            f"`{group[many]['spec']}`",
            *(f"{group[size]['sent'] / 1e3:,.1f}" for size in WORKERS),
            f"{growth(group):.2f}",
            f"{group[many]['dense'] / group[many]['sent']:,.0f} times",
        )
        for group in groups
    ]
    heads = ("entries", "model", "method", *map(str, WORKERS), "growth", f"smaller than dense, {many}")
    why = (
        f"With `down=` each rank serves a share of the entries. From {few} workers to {many} a rank's"
        f" traffic grows {promise()}. Large tensors are split into pieces, one per rank, and in every message"
        " each piece has its own header: in a small model a piece has few entries to send, and headers cause"
        " most of the growth."
    )
    how = (
        "kB that the busiest worker sends in a step, without packet headers, at the default densities."
        " `python -m benchmarks.through_servers` encodes all messages of one step of all ranks in one"
        " process."
    )
    return [
        "## Through servers: `down=`",
        "",
        *wrap(why, WIDTH),
        "",
        *wrap(how, WIDTH),
        "",
        *table(heads, rows),
    ]


def promise() -> str:
    """For which models what a rank sends grows by at most MOST, and by how much it does in smaller ones."""
    groups = _groups()
    above = [group for group in groups if growth(group) > MOST]
    many = max(WORKERS)
    held = [group[many]["entries"] for group in groups]
    least = min(entries for entries in held if all(entries > group[many]["entries"] for group in above))
    worst = max(growth(group) for group in groups)
    return (
        f"by a factor of at most {MOST:g} in models of {least / 1e6:g} million entries and more"
        f" ({least // many:,} a rank among {many}), and of up to {worst:.1f} with {min(held) / 1e6:g} million"
    )


def growth(group: Group) -> float:
    """What a rank sends among the most workers relative to the fewest."""
    return float(group[max(WORKERS)]["sent"] / group[min(WORKERS)]["sent"])


def _groups() -> list[Group]:
    rows = read("through_servers")["rows"]
    keyed = groupby(rows, key=lambda row: (row["entries"], row["model"], row["spec"]))
    return [{row["workers"]: row for row in found} for _, found in keyed]

"""docs/entropy.md: size of the codings of positions and levels, compared with the entropy."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import groupby
from typing import Any

from benchmarks.common.results import read
from benchmarks.common.tables import table

SOURCES = {
    "normal": "normal numbers, ResNet-50's shapes",
    "gradient": "stored gradient of a small network, with clustered large entries",
}
HEAD = """# Entropy coding

`make docs` writes this page from the results of `python -m benchmarks.entropy`.

Bits are those of whole messages. *Entropy* is empirical: it treats symbols as independent, with the
frequencies of each tensor, so a coding without further knowledge can hardly go below it. `fine_delta()`
adapts to varying gaps and goes below it if entries cluster; on independent positions this costs it some
bits."""


def page() -> str:
    """The whole page."""
    found = read("entropy")
    lines = [HEAD, "", "## Positions of the largest entries", "", *_positions(found["positions"])]
    lines += ["", "## Levels of QSGD", "", *_levels(found["levels"])]
    lines += ["", "## STC, times smaller than float32", "", *_stc(found["stc"])]
    return "\n".join([*lines, ""])


def _positions(rows: list[dict[str, Any]]) -> list[str]:
    return [
        "Bits per position, and in brackets their ratio to the entropy.",
        "",
        *table(
            ["of", "density", "entropy", *_codings(rows)],
            (
                [SOURCES[source], f"{density:g}", f"{each[0]['entropy']:.2f}", *_bits(each, ".2f")]
                for (source, density), each in _grouped(rows, "density")
            ),
        ),
    ]


def _levels(rows: list[dict[str, Any]]) -> list[str]:
    def cells(source: str, codec: str, each: list[dict[str, Any]]) -> list[str]:
        first = each[0]
        sizes = [f"{100 * first['not_zero']:.2g} %", f"{first['scale_bits']:.2g}", f"{first['entropy']:.3g}"]
        return [SOURCES[source], f"`{codec}`", *sizes, *_bits(each, ".3g")]

    return [
        "Bits per level without the scales, which have their own column; in brackets their ratio to the",
        "entropy.",
        "",
        *table(
            ["of", "codec", "not zero", "scales", "entropy", *_codings(rows)],
            (cells(source, codec, each) for (source, codec), each in _grouped(rows, "codec")),
        ),
    ]


def _stc(rows: list[dict[str, Any]]) -> list[str]:
    counted = ("message_of_all_tensors", "metered_of_weights", "metered_with_dense_vectors")
    return [
        "*Message*: one message of all tensors. *Weights* and *model*: what `Metered` counts in an",
        "exchange, for the matrices alone, and with one-dimensional tensors, which stay float32.",
        "",
        *table(
            ["of", "density", "message", "weights", "model"],
            (
                [SOURCES[row["source"]], f"{row['density']:g}", *(f"{row[name]:,.0f}" for name in counted)]
                for row in rows
            ),
        ),
    ]


def _codings(rows: list[dict[str, Any]]) -> list[str]:
    """A head for each coding, in the order of the rows."""
    return [f"`{coding}`" for coding in dict.fromkeys(row["coding"] for row in rows)]


def _grouped(rows: list[dict[str, Any]], by: str) -> Iterator[tuple[tuple[str, Any], list[dict[str, Any]]]]:
    """The rows of one table line, with its source and what else they have alike."""
    for key, group in groupby(rows, key=lambda row: (row["source"], row[by])):
        yield key, list(group)


def _bits(rows: list[dict[str, Any]], form: str) -> list[str]:
    return [f"{row['bits']:{form}} ({row['ratio']:.3f})" for row in rows]

"""docs/entropy.md: what the codings of positions and levels take, beside the entropy of what they code."""

from __future__ import annotations

import json
from itertools import groupby
from pathlib import Path
from typing import Any

RESULT = Path(__file__).parents[1] / "benchmarks" / "results" / "entropy.json"
SOURCES = {
    "normal": "normal numbers in the shapes of ResNet-50",
    "gradient": "the stored gradient of a small network, whose large entries lie in clusters",
}
HEAD = """# Entropy coding

Written by `make docs` from `benchmarks/results/entropy.json`, which `python -m benchmarks.entropy` makes.

Bits are of whole messages. *Entropy* is the empirical one, as if symbols were drawn independently with the
frequencies found in each tensor: a coding that knows no more can hardly go below it. `fine_delta()` adapts to
how gaps vary and does go below it where entries cluster; on independent positions it pays for that."""


def page() -> str:
    """The whole page."""
    found: dict[str, Any] = json.loads(RESULT.read_text())
    lines = [HEAD, "", "## Positions of the largest entries", "", *_positions(found["positions"])]
    lines += ["", "## Levels of QSGD", "", *_levels(found["levels"])]
    lines += ["", "## STC, times smaller than float32", "", *_stc(found["stc"])]
    return "\n".join([*lines, ""])


def _positions(rows: list[dict[str, Any]]) -> list[str]:
    codings = list(dict.fromkeys(row["coding"] for row in rows))
    lines = [
        "Bits a position, and in brackets over the entropy.",
        "",
        f"| of | density | entropy | {' | '.join(f'`{coding}`' for coding in codings)} |",
        "|---|---|---|" + "---|" * len(codings),
    ]
    for (source, density), group in groupby(rows, key=lambda row: (row["source"], row["density"])):
        each = list(group)
        bits = " | ".join(f"{row['bits']:.2f} ({row['ratio']:.3f})" for row in each)
        lines.append(f"| {SOURCES[source]} | {density:g} | {each[0]['entropy']:.2f} | {bits} |")
    return lines


def _levels(rows: list[dict[str, Any]]) -> list[str]:
    codings = list(dict.fromkeys(row["coding"] for row in rows))
    lines = [
        "Bits a level without the scales (their bits stand apart), and in brackets over the entropy.",
        "",
        f"| of | codec | not zero | scales | entropy | {' | '.join(f'`{coding}`' for coding in codings)} |",
        "|---|---|---|---|---|" + "---|" * len(codings),
    ]
    for (source, codec), group in groupby(rows, key=lambda row: (row["source"], row["codec"])):
        each = list(group)
        bits = " | ".join(f"{row['bits']:.3g} ({row['ratio']:.3f})" for row in each)
        first = each[0]
        lines.append(
            f"| {SOURCES[source]} | `{codec}` | {100 * first['not_zero']:.2g} % | {first['scale_bits']:.2g}"
            f" | {first['entropy']:.3g} | {bits} |"
        )
    return lines


def _stc(rows: list[dict[str, Any]]) -> list[str]:
    lines = [
        "*Message*: the bytes of one message of all tensors. *Weights* and *model*: what `Metered` counts in",
        "an exchange, of the matrices alone and with the tensors of one dimension, which stay float32.",
        "",
        "| of | density | message | weights | model |",
        "|---|---|---|---|---|",
    ]
    for row in rows:
        lines.append(
            f"| {SOURCES[row['source']]} | {row['density']:g} | {row['message_of_all_tensors']:,.0f}"
            f" | {row['metered_of_weights']:,.0f} | {row['metered_with_dense_vectors']:,.0f} |"
        )
    return lines

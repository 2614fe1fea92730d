"""Report section on parallel blocks."""

from __future__ import annotations

import html
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from laconic.tools.report.time_line import Spans, at_once, time_line

SHOWN = 10
TENTH = 10
HEADS = (
    ("boundary", "between two blocks"),
    ("activations, MB", "per step, forward, headers included"),
    ("targets, MB", "per step, back: activations and duals in one sum"),
    ("primal residual", "|X - f| / |f|, mean over the first and the last tenth of the steps"),
    (
        "dual residual",
        "|X - X of the visit before| / |f|, mean over the first and the last tenth of the steps",
    ),
)


@dataclass(frozen=True)
class BlockSeries:
    ranks: tuple[tuple[Mapping[str, Any], ...], ...]

    def mean(self, rank: int, name: str, part: slice) -> float:
        values = [float(step[name]) for step in self.ranks[rank][part]]
        return float(np.mean(values)) if values else 0.0

    def spans(self, first: int, last: int) -> list[Spans]:
        return [
            [
                (str(work), float(begin), float(end))
                for step in steps[first:last]
                for work, begin, end in step["spans"]
            ]
            for steps in self.ranks
        ]

    @property
    def common(self) -> int:
        return min(map(len, self.ranks))

    def densest(self) -> tuple[int, int]:
        """Return the SHOWN fastest steps of the second half: without a test."""
        half, last = self.common // 2, self.common
        starts = range(half, max(half + 1, last - SHOWN + 1))
        return min(
            ((start, min(start + SHOWN, last)) for start in starts), key=lambda part: self._length(*part)
        )

    def at_once(self) -> list[float]:
        return at_once(self.spans(self.common // 2, self.common))

    def _length(self, first: int, last: int) -> float:
        times = [each for spans in self.spans(first, last) for _, *pair in spans for each in pair]
        return max(times) - min(times) if times else 0.0


def read_blocks(steps: Mapping[int, Sequence[Mapping[str, Any]]]) -> BlockSeries | None:
    ranks: dict[int, list[Mapping[str, Any]]] = {}
    for step in sorted(steps):
        for event in steps[step]:
            if "blocks" in event:
                ranks.setdefault(event["rank"], []).append(event["blocks"])
    return BlockSeries(tuple(tuple(ranks[rank]) for rank in sorted(ranks))) if ranks else None


def side_by_side(found: Sequence[tuple[str, BlockSeries | None]]) -> str:
    parts = [_method(spec, series) for spec, series in found if series is not None and series.common]
    return f"<section><h2>Blocks side by side</h2>{''.join(parts)}</section>" if parts else ""


def words(shares: Sequence[float]) -> str:
    """Describe the overlap of blocks.

    >>> words([1.0, 0.8, 0.5])
    'Of the time in which any block works, two or more do in 80 %, all 3 in 50 %.'
    """
    every = f", all {len(shares)} in {100 * shares[-1]:.0f} %" if len(shares) > 2 else ""
    return f"Of the time in which any block works, two or more do in {100 * shares[1]:.0f} %{every}."


def _method(spec: str, series: BlockSeries) -> str:
    head = "".join(f'<th scope="col" title="{html.escape(note)}">{name}</th>' for name, note in HEADS)
    body = "".join(f"<tr>{_boundary(series, rank)}</tr>" for rank in range(1, len(series.ranks)))
    first, last = series.densest()
    return (
        f"<p><code>{html.escape(spec)}</code>, first seed. {words(series.at_once())} Times are of a clock on"
        " the wall: with fewer cores than blocks, work includes waiting for a core.</p>"
        f'<figure><h2>When each block works</h2><p class="note">Steps {first + 1} to {last}; gaps are'
        f" messages and waiting</p>{time_line(series.spans(first, last))}</figure>"
        f'<div class="scroll"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'
    )


def _boundary(series: BlockSeries, rank: int) -> str:
    late, tenth = slice(series.common // 2, None), max(1, series.common // TENTH)
    sent = (
        series.mean(rank - 1, "activations_sent", late) / 1e6,
        series.mean(rank, "targets_sent", late) / 1e6,
    )
    cells = [f"{value:.4g}" for value in sent]
    for name in ("primal", "dual"):
        early, end = series.mean(rank, name, slice(0, tenth)), series.mean(rank, name, slice(-tenth, None))
        cells.append(f"{early:.3g} to {end:.3g}")
    return f'<th scope="row">{rank} to {rank + 1}</th>' + "".join(f"<td>{cell}</td>" for cell in cells)

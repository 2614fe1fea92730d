"""Time line: one row per block, one bar per piece of work."""

from __future__ import annotations

from collections.abc import Sequence

Spans = list[tuple[str, float, float]]  # work, begin and end in seconds
COLOURS = {"forward": "#c2571a", "update": "#3b6fb6"}
NAMES = {"forward": "forward pass for the next block", "update": "its own sub-problem"}
WIDTH, ROW, BAR, LEFT, RIGHT, TOP, BOTTOM = 860, 38, 24, 74, 16, 34, 34


def at_once(rows: Sequence[Spans]) -> list[float]:
    """Return the shares of busy time with at least 1, 2, ... working rows.

    >>> at_once([[("a", 0.0, 2.0)], [("a", 1.0, 3.0), ("b", 3.0, 4.0)]])
    [1.0, 0.25]
    """
    edges = sorted(edge for row in rows for _, begin, end in row for edge in ((begin, 1), (end, -1)))
    spent, working, before = [0.0] * (len(rows) + 1), 0, 0.0
    for time, change in edges:
        spent[working] += time - before if working else 0.0
        working, before = working + change, time
    total = sum(spent[1:])
    return [sum(spent[least:]) / total if total else 0.0 for least in range(1, len(rows) + 1)]


def time_line(rows: Sequence[Spans]) -> str:
    begin = min((span[1] for row in rows for span in row), default=0.0)
    end = max((span[2] for row in rows for span in row), default=1.0)
    scale = (WIDTH - LEFT - RIGHT) / max(end - begin, 1e-9)
    height = TOP + ROW * len(rows) + BOTTOM
    drawn = [_key()]
    for number, row in enumerate(rows):
        y = TOP + ROW * number
        drawn.append(f'<text x="{LEFT - 10}" y="{y + BAR - 7}" text-anchor="end">block {number + 1}</text>')
        for work, start, stop in row:
            x, wide = LEFT + (start - begin) * scale, max((stop - start) * scale, 0.5)
            drawn.append(
                f'<rect x="{x:.1f}" y="{y}" width="{wide:.1f}" height="{BAR}" fill="{COLOURS[work]}"/>'
            )
    foot = TOP + ROW * len(rows)
    for tick in _ticks(1000 * (end - begin)):
        x = LEFT + tick / 1000 * scale
        drawn.append(f'<path d="M{x:.1f} {TOP}V{foot}"/><text x="{x:.1f}" y="{foot + 20}">{tick:g}</text>')
    drawn.append(f'<text x="{WIDTH - RIGHT}" y="{foot + 20}" text-anchor="end">ms</text>')
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" class="timeline" viewBox="0 0 {WIDTH} {height}"'
        ' role="img" aria-label="when each block works"><style>.timeline text{font:12px system-ui,'
        "'DejaVu Sans',sans-serif;fill:#6a675f}.timeline path{stroke:#8886;fill:none}"
        "@media(prefers-color-scheme:dark){.timeline text{fill:#9c9a93}}</style>" + "".join(drawn) + "</svg>"
    )


def _key() -> str:
    parts, x = [], float(LEFT)
    for work, colour in COLOURS.items():
        parts.append(f'<rect x="{x}" y="8" width="12" height="12" fill="{colour}"/>')
        parts.append(f'<text x="{x + 18}" y="18">{NAMES[work]}</text>')
        x += 40 + 6.6 * len(NAMES[work])
    return "".join(parts)


def _ticks(longest: float) -> list[float]:
    """Return about six round numbers from 0.

    >>> _ticks(43.0)
    [0.0, 10.0, 20.0, 30.0, 40.0]
    """
    step = 10.0 ** len(str(int(max(longest, 1.0)))) / 10
    while longest / step > 6:
        step *= 2.5 if step in (0.2, 2.0, 20.0, 200.0, 2000.0) else 2
    while longest / step < 3:
        step /= 2
    return [step * i for i in range(int(longest / step) + 1) if step * i < 0.97 * longest]

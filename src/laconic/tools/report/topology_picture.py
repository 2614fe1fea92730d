"""A topology as an SVG picture: ranks on a circle, an arrow per message."""

from __future__ import annotations

from collections import Counter
from math import pi, sin
from xml.sax.saxutils import escape

from laconic.strategies.gossip.topologies import Topology
from laconic.tools.report.arrows import CENTRE, MIDDLE, RADIUS, Arc, arrowhead, bezier, place, toward, xy

WIDTH, LEGEND, LINE = 640, 656, 22  # of the picture; top and line height of the legend
MAX_STEPS, FEW = 12, 4  # in one picture, for distinct colours; FEW if the topology never repeats
MANY = 80  # arcs above which only those of rank 0 stand out
PER_LINE = 6
Shades = tuple[tuple[int, int, int], ...]
LIGHT: Shades = ((36, 71, 155), (14, 138, 138), (186, 140, 8), (205, 84, 22), (140, 44, 122))
DARK: Shades = ((118, 156, 255), (72, 208, 188), (236, 204, 92), (250, 146, 92), (226, 132, 208))


def picture(topology: Topology, size: int, step: int | None = None) -> str:
    period = topology.period(size)
    steps = list(topology.span(size)[: MAX_STEPS if period else FEW]) if step is None else [step]
    seen: Counter[tuple[int, int]] = Counter()
    arcs = [arcs_of(topology, size, at, seen) for at in steps]
    number = sum(map(len, arcs))
    crowded = number > MANY
    heading = f"{size} ranks, {which(period, steps)}"
    below = legend(steps, {arc.head for each in arcs for arc in each}, crowded)
    height = LEGEND + LINE * len(below) - 4
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" role="img">',
        f"<title>Who sends to whom: {escape(repr(topology))} among {heading}</title>",
        f"<style>{style(len(steps), faint=max(0.1, min(0.35, 120 / number)))}</style>",
        f'<rect class="paper" width="{WIDTH}" height="{height}" rx="10"/>',
        f'<text class="head" x="{MIDDLE:g}" y="36">{escape(short(repr(topology)))}</text>',
        f'<text class="under" x="{MIDDLE:g}" y="57">{heading}</text>',
        *(drawn(each, size, f"s{shade}{' faint' * crowded}") for shade, each in enumerate(arcs)),
        *(drawn(near(each), size, f"s{shade} bold") for shade, each in enumerate(arcs) if crowded),
        *discs(size),
        *below,
        "</svg>",
    ]
    return "\n".join(parts) + "\n"


def arcs_of(topology: Topology, size: int, step: int, seen: Counter[tuple[int, int]]) -> list[Arc]:
    found = []
    for rank in range(size):
        out, into = topology.peers(rank, size, step)
        for to in out:
            if to in into and to < rank:
                continue
            pair = (min(rank, to), max(rank, to))
            found.append(Arc(rank, to, to not in into, seen[pair]))
            seen[pair] += 1
    return found


def near(arcs: list[Arc]) -> list[Arc]:
    return [arc for arc in arcs if arc.source == 0]


def drawn(arcs: list[Arc], size: int, look: str) -> str:
    curves = [(arc, *bezier(arc, size, disc(size))) for arc in arcs]
    line = "".join(f"M{xy(start)}Q{xy(bend)} {xy(end)}" for _, start, bend, end in curves)
    length = max(5.5, 0.55 * disc(size))
    heads = "".join(arrowhead(bend, end, length) for arc, _, bend, end in curves if arc.head)
    return f'<path class="line {look}" d="{line}"/>' + (
        f'<path class="tip {look}" d="{heads}"/>' if heads else ""
    )


def disc(size: int) -> float:
    return min(19.0, 0.76 * RADIUS * sin(pi / size))


def discs(size: int) -> list[str]:
    radius, found = disc(size), []
    inside = radius >= 8
    font = min(14.0, 1.05 * radius) if inside else 11.0
    for rank in range(size):
        at = place(rank, size)
        found.append(f'<circle cx="{at[0]:.1f}" cy="{at[1]:.1f}" r="{radius:.1f}"/>')
        if inside or rank % 8 == 0:
            x, y = at if inside else toward(at, (MIDDLE, CENTRE), -radius - 11)
            text = f'x="{x:.1f}" y="{y + 0.36 * font:.1f}" style="font-size:{font:.1f}px"'
            found.append(f'<text class="rank" {text}>{rank}</text>')
    return found


def which(period: int | None, steps: list[int]) -> str:
    """Name the steps that are drawn.

    >>> which(4, [0, 1, 2, 3]), which(14, [2]), which(1, [0])
    ('all 4 steps of a period', 'step 2, period 14', 'the same at every step')
    """
    if period == 1:
        return "the same at every step"
    if len(steps) == 1:
        return f"step {steps[0]}, " + (f"period {period}" if period else "never repeating")
    if period == len(steps):
        return f"all {period} steps of a period"
    return f"the first {len(steps)} " + (f"of {period} steps" if period else "steps, never repeating")


def legend(steps: list[int], heads: set[bool], crowded: bool) -> list[str]:
    lines: list[str] = []
    for first in range(0, len(steps) if len(steps) > 1 else 0, PER_LINE):
        row, y = steps[first : first + PER_LINE], LEGEND + LINE * len(lines)
        cells = []
        for column, step in enumerate(row):
            x = MIDDLE + 92 * (column - len(row) / 2) + 8
            cells.append(f'<path class="line swatch s{first + column}" d="M{x:g} {y}h22"/>')
            cells.append(f'<text class="step" x="{x + 29:g}" y="{y + 4.5:g}">step {step}</text>')
        lines.append("".join(cells))
    hints = ["messages of rank 0 are bold"] * crowded
    if False in heads:
        hints.append("a line without an arrowhead goes both ways" if True in heads else "lines go both ways")
    if hints:
        y = LEGEND + LINE * len(lines) + 6
        lines.append(f'<text class="under" x="{MIDDLE:g}" y="{y}">{"; ".join(hints)}</text>')
    return lines


def short(text: str) -> str:
    return text if len(text) <= 60 else f"{text[:57]}..."


def colour(shades: Shades, at: float) -> str:
    """Interpolate shades, `at` in 0..1.

    >>> colour(((0, 0, 0), (100, 200, 50)), 0.5)
    '#326419'
    """
    low = min(int(at * (len(shades) - 1)), len(shades) - 2)
    part = at * (len(shades) - 1) - low
    both = zip(shades[low], shades[low + 1], strict=True)
    return "#" + "".join(f"{round(one + part * (other - one)):02x}" for one, other in both)


def style(count: int, faint: float) -> str:

    def colours(shades: Shades) -> str:
        every = [colour(shades, i / max(count - 1, 1)) for i in range(count)]
        return "".join(f".line.s{i}{{stroke:{each}}}.tip.s{i}{{fill:{each}}}" for i, each in enumerate(every))

    return (
        "text{font:13px system-ui,'Segoe UI','DejaVu Sans',sans-serif;fill:#6a675f;text-anchor:middle}"
        ".head{font:600 16px ui-monospace,'DejaVu Sans Mono',monospace;fill:#1c1b19}"
        ".step{text-anchor:start}.rank{fill:#1c1b19}"
        "circle{fill:#fff;stroke:#8d897f;stroke-width:1.2}.paper{fill:#fff}"
        ".line{fill:none;stroke-width:1.6;opacity:.85}"
        f".faint{{stroke-width:.9;opacity:{faint:.2f}}}.bold{{stroke-width:2;opacity:1}}"
        ".swatch{stroke-width:3.5;opacity:1}"
        + colours(LIGHT)
        + "@media(prefers-color-scheme:dark){text{fill:#9c9a93}.head,.rank{fill:#ecebe7}"
        ".paper{fill:#16171a}circle{fill:#202226;stroke:#7d7b74}" + colours(DARK) + "}"
    )

"""A partition as an SVG picture: a bar per client, and below it a column of its kinds."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator
from itertools import count
from xml.sax.saxutils import escape

import numpy as np
from torch import Tensor

from laconic.data.partition import Deal, Kinds, classes, integers
from laconic.tools.report.picture import axis
from laconic.tools.report.topology_picture import Shades, colour, short

WIDTH, LEFT, RIGHT = 860, 70, 30
BARS_TOP, BARS, GAP = 96, 96, 46  # top and height of the bars, and gap below
HEADROOM = 1.12
TALL = (4.0, 24.0, 264.0)  # least and largest height of a row; height of all
MOST_CLIENTS, MOST_KINDS = 400, 60
LEVELS = (0.02, 0.05, 0.15, 0.35, 0.65, 1.0)  # upper ends of the shades
LIGHT: Shades = ((214, 232, 230), (128, 190, 186), (40, 134, 140), (18, 84, 106), (14, 42, 72))
DARK: Shades = ((30, 52, 56), (24, 92, 98), (34, 146, 142), (112, 204, 180), (226, 248, 218))


def picture(deal: Deal, about: str = "", kinds: Kinds | None = None, rows: str = "label") -> str:
    """Return the SVG document. `about`: the data; `rows`: name of a kind."""
    names = classes(deal.kinds if kinds is None else integers(kinds))[0].tolist()
    counts = deal.counts(kinds)
    shown = counts[:MOST_CLIENTS, :MOST_KINDS]
    clients, number = shown.shape
    low, high, whole = TALL
    tall = min(high, max(low, whole / number))
    top = BARS_TOP + BARS + GAP
    bottom = top + tall * number
    height = bottom + 84
    who = f"{deal.clients:,} client{'s' * (deal.clients > 1)}"
    every = f"{who}, {sum(deal.sizes):,} of {len(deal.kinds):,} examples"
    under = f"{about}: {every}" if about else every
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height:g}" role="img">',
        f"<title>Which examples each client has: {escape(repr(deal.partition))}, {escape(under)}</title>",
        f"<style>{style()}</style>",
        f'<rect class="paper" width="{WIDTH}" height="{height:g}" rx="10"/>',
        f'<text class="head" x="{LEFT}" y="34">{escape(short(repr(deal.partition)))}</text>',
        f'<text x="{LEFT}" y="55">{escape(under)}, seed {deal.seed}</text>',
        f'<text class="label" x="{LEFT}" y="{BARS_TOP - 14}">examples</text>',
        bars(deal.sizes[:clients]),
        f'<text class="label" x="{LEFT}" y="{top - 12}">{escape(rows)}s of each client</text>',
        row_names(names[:number], top, tall),
        *cells(shown, counts[:clients].sum(1), top, tall),
        client_names(clients, deal.clients, bottom),
        legend(bottom + 62, rows, counts.shape[1]),
        "</svg>",
    ]
    return "\n".join(part for part in parts if part) + "\n"


def across(clients: int) -> tuple[float, float]:
    pitch = (WIDTH - LEFT - RIGHT) / clients
    return pitch, pitch - min(6.0, pitch / 8)


def bars(sizes: list[int]) -> str:
    to_y, marks = axis(0.0, HEADROOM * max(sizes), 0, BARS, log=False)
    pitch, wide = across(len(sizes))
    base = BARS_TOP + BARS
    drawn = []
    for mark in marks:
        y = base - float(to_y(np.array(mark)))
        drawn.append(f'<path class="grid" d="M{LEFT} {y:.1f}h{WIDTH - LEFT - RIGHT}"/>')
        drawn.append(f'<text class="tick y" x="{LEFT - 8}" y="{y + 4:.1f}">{mark:,.0f}</text>')
    tops = [float(to_y(np.array(float(size)))) for size in sizes]
    path = "".join(
        f"M{LEFT + pitch * i:.2f} {base}v{-tall:.2f}h{wide:.2f}v{tall:.2f}z" for i, tall in enumerate(tops)
    )
    return "\n".join([*drawn, f'<path class="bar" d="{path}"/>'])


def cells(counts: Tensor, sizes: Tensor, top: float, tall: float) -> list[str]:
    clients, _ = counts.shape
    pitch, wide = across(clients)
    high = tall - min(2.0, tall / 8)
    shares = (counts / sizes[:, None]).numpy()
    paths = [""] * len(LEVELS)
    for client, kind in np.argwhere(shares > 0).tolist():
        x, y = LEFT + pitch * client, top + tall * kind
        paths[level(float(shares[client, kind]))] += f"M{x:.2f} {y:.2f}h{wide:.2f}v{high:.2f}h{-wide:.2f}z"
    return [f'<path class="s{shade}" d="{path}"/>' for shade, path in enumerate(paths) if path]


def level(share: float) -> int:
    """Return the shade of a share.

    >>> [level(share) for share in (0.01, 0.1, 0.5, 1.0)]
    [0, 2, 4, 5]
    """
    return bisect_left(LEVELS, share - 1e-6)


def row_names(names: list[int], top: float, tall: float) -> str:
    drawn = []
    for place in range(0, len(names), spaced(len(names), int(tall * len(names) // 13))):
        y = top + tall * (place + 0.5)
        drawn.append(f'<path class="grid" d="M{LEFT} {y:.1f}h{WIDTH - LEFT - RIGHT}"/>')
        drawn.append(f'<text class="tick y" x="{LEFT - 8}" y="{y + 4:.1f}">{names[place]}</text>')
    return "\n".join(drawn)


def client_names(clients: int, of: int, bottom: float) -> str:
    pitch, wide = across(clients)
    names = [
        f'<text class="tick" x="{LEFT + pitch * client + wide / 2:.1f}" y="{bottom + 16:g}">{client}</text>'
        for client in range(0, clients, spaced(clients, 20))
    ]
    word = "client" if of == clients else f"client: the first {clients} of {of:,}"
    names.append(f'<text class="tick" x="{(LEFT + WIDTH - RIGHT) / 2:g}" y="{bottom + 34:g}">{word}</text>')
    return "\n".join(names)


def spaced(number: int, most: int) -> int:
    """Return the distance of named items, for at most `most` names.

    >>> spaced(10, 20), spaced(100, 20), spaced(400, 20)
    (1, 5, 20)
    """
    steps: Iterator[int] = (factor * 10**power for power in count() for factor in (1, 2, 5))
    return next(step for step in steps if number <= step * max(most, 1))


def legend(y: float, rows: str, number: int) -> str:
    drawn = [f'<text class="step" x="{LEFT}" y="{y + 11:g}">share of its examples, up to</text>']
    x = LEFT + 178.0
    for shade, most in enumerate(LEVELS):
        drawn.append(f'<rect class="s{shade}" x="{x:g}" y="{y:g}" width="22" height="13"/>')
        drawn.append(f'<text class="step" x="{x + 28:g}" y="{y + 11:g}">{most:.0%}</text>')
        x += 80
    if number > MOST_KINDS:
        drawn.append(f'<text class="step" x="{x:g}" y="{y + 11:g}">{MOST_KINDS} of {number} {rows}s</text>')
    return "\n".join(drawn)


def style() -> str:

    def colours(shades: Shades) -> str:
        last = len(LEVELS) - 1
        return "".join(f".s{shade}{{fill:{colour(shades, shade / last)}}}" for shade in range(len(LEVELS)))

    return (
        "text{font:13px system-ui,'Segoe UI','DejaVu Sans',sans-serif;fill:#6a675f}"
        ".head{font:600 16px ui-monospace,'DejaVu Sans Mono',monospace;fill:#1c1b19}.label{fill:#1c1b19}"
        ".tick{font-size:11.5px;text-anchor:middle}.y{text-anchor:end}.step{font-size:12px}"
        ".paper{fill:#fff}.grid{stroke:#e4e1d8;fill:none}.bar{fill:#d27a45}"
        + colours(LIGHT)
        + "@media(prefers-color-scheme:dark){text{fill:#9c9a93}.head,.label{fill:#ecebe7}"
        ".paper{fill:#16171a}.grid{stroke:#33353b}.bar{fill:#f0a35e}" + colours(DARK) + "}"
    )

"""A forecast as an SVG picture: step time and bytes by number of workers, one line per method."""

from __future__ import annotations

from collections.abc import Sequence
from xml.sax.saxutils import escape

import numpy as np

from laconic.plan.network import Network
from laconic.plan.rehearsal import Rehearsed
from laconic.plan.step import Work, time_line
from laconic.report.curves import Curve
from laconic.report.picture import WIDTH, line, panel, style

LEGEND, LINE, COLUMN = 340, 20, 268  # top of the legend, heights of its lines, widths of its columns
SHORT = 29  # characters of a spec in the legend, which has it in full as a title


def picture(
    rehearsed: Sequence[Rehearsed], sizes: Sequence[int], work: Work, network: Network, title: str
) -> str:
    """The SVG document: every method, the first and then those with the fastest step at the most workers."""
    first, *others = rehearsed
    others.sort(key=lambda each: time_line(work, each, network, sizes[-1]).step_s)
    shown = [first, *others]
    x = np.array(sizes, dtype=np.float64)
    steps = [
        _curve(x, [1e3 * time_line(work, each, network, size).step_s for size in sizes]) for each in shown
    ]
    nbytes = [_curve(x, [each.nbytes(size) / 1e6 for size in sizes]) for each in shown]
    height = LEGEND + LINE * -(-len(shown) // 3)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" role="img">',
        f"<title>Forecast of step time and bytes by workers: {escape(title)}</title>",
        f"<style>{style()}</style>",
        f'<rect class="paper" width="{WIDTH}" height="{height}" rx="10"/>',
        f'<text class="head" x="56" y="32">{escape(title)}</text>',
        panel(steps, 56, "milliseconds per step, by workers", log_x=True, x_ticks=x),
        panel(nbytes, 482, "MB per step on a worker's link, each way, by workers", log_x=True, x_ticks=x),
    ]
    for i, each in enumerate(shown):
        left, y = 56 + COLUMN * (i % 3), LEGEND + LINE * (i // 3)
        name = each.spec if len(each.spec) <= SHORT else f"{each.spec[: SHORT - 3]}..."
        parts.append(f'<path {line(i)} d="M{left} {y - 4}h18"/>')
        label = f"<title>{escape(each.spec)}</title>{escape(name)}"
        parts.append(f'<text class="spec" x="{left + 25}" y="{y}">{label}</text>')
    return "\n".join([*parts, "</svg>"]) + "\n"


def _curve(x: np.ndarray, y: list[float]) -> Curve:
    values = np.array(y)
    return Curve(x, values, np.zeros_like(values))

"""A forecast as an SVG picture."""

from __future__ import annotations

from collections.abc import Sequence
from xml.sax.saxutils import escape

import numpy as np

from laconic.tools.plan.network import Network
from laconic.tools.plan.rehearsal import Rehearsed
from laconic.tools.plan.step import Work, time_line
from laconic.tools.report.curves import Curve
from laconic.tools.report.legend import LINE, WIDTH, legend, lines_of
from laconic.tools.report.picture import panel, style

LEGEND = 340


def picture(
    rehearsed: Sequence[Rehearsed], sizes: Sequence[int], work: Work, network: Network, title: str
) -> str:
    first, *others = rehearsed
    others.sort(key=lambda each: time_line(work, each, network, sizes[-1]).step_s)
    shown = [first, *others]
    x = np.array(sizes, dtype=np.float64)
    steps = [
        _curve(x, [1e3 * time_line(work, each, network, size).step_s for size in sizes]) for each in shown
    ]
    nbytes = [_curve(x, [each.nbytes(size) / 1e6 for size in sizes]) for each in shown]
    specs = [each.spec for each in shown]
    height = LEGEND + LINE * lines_of(specs)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" role="img">',
        f"<title>Forecast of step time and bytes by workers: {escape(title)}</title>",
        f"<style>{style()}</style>",
        f'<rect class="paper" width="{WIDTH}" height="{height}" rx="10"/>',
        f'<text class="head" x="56" y="32">{escape(title)}</text>',
        panel(steps, 56, "milliseconds per step, by workers", log_x=True, x_ticks=x),
        panel(nbytes, 482, "MB per step on a worker's link, each way, by workers", log_x=True, x_ticks=x),
        legend(specs, LEGEND),
    ]
    return "\n".join([*parts, "</svg>"]) + "\n"


def _curve(x: np.ndarray, y: list[float]) -> Curve:
    values = np.array(y)
    return Curve(x, values, np.zeros_like(values))

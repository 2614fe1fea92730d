"""A run as an SVG picture: training loss by bytes and by step."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from xml.sax.saxutils import escape

import numpy as np

from laconic.core.atomic_file import write_text
from laconic.tools.report.curves import Curve, loss_by_megabyte, loss_by_step
from laconic.tools.report.legend import LIGHT as LIGHT
from laconic.tools.report.legend import LINE, WIDTH, line, lines_of
from laconic.tools.report.legend import legend as legend_at
from laconic.tools.report.reaching import accuracy_by_second, target_of
from laconic.tools.report.series import Array, Run

PICTURE = "loss.svg"
HEIGHT = 372  # with a legend of one line
PANEL_WIDTH, PANEL_HEIGHT, TOP = 350, 226, 64
DARK = ("#7fb0f0", "#f0a35e", "#6fce9a", "#c79ae6", "#ee8aa5", "#d3c25a", "#66c7d4", "#b3b0a6")
LEAST_TICKS = 3
Scale = Callable[[Array], Array]


def write_picture(folder: Path, run: Run) -> Path:
    path = folder / PICTURE
    write_text(path, picture(run))
    return path


def picture(run: Run) -> str:
    by_bytes = [loss_by_megabyte(method) for method in run.methods]
    target = target_of(run.config)
    if target is None:
        right = panel(
            [loss_by_step(method) for method in run.methods], 482, "training loss by step", log_x=False
        )
    else:
        right = panel(
            [accuracy_by_second(method) for method in run.methods],
            482,
            "test accuracy, %, by seconds of training",
            log_x=True,
            log_y=False,
            mark=target,
        )
    title = f"{run.config['title']}, {run.config['workers']} workers"
    left = panel(by_bytes, 56, "training loss by MB sent per worker", log_x=True)
    specs = [method.spec for method in run.methods]
    return framed(f"Training loss by bytes sent and by step: {title}", title, [left, right], specs)


def framed(name: str, head: str, panels: Sequence[str], specs: Sequence[str]) -> str:
    height = height_of(specs)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" role="img">',
        f"<title>{escape(name)}</title>",
        f"<style>{style()}</style>",
        f'<rect class="paper" width="{WIDTH}" height="{height}" rx="10"/>',
        f'<text class="head" x="56" y="32">{escape(head)}</text>',
        *panels,
        legend(specs),
        "</svg>",
    ]
    return "\n".join(parts) + "\n"


def panel(
    curves: list[Curve],
    left: int,
    title: str,
    *,
    log_x: bool,
    x_ticks: Sequence[float] | Array = (),
    log_y: bool = True,
    mark: float | None = None,
) -> str:
    """Draw lines of positive values. `x_ticks`: by default, round numbers; `mark`: a value of y."""
    xs = np.concatenate([curve.x for curve in curves] or [np.array([1.0, 10.0])])
    ys = np.concatenate([curve.y for curve in curves] or [np.array([0.1, 1.0])])
    ys = np.append(ys[np.isfinite(ys) & (ys > 0)], [] if mark is None else [mark])
    x_low = float(xs.min(initial=1e9)) if log_x else 0.0
    to_x, found = axis(x_low, float(xs.max(initial=1e-9)), left, PANEL_WIDTH, log=log_x)
    down, y_ticks = axis(float(ys.min(initial=1e9)), float(ys.max(initial=1e-9)), 0, PANEL_HEIGHT, log=log_y)

    def to_y(values: Array) -> Array:
        flipped: Array = TOP + PANEL_HEIGHT - down(values)
        return flipped

    drawn = [f'<text class="label" x="{left}" y="{TOP - 10}">{escape(title)}</text>']
    for value in x_ticks if len(x_ticks) else found:
        at = float(to_x(np.array([value]))[0])
        drawn.append(f'<path class="grid" d="M{at:.1f} {TOP}V{TOP + PANEL_HEIGHT}"/>')
        drawn.append(f'<text class="tick" x="{at:.1f}" y="{TOP + PANEL_HEIGHT + 17}">{value:,g}</text>')
    for value in y_ticks:
        at = float(to_y(np.array([value]))[0])
        drawn.append(f'<path class="grid" d="M{left} {at:.1f}h{PANEL_WIDTH}"/>')
        drawn.append(f'<text class="tick y" x="{left - 7}" y="{at + 4:.1f}">{value:,g}</text>')
    if mark is not None:
        at = float(to_y(np.array([mark]))[0])
        drawn.append(f'<path class="mark" d="M{left} {at:.1f}h{PANEL_WIDTH}"/>')
        beside = at - 5 if at > TOP + 20 else at + 15
        drawn.append(f'<text x="{left + 4}" y="{beside:.1f}">{mark:g} %</text>')
    for i, curve in enumerate(curves):
        kept = np.isfinite(curve.y) & (curve.y > 0)
        points = zip(to_x(curve.x[kept]), to_y(curve.y[kept]), strict=True)
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
        drawn.append(f'<polyline {line(i)} points="{path}"/>')
    return "\n".join(drawn)


def axis(low: float, high: float, start: int, length: int, *, log: bool) -> tuple[Scale, list[float]]:
    high = high if high > low else low + 1.0
    if not log:
        step = _step(low, high)
        first = math.ceil(low / step - 1e-9) * step
        return (lambda values: start + (values - low) / (high - low) * length), _even(first, high, step)
    bottom, top = math.log10(low), math.log10(high)
    decades = range(math.floor(bottom), math.ceil(top) + 1)
    factors = (1, 2, 5) if top - bottom < 1.5 else (1,)
    marks = [factor * 10.0**power for power in decades for factor in factors]
    marks = [mark for mark in marks if low <= mark * (1 + 1e-9) and mark <= high * (1 + 1e-9)]
    if len(marks) < LEAST_TICKS and high < 10 * low:
        step = _step(low, high)
        marks = _even(math.ceil(low / step - 1e-9) * step, high, step)
    return (lambda values: start + (np.log10(values) - bottom) / (top - bottom) * length), marks


def _even(first: float, high: float, step: float) -> list[float]:
    return [round(first + step * i, 12) for i in range(int((high - first) / step + 1e-9) + 1)]


def _step(low: float, high: float) -> float:
    step: float = 10.0 ** math.floor(math.log10(high - low))
    return next(step * factor for factor in (0.2, 0.5, 1, 2, 5) if (high - low) / (step * factor) <= 6)


def legend(specs: Sequence[str]) -> str:
    return legend_at(specs, HEIGHT - 24)


def height_of(specs: Sequence[str]) -> int:
    return HEIGHT + LINE * (lines_of(specs) - 1)


def style() -> str:
    light = "".join(f".c{i}{{stroke:{colour}}}" for i, colour in enumerate(LIGHT))
    dark = "".join(f".c{i}{{stroke:{colour}}}" for i, colour in enumerate(DARK))
    return (
        "text{font:13px system-ui,'Segoe UI','DejaVu Sans',sans-serif;fill:#6a675f}"
        ".head{font-size:16px;font-weight:600;fill:#1c1b19}.label{fill:#1c1b19}"
        ".tick{font-size:11.5px;text-anchor:middle}.y{text-anchor:end}"
        ".spec{font-family:ui-monospace,'DejaVu Sans Mono',monospace;font-size:12.5px}"
        ".paper{fill:#fff}.grid{stroke:#e4e1d8;fill:none}.mark{stroke:#6a675f;fill:none;stroke-dasharray:2 3}"
        "polyline,[class^=c]{fill:none;stroke-width:2;stroke-linejoin:round}"
        + light
        + "@media(prefers-color-scheme:dark){text{fill:#9c9a93}.head,.label{fill:#ecebe7}"
        ".paper{fill:#16171a}.grid{stroke:#33353b}" + dark + "}"
    )

"""A task's standings as one small SVG picture: accuracy by compression ratio, one dot per method."""

from __future__ import annotations

import math
import re
from xml.sax.saxutils import escape

import numpy as np

from benchmarks.accuracy.contenders import MODELS, STEPS, WORKERS
from benchmarks.accuracy.standings import Standing
from laconic.tools.report.picture import LIGHT, Scale, axis, style
from laconic.tools.tasks import find

WIDTH, HEIGHT = 860, 520
LEFT, TOP, RIGHT, BOTTOM = 56, 64, 836, 440
ABOUT = "test accuracy, percent, over how many times less is sent than by a dense all-reduce; rings: dense"
LETTER, LINE = 6.4, 13  # pixels of a label's letter and line
LOWEST = 0.75  # of the best accuracy: what trains worse stands there, with its figure
Box = tuple[float, float, float, float]  # left, top, right, bottom


def scatter(task: str, found: list[Standing]) -> str:
    """The SVG document."""
    found = [each for each in found if not math.isnan(each.accuracy.mean)]
    best = max(100 * each.accuracy.mean for each in found)
    shown = [max(100 * each.accuracy.mean, LOWEST * best) for each in found]
    to_x, x_marks = axis(0.9, max(each.smaller for each in found) * 1.2, LEFT, RIGHT - LEFT, log=True)
    down, y_marks = axis(math.floor(min(shown) - 1), math.ceil(best + 1), 0, BOTTOM - TOP, log=False)

    def to_y(value: float) -> float:
        return BOTTOM - _at(down, value)

    title = f"{find(task).title}: {MODELS[task]}, {STEPS:,} steps, {WORKERS} workers"
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" role="img">',
        f"<title>Test accuracy over times less sent than by a dense all-reduce: {escape(title)}</title>",
        f"<style>{style()}.dot{{stroke-width:4}}.ring{{stroke-width:1.6}}.name{{font-size:10.5px}}</style>",
        f'<rect class="paper" width="{WIDTH}" height="{HEIGHT}" rx="10"/>',
        f'<text class="head" x="{LEFT}" y="32">{escape(title)}</text>',
        f'<text class="label" x="{LEFT}" y="{TOP - 10}">{ABOUT}</text>',
    ]
    for mark in x_marks:
        x = _at(to_x, mark)
        parts.append(f'<path class="grid" d="M{x:.1f} {TOP}V{BOTTOM}"/>')
        parts.append(f'<text class="tick" x="{x:.1f}" y="{BOTTOM + 17}">{mark:,g}</text>')
    for mark in y_marks:
        y = to_y(mark)
        parts.append(f'<path class="grid" d="M{LEFT} {y:.1f}H{RIGHT}"/>')
        parts.append(f'<text class="tick y" x="{LEFT - 7}" y="{y + 4:.1f}">{mark:.4g}</text>')
    families = list(dict.fromkeys(each.contender.family for each in found))
    dots = [(_at(to_x, each.smaller), to_y(value)) for each, value in zip(found, shown, strict=True)]
    taken: list[Box] = [(x - 5, y - 5, x + 5, y + 5) for x, y in dots]
    for each, value, (x, y) in zip(found, shown, dots, strict=True):
        colour = f"c{families.index(each.contender.family) % len(LIGHT)}"
        reach = 100 * each.accuracy.error
        if not math.isnan(reach):
            parts.append(
                f'<path class="{colour}" d="M{x:.1f} {to_y(value - reach):.1f}V{to_y(value + reach):.1f}"/>'
            )
        dense = each.contender.spec == each.contender.against
        kind = 'ring" r="4"' if dense else 'dot" r="2"'  # a dot is all stroke: its colour follows the style
        parts.append(f'<circle class="{colour} {kind} cx="{x:.1f}" cy="{y:.1f}"/>')
        below = f" {100 * each.accuracy.mean:.0f} %" if 100 * each.accuracy.mean < value else ""
        parts.append(_label(short(each.contender.spec) + below, x, y, taken))
    parts += [_legend(families), "</svg>"]
    return "\n".join(parts) + "\n"


def short(spec: str) -> str:
    """A spec without the names of its arguments and empty brackets.

    >>> short("server(natural(), down=natural())"), short("zero_one_adam(freeze_steps=200, double_every=9)")
    ('server(natural, natural)', 'zero_one_adam(200, 9)')
    """
    return re.sub(r"\b\w+=|\(\)", "", spec)


def _at(scale: Scale, value: float) -> float:
    return float(scale(np.array([value]))[0])


def _label(text: str, x: float, y: float, taken: list[Box]) -> str:
    """Beside its dot where there is room, else as near as can be, with a line to it."""
    width = LETTER * len(text)
    for shift in sorted(range(-260, 261, 4), key=abs):
        for left in (x + 9, x - 9 - width):
            box = (left, y + shift - LINE / 2, left + width, y + shift + LINE / 2)
            inside = box[0] >= LEFT and box[2] <= WIDTH - 6 and box[1] >= TOP - 6 and box[3] <= BOTTOM
            if inside and not any(_overlap(box, other) for other in taken):
                taken.append(box)
                end = box[0] - 2 if left > x else box[2] + 2
                leader = (
                    f'<path class="grid" d="M{x:.1f} {y:.1f}L{end:.1f} {y + shift:.1f}"/>' if shift else ""
                )
                place = f'x="{left:.1f}" y="{y + shift + 4:.1f}"'
                return f'{leader}<text class="spec name" {place}>{escape(text)}</text>'
    return ""


def _overlap(one: Box, other: Box) -> bool:
    return one[0] < other[2] and other[0] < one[2] and one[1] < other[3] and other[1] < one[3]


def _legend(families: list[str]) -> str:
    drawn, left = [], float(LEFT)
    for i, name in enumerate(families):
        drawn.append(f'<circle class="c{i % len(LIGHT)} dot" cx="{left:.0f}" cy="{HEIGHT - 28}" r="2"/>')
        drawn.append(f'<text x="{left + 11:.0f}" y="{HEIGHT - 24}">{escape(name)}</text>')
        left += 11 + 7.8 * len(name) + 22
    return "\n".join(drawn)

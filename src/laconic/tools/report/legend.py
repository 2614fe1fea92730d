"""Legend of a picture: one line if all specs fit, else three columns."""

from __future__ import annotations

from collections.abc import Sequence
from xml.sax.saxutils import escape

LEFT, WIDTH = 56, 860
LINE, COLUMN, COLUMNS = 20, 268, 3
SHORT = 29  # characters of a spec in a column
LETTER, GAP, MARK = 7.9, 26, 25
LIGHT = ("#3b6fb6", "#c2571a", "#2c8a57", "#8c4fb0", "#b03a5b", "#7a6a17", "#1d7f8c", "#77736a")
DASHES = ("", "7 4", "2 4")


def line(i: int) -> str:
    """Return the i-th line's colour, and dashes once colours repeat.

    >>> line(1), line(9), line(17)
    ('class="c1"', 'class="c1" stroke-dasharray="7 4"', 'class="c1" stroke-dasharray="2 4"')
    """
    dashes = DASHES[min(i // len(LIGHT), len(DASHES) - 1)]
    return f'class="c{i % len(LIGHT)}"' + (f' stroke-dasharray="{dashes}"' if dashes else "")


def lines_of(specs: Sequence[str]) -> int:
    """Return the legend's number of lines.

    >>> lines_of(["dense()", "fp16()"]), lines_of(["dgc(density=0.01, warmup_steps=100)"] * 4)
    (1, 2)
    """
    in_one = LEFT + sum(MARK + LETTER * len(spec) + GAP for spec in specs)
    return 1 if in_one <= WIDTH else -(-len(specs) // COLUMNS)


def shortened(specs: Sequence[str]) -> list[str]:
    """Return specs cut at their ends to fit a column, or in the middle if several have the same beginning.

    >>> shortened(["topk()", "diloco(every=30, momentum=0.9)"])
    ['topk()', 'diloco(every=30, momentum=...']
    >>> shortened(["diloco(every=30, momentum=0.9)", "diloco(every=30, momentum=0.9, fragments=3)"])
    ['diloco(every=...omentum=0.9)', 'diloco(every=...fragments=3)']
    """
    cut = [spec if len(spec) <= SHORT else f"{spec[: SHORT - 3]}..." for spec in specs]
    half = (SHORT - 3) // 2
    return [
        f"{spec[:half]}...{spec[-half:]}" if cut.count(name) > 1 else name
        for spec, name in zip(specs, cut, strict=True)
    ]


def legend(specs: Sequence[str], top: float) -> str:
    drawn, left = [], float(LEFT)
    single = lines_of(specs) == 1
    names = specs if single else shortened(specs)
    for i, (spec, name) in enumerate(zip(specs, names, strict=True)):
        x = left if single else LEFT + COLUMN * (i % COLUMNS)
        y = top if single else top + LINE * (i // COLUMNS)
        title = "" if name == spec else f"<title>{escape(spec)}</title>"
        drawn.append(f'<path {line(i)} d="M{x:.0f} {y - 4:.0f}h18"/>')
        drawn.append(f'<text class="spec" x="{x + MARK:.0f}" y="{y:.0f}">{title}{escape(name)}</text>')
        left += MARK + LETTER * len(spec) + GAP
    return "\n".join(drawn)

"""Picture of a pipeline's traffic per step: a bar per method."""

from __future__ import annotations

import html
from collections.abc import Sequence

from laconic.tools.report.legend import LIGHT

PARTS = ("activations up", "their gradients down", "among replicas")
WIDTH, LEFT, RIGHT, TOP, ROW, BAR = 1100, 12, 90, 34, 46, 16


def wire_parts(bars: Sequence[tuple[str, tuple[float, float, float]]]) -> str:
    """Return each method's MB as SVG.

    >>> wire_parts([("dense()", (1.0, 1.0, 2.0))]).count("<rect")
    6
    """
    longest = max((sum(values) for _, values in bars), default=0.0)
    scale = (WIDTH - LEFT - RIGHT) / max(longest, 1e-12)
    drawn, x = [], float(LEFT)
    for colour, name in zip(LIGHT, PARTS, strict=False):
        drawn.append(f'<rect x="{x:.0f}" y="6" width="12" height="12" fill="{colour}"/>')
        drawn.append(f'<text x="{x + 18:.0f}" y="16">{name}</text>')
        x += 44 + 6.6 * len(name)
    for number, (spec, values) in enumerate(bars):
        y, x = TOP + ROW * number, float(LEFT)
        drawn.append(f'<text x="{LEFT}" y="{y + 12}" class="spec">{html.escape(spec)}</text>')
        for colour, name, value in zip(LIGHT, PARTS, values, strict=False):
            wide = value * scale
            drawn.append(
                f'<rect class="part" x="{x:.1f}" y="{y + 18}" width="{wide:.1f}" height="{BAR}"'
                f' fill="{colour}"><title>{name}: {value:.4g} MB</title></rect>'
            )
            x += wide
        drawn.append(f'<text x="{x + 8:.1f}" y="{y + 31}">{sum(values):.3g} MB</text>')
    height = TOP + ROW * len(bars)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" class="wireparts" viewBox="0 0 {WIDTH} {height}"'
        ' role="img" aria-label="MB of a step by what they are"><style>.wireparts text{font:12px system-ui,'
        "'DejaVu Sans',sans-serif;fill:#6a675f}.wireparts .spec{font-family:ui-monospace,'DejaVu Sans Mono',"
        "monospace}@media(prefers-color-scheme:dark){.wireparts text{fill:#9c9a93}}</style>"
        + "".join(drawn)
        + "</svg>"
    )

"""Report section on gradient noise."""

from __future__ import annotations

import html
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

PARTS = 4


@dataclass(frozen=True)
class NoiseSeries:
    """Noise of one training by step, mean over ranks; and the share of entries measured."""

    steps: NDArray[np.float64]
    variance: NDArray[np.float64]
    signal: NDArray[np.float64]
    share: float

    def scale(self, low: float = 0.0, high: float = 1.0) -> float:
        count = len(self.steps)
        chosen = slice(math.floor(low * count), max(math.floor(low * count) + 1, math.ceil(high * count)))
        if not count:
            return math.nan
        variance, signal = float(self.variance[chosen].mean()), float(self.signal[chosen].mean())
        return max(variance, 0.0) / signal if signal > 0 else math.inf


def read_noise(steps: Mapping[int, Iterable[Mapping[str, Any]]]) -> NoiseSeries:
    found = {
        step: [event["noise"] for event in events if "noise" in event]
        for step, events in sorted(steps.items())
    }
    means = {step: np.mean(each, axis=0) for step, each in found.items() if each}
    table = np.array([*means.values()], dtype=np.float64).reshape(-1, 3)
    share = float(table[0, 2]) if len(table) else 0.0
    return NoiseSeries(np.array([*means], dtype=np.float64), table[:, 0], table[:, 1], share)


def noise_section(series: Iterable[tuple[str, NoiseSeries]], batch: int, workers: int) -> str:
    rows = [_row(spec, noise, batch, workers) for spec, noise in series if len(noise.steps)]
    if not rows:
        return ""
    heads = "".join(f"<th scope='col'>{text}</th>" for text in _heads())
    return (
        "<section><h2>How large a batch would pay</h2>"
        f"<p class='note'>The gradient noise scale, in examples a step over all workers, by quarter of the"
        f" training; this run has {batch * workers:,}. Well below the noise scale, doubling the batch"
        " nearly halves the steps; far above it, it saves hardly any. McCandlish et al. 2018,"
        " arXiv:1812.06162; first seed; on the entries that a method sums as they are.</p>"
        f"<table><thead><tr>{heads}</tr></thead><tbody>{''.join(rows)}</tbody></table></section>"
    )


def _heads() -> list[str]:
    quarters = [f"{number} of {PARTS}" for number in range(1, PARTS + 1)]
    return ["method", *quarters, "entries measured, %", "scaling pays up to"]


def _row(spec: str, noise: NoiseSeries, batch: int, workers: int) -> str:
    quarters = [batch * noise.scale(n / PARTS, (n + 1) / PARTS) for n in range(PARTS)]
    late = batch * noise.scale(0.5, 1.0)
    cells = [words(value) for value in quarters]
    cells += [f"{100 * noise.share:.3g}", advice(late, batch * workers)]
    return (
        f"<tr><th scope='row'><code>{html.escape(spec)}</code></th>"
        + "".join(f"<td>{cell}</td>" for cell in cells)
        + "</tr>"
    )


def words(scale: float) -> str:
    """Format a noise scale.

    >>> words(1234.5), words(math.inf), words(7.2)
    ('1,200', 'no signal left', '7')
    """
    if math.isnan(scale):
        return "-"
    if math.isinf(scale):
        return "no signal left"
    return f"{int(float(f'{scale:.2g}')):,}"


def advice(scale: float, batch: int) -> str:
    """Interpret the noise scale for a batch size.

    >>> advice(1000.0, 128)
    '1,000: this batch has room to grow 7.8 times'
    >>> advice(100.0, 400)
    '100: this batch is 4.0 times as large'
    """
    if not math.isfinite(scale) or scale <= 0:
        return words(scale)
    ratio = scale / batch
    if ratio >= 1:
        return f"{words(scale)}: this batch has room to grow {ratio:.1f} times"
    return f"{words(scale)}: this batch is {1 / ratio:.1f} times as large"

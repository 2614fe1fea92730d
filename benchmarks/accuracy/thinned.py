"""A training's curves, thinned to what a JSON file can keep."""

from __future__ import annotations

from laconic.tools.report.curves import accuracy_by_step, loss_by_megabyte, loss_by_step
from laconic.tools.report.series import MethodSeries

KEPT = 60  # points of a curve


def curves(method: MethodSeries, kept: int = KEPT) -> dict[str, dict[str, list[float]]]:
    """Name of a curve to its x, y and standard error."""
    made = {
        "test accuracy, percent, by step": accuracy_by_step(method),
        "training loss by step": loss_by_step(method),
        "training loss by MB sent": loss_by_megabyte(method),
    }
    out = {}
    for name, curve in made.items():
        every = max(1, len(curve.x) // kept)
        parts = {"x": curve.x, "y": curve.y, "error": curve.error}
        out[name] = {key: [round(float(v), 5) for v in values[::every]] for key, values in parts.items()}
    return out

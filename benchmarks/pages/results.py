"""The result files of benchmarks, and how their figures are written."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parents[1] / "results"


def read(name: str) -> dict[str, Any]:
    """One of the result files."""
    found: dict[str, Any] = json.loads((RESULTS / f"{name}.json").read_text())
    return found


def plus_minus(figure: dict[str, float | None], scale: float = 1.0, digits: int = 2) -> str:
    """`mean ± standard error` of a figure; one seed has no error."""
    error = "" if figure["error"] is None else f" ± {scale * figure['error']:.{digits}f}"
    return f"{scale * (figure['mean'] or 0.0):.{digits}f}{error}"

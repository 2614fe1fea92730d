"""Summary of the results of all parts, as text for a terminal of 12,000 characters."""

from __future__ import annotations

from typing import Any

SHOWN = 30  # failures
WIDTH = 190
Result = dict[str, Any]


def summary(found: list[tuple[str, Result | None]]) -> str:
    """Return a line for each process, the figures of the timed parts, and the first failures."""
    lines = [f"{'part':<18}{'passed':>8}{'failed':>8}{'skipped':>9}{'s':>7}  end"]
    failed: list[str] = []
    for name, result in found:
        if result is None:
            lines.append(f"{name:<18}{'-':>8}{'-':>8}{'-':>9}{'-':>7}  it wrote nothing")
            continue
        rows = result["rows"]
        passed, wrong = (sum(row.get("ok") is each for row in rows) for each in (True, False))
        skipped = sum("skipped" in row for row in rows)
        end = "complete" if result["finished"] else "ENDED EARLY"
        lines.append(f"{name:<18}{passed:>8}{wrong:>8}{skipped:>9}{result['seconds']:>7.0f}  {end}")
        failed += [f"FAILED {name}: {_reason(row)}"[:WIDTH] for row in rows if row.get("ok") is False]
    for name, result in found:
        if result is not None:
            lines += _figures(name.split(".")[0], result["rows"])
    lines += failed[:SHOWN]
    if len(failed) > SHOWN:
        lines.append(f"and {len(failed) - SHOWN} more failures")
    return "\n".join(lines)


def _reason(row: Result) -> str:
    """Return a failed row in one line.

    >>> _reason({"name": "a", "ok": False, "failures": ["x"]})
    "a: failures=['x']"
    """
    rest = ", ".join(f"{key}={value}" for key, value in row.items() if key not in ("name", "ok"))
    return f"{row['name']}: {rest}"


def _figures(part: str, rows: list[Result]) -> list[str]:
    """Return the lines of a part that measures something."""
    lines = [_line(part, row) for row in rows if "figures" in row]
    return [f"{part}:", *lines] if lines else []


def _line(part: str, row: Result) -> str:
    mark = {True: "ok  ", False: "FAIL", None: "    "}[row.get("ok")]
    figures = " ".join(f"{key} {_shown(value)}" for key, value in row["figures"].items())
    return f"  {mark} {row['name']}: {figures}"[:WIDTH]


def _shown(value: Any) -> str:
    return f"{value:.3g}" if isinstance(value, float) else str(value)

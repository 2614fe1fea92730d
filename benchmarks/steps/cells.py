"""Cells and rows that the parts of docs/steps.md share."""

from __future__ import annotations

from typing import Any

from benchmarks.steps.contenders import WHOLE

Rows = dict[tuple[str, str], dict[str, Any]]  # by link and contender


def by_place(workload: dict[str, Any]) -> Rows:
    """Return the rows by link and contender."""
    return {(row["link"], row["contender"]): row for row in workload["rows"]}


def links(workload: dict[str, Any]) -> list[str]:
    """Return the links that were measured, in order."""
    return list(dict.fromkeys(row["link"] for row in workload["rows"]))


def spelled(name: str) -> str:
    """Return a contender for a table, with its spec as code."""
    spec = name.removesuffix(WHOLE)
    return f"`{spec}`{name.removeprefix(spec)}" if "(" in name else name


def bar(what: str, figure: float, least: float, digits: int = 2) -> tuple[str, str, str]:
    """Return a row of the table of goals."""
    return what, f"{figure:.{digits}f}", "yes" if figure >= least else "**no**"

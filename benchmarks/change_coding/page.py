"""The block of docs/pipelines.md: errors of change coding by epoch."""

from __future__ import annotations

from benchmarks.common.results import read
from benchmarks.common.tables import table

SHOWN = (1, 2, 4, 8)  # epochs after the first
NOTE = (
    "Relative error of the activation that arrives, |arrived - a| / |a|, on normal activations that change by"
    " 0.1 · 0.73^epoch of themselves in each epoch; mean over {seeds} seeds, `python -m"
    " benchmarks.change_coding`. No network is trained here."
)


def block() -> str:
    """One row for each coding, dropout and way of keeping."""
    found = read("change_coding")
    rows = []
    for name in ("settling", "dropout", "keeping"):
        for each in found[name]:
            if name != "settling" and not each["drop"] and each["keep"] == "dense()":
                continue  # shown above
            cells = [f"`{each['spec']}`", f"{100 * each['drop']:g} %", f"`{each['keep']}`"]
            rows.append([*cells, *(f"{each['errors'][epoch]:.4f}" for epoch in SHOWN)])
    heads = ["coding", "dropout", "keep", *(f"epoch {epoch + 1}" for epoch in SHOWN)]
    return "\n".join([NOTE.format(seeds=found["settling"][0]["seeds"]), "", *table(heads, rows)])

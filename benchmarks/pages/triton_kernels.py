"""Table of the Triton kernels: registers and instructions, as compiled for GPUs."""

from __future__ import annotations

import json
from pathlib import Path

FILE = Path(__file__).parents[2] / "tests" / "triton" / "kernels.json"


def block() -> str:
    """Return one row a kernel: registers on three targets, and static instructions an element on sm_90."""
    found = json.loads(FILE.read_text())
    lines = [
        f"| compiled by Triton {found['triton']} | registers sm_80; sm_90; gfx942 | instructions |",
        "|---|---|---|",
    ]
    for row in found["rows"]:
        registers = "; ".join(str(row[target]["registers"]) for target in ("sm_80", "sm_90", "gfx942"))
        lines.append(f"| {row['kernel']} | {registers} | {row['sm_90']['per_element']:.0f} |")
    return "\n".join(lines)

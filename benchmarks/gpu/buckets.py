"""The table of waits and launches of one bucket, which `tests.device.measure` counts without a GPU.

    python -m tests.device.measure --out benchmarks/gpu/results/buckets.json
    python -m tests.device.measure --others --matrices 1 54 \
        --out benchmarks/gpu/results/buckets_others.json
    TRITON_INTERPRET=1 .venv-triton-3.7.1/bin/python -m tests.device.measure --matrices 1 54 161 \
        --out benchmarks/gpu/results/buckets_triton.json
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from benchmarks.common.tables import table

RESULTS = Path(__file__).parent / "results"
CODES = {"before": "buckets_before", "plain torch": "buckets", "Triton": "buckets_triton"}
OTHERS = {"before": "buckets_others_before", "plain torch": "buckets_others"}
MATRICES, RANKS = (1, 54, 161), (2, 8)


def buckets(codes: dict[str, str] = CODES, matrices_of: tuple[int, ...] = MATRICES) -> str:
    """Return the table: by method, code, number of ranks and of matrices."""
    found = {code: _read(f"{name}.json") for code, name in codes.items()}
    methods = dict.fromkeys(row["method"] for row in found["before"])
    heads = [f"{ranks} ranks: {matrices}" for ranks in RANKS for matrices in matrices_of]
    rows = []
    for method in methods:
        for code, measured in found.items():
            cells = {
                (row["matrices"], row["ranks"]): f"{row['waits']:,} / {row['launches']:,}"
                for row in measured
                if row["method"] == method
            }
            known = [cells.get((matrices, ranks), "") for ranks in RANKS for matrices in matrices_of]
            rows.append((method if code == "before" else "", code, *known))
    return "\n".join(table(("method", "code", *heads), rows))


def _read(name: str) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = json.loads((RESULTS / name).read_text())
    return rows


def others() -> str:
    """Return the table of methods without a separate budget."""
    return buckets(OTHERS, MATRICES[:2])


BLOCKS = {"gpu_buckets": buckets, "gpu_other_buckets": others}

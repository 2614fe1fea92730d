"""Damaged wires through all implementations of the kernels on this machine, in parts.

    python -m benchmarks.faults.wires --parts 10              ten more parts of 200,000 wires
    python -m benchmarks.faults.wires --parts 2 --sanitize    with AddressSanitizer and UBSan

Each part has another seed. The command ends with an error if a decoder crashes, or if it returns numbers that
are not finite or differ between implementations. Counts by part are in benchmarks/faults/wires.jsonl.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from pathlib import Path

from tests.native.fuzz import Sanitizer, fuzz, sanitized

from benchmarks.common.machine import machine
from benchmarks.common.results import Results, Row
from laconic import kernels

PARTS = Results(Path(__file__).with_name("wires.jsonl"))
COUNT = 200_000  # wires in a part; the first parts had a tenth of it
FIRST_SEED = {False: 1_000, True: 2_000}  # whether sanitized


def do(seed: int, workers: int, sanitizer: Sanitizer | None) -> Row:
    """Decode the wires of a part."""
    began = time.monotonic()
    outcomes = fuzz(COUNT, workers, seed, sanitizer)
    refused = sum(number for name, number in outcomes.items() if name.endswith("refused"))
    return {
        "wires": COUNT,
        "refused": refused,
        "sanitized": sanitizer is not None,
        "implementations": list(kernels.runnable()),
        "took_s": round(time.monotonic() - began, 1),
        "machine": machine(),
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--parts", type=int, default=1)
    parser.add_argument("--workers", type=int, default=2, help="processes")
    parser.add_argument("--sanitize", action="store_true")
    asked = parser.parse_args()
    seed = FIRST_SEED[asked.sanitize]
    with tempfile.TemporaryDirectory() as folder:
        sanitizer = sanitized(Path(folder)) if asked.sanitize else None
        for _ in range(asked.parts):
            while f"{seed}" in PARTS:
                seed += 1
            row = do(seed, asked.workers, sanitizer)
            PARTS.put(f"{seed}", row)
            print(f"seed {seed}: {row['refused']:,} of {COUNT:,} refused, {row['took_s']} s", flush=True)


if __name__ == "__main__":
    main()

"""Checks and timings of the CUDA path, in parts with deadlines.

    python -m benchmarks.gpu --call 1 --out DIR          correctness, bandwidth and steps; at most 420 s
    python -m benchmarks.gpu --call 2 --out DIR          training and laws; at most 300 s
    python -m benchmarks.gpu --only step,bits            these parts alone
    python -m benchmarks.gpu --device cpu                try it without a GPU, with small sizes

Nothing is installed and no native code is needed: run it from the repository with PYTHONPATH=src. Each
process of a part writes a JSON file, whole, after every row. The exit code is 1 if any check fails or a part
does not reach its end.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

from benchmarks.gpu.launch import launch
from benchmarks.gpu.parts import chosen

LIMITS = {"1": 420.0, "2": 300.0}


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--call", choices=sorted(LIMITS), default="1", help="which parts; default: 1")
    parser.add_argument("--only", help="parts, separated by commas, instead of all of a call")
    parser.add_argument("--seconds", type=float, help="for all parts together; default: 420 or 300")
    parser.add_argument("--out", type=Path, default=Path("runs/gpu"), help="folder of the results")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    for name, kind in (("part", str), ("shard", str), ("end", float)):
        parser.add_argument(f"--{name}", type=kind, help=argparse.SUPPRESS)  # of a process of a part
    options = parser.parse_args()
    os.environ.setdefault("PYTHONHASHSEED", "0")
    options.out.mkdir(parents=True, exist_ok=True)
    if options.part is not None:
        from benchmarks.gpu.child import child

        child(options)
    try:
        parts = chosen(options.only, options.call)
    except ValueError as error:
        parser.error(str(error))
    seconds = options.seconds if options.seconds is not None else LIMITS[options.call]
    return launch(parts, options.out.resolve(), options.device, seconds)


if __name__ == "__main__":
    sys.exit(main())

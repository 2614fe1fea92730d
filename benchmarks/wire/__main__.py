"""Bytes on the wire: `Metered` and `handle.stats()` compared with the counters of the network interface.

    python -m benchmarks.wire                      2, 3 and 4 ranks; writes benchmarks/wire/results.json
    python -m benchmarks.wire --quick --out FILE   2 ranks, the larger messages: what the test runs

Each rank is a process on a host of `laconic.tools.lab`, with one Ethernet interface of MTU 1500, whose
counters see the packets of a real link. A link 'free' is as fast as memory; '200mbit' is held back by a
token bucket each way. Needs what `laconic lab` needs.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from benchmarks.common.machine import machine
from benchmarks.wire.rank import STEPS, Case
from laconic.tools.lab import Lab, Link, missing
from laconic.tools.lab.link import FREE

RESULTS = Path(__file__).with_name("results.json")
ROOT = Path(__file__).parents[2]
LIMIT_S = 600  # of all cases of one world
MB = 1_000_000
COLLECTIVES = ("all_reduce", "all_gather", "broadcast", "exchange")
QUICK: list[Case] = [
    ("all_reduce", MB),
    ("all_gather", MB),
    ("all_gather", 4 * MB),
    ("topk(density=0.2)", 6 * MB),
]
FULL: list[Case] = [
    *((collective, n) for collective in COLLECTIVES for n in (MB, 4 * MB)),
    *((spec, 6 * MB) for spec in ("dense()", "fp16()", "dgc(density=0.2)", "topk(density=0.2)")),
    ("all_reduce", 10_000),
    ("all_gather", 10_000),
]


def main() -> None:
    """Measure, print a line a case, write the JSON."""
    parser = argparse.ArgumentParser(prog="benchmarks.wire")
    parser.add_argument("--quick", action="store_true", help="2 ranks, a few cases; writes only with --out")
    parser.add_argument("--out", type=Path, help="where the JSON goes")
    arguments = parser.parse_args()
    reason = missing()
    if reason:
        print(f"skipped: {reason}")
        return
    worlds = [(size, link) for link in ("200mbit", FREE) for size in (2, 3, 4)]
    rows: list[dict[str, Any]] = []
    for size, link in worlds[:1] if arguments.quick else worlds:
        measured = measure(size, link, QUICK if arguments.quick else FULL)
        print("\n".join(map(line, measured)), flush=True)
        rows += measured
    out = arguments.out or (None if arguments.quick else RESULTS)
    if out:
        out.parent.mkdir(exist_ok=True)
        out.write_text(json.dumps({"machine": machine(), "steps": STEPS, "rows": rows}, indent=1) + "\n")


def measure(size: int, link: str, cases: list[Case]) -> list[dict[str, Any]]:
    """A row a case: the rank on which model and counter differ most."""
    command = [sys.executable, "-m", "benchmarks.wire.rank", json.dumps(cases)]
    environment = {"TORCH_CPP_LOG_LEVEL": "ERROR", "PYTHONPATH": str(ROOT)}
    with Lab(size, Link(None if link == FREE else link)) as lab:
        told = [json.loads(text) for text in lab.run(command, env=environment, timeout_s=LIMIT_S)]
    rows = []
    for index, (what, nbytes) in enumerate(cases):
        worst = max((of_rank[index] for of_rank in told), key=lambda row: abs(error(row)))
        case = {"ranks": size, "link": link, "what": what, "nbytes": nbytes}
        rows.append({**case, **worst, "error": round(error(worst), 5)})
    return rows


def error(row: dict[str, Any]) -> float:
    """By how much the model is off, of what both directions counted together."""
    counted = row["counted_sent"] + row["counted_received"]
    return float((row["network_sent"] + row["network_received"]) / counted - 1)


def line(row: dict[str, Any]) -> str:
    """A row, for the eye; bytes are of one step."""
    return (
        f"{row['ranks']} ranks {row['link']:>7}  {row['what']:<18} {row['nbytes']:>9,} B"
        f"  payload {row['payload_sent']:>10,.0f}"
        f"  wire {row['network_sent']:>10,.0f} + {row['network_received']:>10,.0f}"
        f"  counted {row['counted_sent']:>10,.0f} + {row['counted_received']:>10,.0f}  {row['error']:+.2%}"
    )


if __name__ == "__main__":
    main()

"""Bytes on the wire: what `Metered` and `handle.stats()` say, against the counters of the network interface.

    sudo python -m benchmarks.wire                      2, 3 and 4 ranks; writes benchmarks/results/wire.json
    sudo python -m benchmarks.wire --quick --out FILE   2 ranks, the larger messages: what the test runs

Each rank is a process in a network namespace of its own, with one Ethernet interface of MTU 1500 on a bridge
in one more namespace. Segmentation offload is off, so that counters see the packets of a real link. A link
'free' is as fast as memory; '200mbit' is held back by a token bucket. Needs root and iproute2.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from benchmarks.machine import machine
from benchmarks.wire_rank import STEPS, Case

RESULTS = Path(__file__).parent / "results" / "wire.json"
ROOT = Path(__file__).parent.parent
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
    worlds = [(size, link) for link in ("200mbit", "free") for size in (2, 3, 4)]
    rows: list[dict[str, Any]] = []
    for size, link in worlds[:1] if arguments.quick else worlds:
        measured = measure(size, link, QUICK if arguments.quick else FULL)
        print("\n".join(map(line, measured)), flush=True)
        rows += measured
    out = arguments.out or (None if arguments.quick else RESULTS)
    if out:
        out.parent.mkdir(exist_ok=True)
        out.write_text(json.dumps({"machine": machine(), "steps": STEPS, "rows": rows}, indent=1) + "\n")


def missing() -> str | None:
    """Why this cannot run here, or None."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    if shutil.which("ip") is None or shutil.which("tc") is None:
        return "iproute2 is not installed"
    try:
        with namespaces(1, "200mbit"):
            return None
    except subprocess.CalledProcessError as error:
        return f"no network namespace can be made here: {error.stderr.strip()}"


@contextmanager
def namespaces(size: int, link: str) -> Iterator[list[str]]:
    """Namespaces of the ranks, 10.77.0.1 and up on interface eth0, around a bridge; gone at the end."""
    hub, names = f"lac{os.getpid()}hub", [f"lac{os.getpid()}r{rank}" for rank in range(size)]
    made: list[str] = []
    try:
        for name in (hub, *names):
            ip("netns", "add", name)
            made.append(name)
        ip("-n", hub, "link", "add", "br0", "type", "bridge")
        ip("-n", hub, "link", "set", "br0", "up")
        for rank, name in enumerate(names):
            ip("-n", hub, "link", "add", f"v{rank}", "type", "veth", "peer", "name", "eth0", "netns", name)
            ip("-n", hub, "link", "set", f"v{rank}", "master", "br0", "up")
            ip("-n", name, "addr", "add", f"10.77.0.{rank + 1}/24", "dev", "eth0")
            ip("-n", name, "link", "set", "eth0", "mtu", "1500", "up")
            ip("-n", name, "link", "set", "lo", "up")
            if link != "free":
                bucket = ["tbf", "rate", link, "burst", "32kb", "latency", "400ms"]
                call("tc", "-n", name, "qdisc", "add", "dev", "eth0", "root", *bucket)
        yield names
    finally:
        for name in made:
            ip("netns", "del", name)


def measure(size: int, link: str, cases: list[Case]) -> list[dict[str, Any]]:
    """A row a case: the rank on which model and counter differ most."""
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": "eth0",
        "TORCH_CPP_LOG_LEVEL": "ERROR",
        "PYTHONPATH": os.pathsep.join((str(ROOT), *filter(None, sys.path))),
    }
    with namespaces(size, link) as names, TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "benchmarks.wire_rank"]
        arguments = [str(size), f"file://{folder}/store", json.dumps(cases)]
        processes = [
            subprocess.Popen(
                ["ip", "netns", "exec", name, *command, str(rank), *arguments],
                env=environment,
                stdout=subprocess.PIPE,
                text=True,
            )
            for rank, name in enumerate(names)
        ]
        try:
            told = [json.loads(process.communicate(timeout=300)[0]) for process in processes]
        finally:
            for process in processes:
                process.kill()
                process.wait()
    rows = []
    for index, (what, nbytes) in enumerate(cases):
        worst = max((of_rank[index] for of_rank in told), key=lambda row: abs(error(row)))
        case = {"ranks": size, "link": link, "what": what, "nbytes": nbytes}
        rows.append({**case, **worst, "error": round(error(worst), 5)})
    return rows


def error(row: dict[str, Any]) -> float:
    """By how much the model is off, of what both directions counted together."""
    counted = row["counted_sent"] + row["counted_received"]
    return float((row["wire_sent"] + row["wire_received"]) / counted - 1)


def line(row: dict[str, Any]) -> str:
    """A row, for the eye; bytes are of one step."""
    return (
        f"{row['ranks']} ranks {row['link']:>7}  {row['what']:<18} {row['nbytes']:>9,} B"
        f"  payload {row['payload_sent']:>10,.0f}"
        f"  wire {row['wire_sent']:>10,.0f} + {row['wire_received']:>10,.0f}"
        f"  counted {row['counted_sent']:>10,.0f} + {row['counted_received']:>10,.0f}  {row['error']:+.2%}"
    )


def ip(*words: str) -> None:
    """Run ip."""
    call("ip", *words)


def call(*words: str) -> None:
    """Run a command; its complaint is in the error."""
    subprocess.run(words, check=True, capture_output=True, text=True)


if __name__ == "__main__":
    main()

"""Launch of parts as processes with deadlines."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.gpu.parts import Part, groups
from benchmarks.gpu.summary import summary

GRACE_S = 3.0  # between the request to end and the kill
END_S = 6.0  # reserved for the summary
MARGIN_S = 3.0  # between the end that a process knows of and its deadline


@dataclass
class Process:
    """A running shard of a part. It leads a process group, which ends with it."""

    name: str
    file: Path
    popen: subprocess.Popen[bytes]
    deadline: float

    def end(self) -> None:
        """End the process and those that it started."""
        for number in (signal.SIGTERM, signal.SIGKILL):
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.popen.pid, number)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.popen.wait(GRACE_S)
                if number == signal.SIGTERM:
                    continue


def launch(parts: list[Part], out: Path, device: str, seconds: float) -> int:
    """Run parts, group after group, within this many seconds, and print a summary; 1 if anything failed."""
    end = time.monotonic() + seconds - END_S
    files: list[Path] = []
    for group in groups(parts):
        left = end - time.monotonic()
        if left < 5:
            print(f"no time for {', '.join(part.name for part in group)}", flush=True)
            files += [out / f"{part.name}.1of{part.shards}.json" for part in group]
            continue
        began = time.monotonic()
        running = [
            start(part, shard, out, device, min(part.seconds, left))
            for part in group
            for shard in range(part.shards)
        ]
        files += [each.file for each in running]
        wait(running)
        took = time.monotonic() - began
        print(f"{', '.join(part.name for part in group)}: {took:.0f} s", flush=True)
    found = [(file.stem, read(file)) for file in files]
    print(summary(found))
    failed = [name for name, result in found if result is None or failures(result)]
    return int(bool(failed))


def start(part: Part, shard: int, out: Path, device: str, seconds: float) -> Process:
    """Start one process of a part; its output goes to `out/PART.SHARD.log`."""
    name = f"{part.name}.{shard + 1}of{part.shards}"
    (out / f"{name}.json").unlink(missing_ok=True)
    command = [sys.executable, "-m", "benchmarks.gpu", "--part", part.name, "--out", str(out)]
    deadline = time.monotonic() + seconds
    command += [
        "--shard",
        f"{shard + 1}/{part.shards}",
        "--device",
        device,
        "--end",
        f"{deadline - MARGIN_S}",
    ]
    environment = {**os.environ, "PYTHONHASHSEED": "0", "PYTHONUNBUFFERED": "1"}
    environment["OMP_NUM_THREADS"] = str(part.threads) if device == "cuda" else "1"
    with (out / f"{name}.log").open("wb") as log:
        popen = subprocess.Popen(
            command, stdout=log, stderr=log, stdin=subprocess.DEVNULL, start_new_session=True, env=environment
        )
    return Process(name, out / f"{name}.json", popen, deadline)


def wait(running: list[Process]) -> None:
    """Wait for processes, and end each at its deadline."""
    try:
        while running:
            for each in [*running]:
                if each.popen.poll() is not None:
                    running.remove(each)
                elif time.monotonic() > each.deadline:
                    print(f"{each.name}: ended at its deadline", flush=True)
                    each.end()
                    running.remove(each)
            time.sleep(0.1)
    finally:
        for each in running:
            each.end()


def read(file: Path) -> dict[str, Any] | None:
    """Return the results of a process; None if it wrote nothing."""
    if not file.exists():
        return None
    found: dict[str, Any] = json.loads(file.read_text())
    return found


def failures(result: dict[str, Any]) -> list[str]:
    """Return the names of the checks of a process that failed, and a line if it did not reach its end.

    >>> failures({"finished": False, "rows": [{"name": "a", "ok": False}, {"name": "b", "skipped": "x"}]})
    ['a', 'it did not reach its end']
    """
    found = [row["name"] for row in result["rows"] if row.get("ok") is False]
    return found if result["finished"] else [*found, "it did not reach its end"]

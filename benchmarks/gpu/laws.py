"""Part laws: the project's own tests with CUDA inputs, a fifth at a time until the deadline.

A failure counts unless the test itself mixes devices: many tests make a tensor on the CPU to compare with.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections import defaultdict
from pathlib import Path
from typing import Any

from benchmarks.gpu.job import Job

ROOT = Path(__file__).parents[2]
WORKERS, TIMEOUT_S, PARTS = 14, 20, 5
UNIT = [
    "activations_corners",
    "activations_state",
    "adam_rules",
    "adaptive_bits",
    "binarise",
    "cgx",
    "clip",
    "cltk",
    "coded_gossip",
    "comm_loopback",
    "comm_metered",
    "deep_facto",
    "deferred",
    "deft",
    "deft_share",
    "ef21",
    "exchange",
    "few_bit_corners",
    "kept",
    "layerwise",
    "leaders",
    "lgc",
    "local_steps",
    "lowbit_grid",
    "lowbit_layers",
    "lowbit_norms",
    "majority_vote",
    "master_weights",
    "micro",
    "minmax_sketch",
    "noise_scale",
    "oktopk",
    "optim",
    "own_rates",
    "pack",
    "papers_sparse",
    "parts",
    "policies",
    "powersgd",
    "reducers",
    "regroup",
    "rigl",
    "rigl_rules",
    "rotated",
    "scatter_feedback",
    "scatter_reduce",
    "server",
    "server_state",
    "shared_scale",
    "sign_of_zero",
    "sparseloco",
    "stochastic_rounding",
    "swat",
    "tensor_codec",
    "threshold_ternary",
    "topologies",
    "transactional",
    "two_level",
    "two_level_dgc",
    "two_of_four",
]
MIXED = (  # errors of torch where a test compares with a tensor on the CPU
    "Expected all tensors to be on the same device",
    "can't convert cuda:0 device type tensor to numpy",
    "device type of generator but found",
    "Tensors on different devices",
    "expected device meta",
    "The values for attribute 'device' do not match",
    "indices should be either on",
)
Line = dict[str, Any]


def run(job: Job) -> None:
    """Run the tests, a part after the other, and store what failed and why."""
    order = (3, 1, 4, 2, 5) if job.cuda else (1,)
    lines: list[Line] = []
    with tempfile.TemporaryDirectory() as folder:
        for part in order:
            if job.left() < 25:
                job.skip(f"part {part}/{PARTS}", "no time")
                continue
            sweep = Path(folder) / f"part{part}"
            said, complete = tests(job, part, sweep)
            found = read(sweep)
            lines += found
            counts = {
                kind: sum(each["outcome"] == kind for each in found)
                for kind in ("passed", "failed", "skipped")
            }
            job.note(f"part {part}/{PARTS}", figures={**counts, "complete": complete}, tail=said[-300:])
    judge(job, lines)


def tests(job: Job, part: int, sweep: Path) -> tuple[str, bool]:
    """Run pytest on one part within the time left; return its output, and whether it reached its end."""
    paths = ["tests/laws", *(f"tests/unit/test_{name}.py" for name in UNIT)]
    paths = (
        [path for path in paths if (ROOT / path).exists()] if job.cuda else ["tests/laws/test_feedback.py"]
    )
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-p",
        "benchmarks.gpu.cuda_inputs",
        "-p",
        "no:cacheprovider",
    ]
    command += ["-W", "ignore", "-o", "addopts=--import-mode=importlib", "--timeout", str(TIMEOUT_S)]
    command += [
        "--continue-on-collection-errors",
        "-m",
        "not soak",
        "--part",
        f"{part}/{PARTS if job.cuda else 8}",
    ]
    command += ["-n", str(WORKERS), *paths] if job.cuda else paths
    environment = {**os.environ, "SWEEP": str(sweep), "DEVICE": job.device.type, "OMP_NUM_THREADS": "1"}
    environment["PYTHONPATH"] = os.pathsep.join([str(ROOT / "src"), str(ROOT)])
    process = subprocess.Popen(
        command,
        cwd=ROOT,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        return process.communicate(timeout=job.left() - 6)[0], True
    except subprocess.TimeoutExpired:
        return "ended at the deadline", False
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)


def read(sweep: Path) -> list[Line]:
    """Return the lines that all workers wrote."""
    found = []
    for file in sorted(sweep.parent.glob(f"{sweep.name}.*.jsonl")):
        for text in file.read_text().splitlines():
            with contextlib.suppress(json.JSONDecodeError):  # a line that the deadline cut
                found.append(json.loads(text))
    return found


def judge(job: Job, lines: list[Line]) -> None:
    """Store failures by reason: those of the package are failures of the part."""
    reasons: dict[tuple[bool, str], list[str]] = defaultdict(list)
    for line in lines:
        if line["outcome"] == "failed":
            reasons[reason(line)].append(line["id"])
    passed = sum(line["outcome"] == "passed" for line in lines)
    wrong = sum(len(ids) for (own, _), ids in reasons.items() if not own)
    job.check("laws and unit tests with CUDA inputs", passed > 0 and not wrong, passed=passed, failed=wrong)
    for (own, text), ids in sorted(reasons.items(), key=lambda item: -len(item[1])):
        kind = "the test mixes devices" if own else "failure"
        job.note(f"{kind}: {text}", count=len(ids), tests=ids[:4])


def reason(line: Line) -> tuple[bool, str]:
    """Return whether a failure is the test's own, and the reason in short.

    >>> reason({"type": "AssertionError", "message": "not equal", "ours": None, "last": "tests/a.py:3"})
    (False, 'AssertionError: not equal @ tests/a.py:3')
    """
    where = line.get("ours") or line.get("last")
    own = line.get("ours") is None and any(text in line.get("message", "") for text in MIXED)
    return own, f"{line.get('type')}: {line.get('message', '')[:160]} @ {where}"

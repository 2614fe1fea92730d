"""Kill a worker with SIGKILL: training resumes from the last whole checkpoint and ends with the same bits."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from laconic.tasks import checkpoint

SCRIPT = Path(__file__).parents[2] / "examples" / "train_ddp.py"
STEPS, EVERY = 40, 10
LIMIT_S = 180


def start(folder: Path, spec: str) -> subprocess.Popen[str]:
    folder.mkdir()
    command = [
        sys.executable,
        "-m",
        "laconic.cli.main",
        "run",
        "--nproc-per-node",
        "2",
        "--max-restarts",
        "2",
    ]
    command += [str(SCRIPT), "--spec", spec, "--steps", str(STEPS), "--every", str(EVERY)]
    command += ["--checkpoints", str(folder / "checkpoints"), "--out", str(folder / "model.pt")]
    return subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=os.environ | {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"},
    )


def children(parent: int) -> list[int]:
    """Processes that this one has started."""
    listed = Path(f"/proc/{parent}/task/{parent}/children").read_text()
    return [int(child) for child in listed.split()]


def finish(process: subprocess.Popen[str], folder: Path) -> tuple[str, dict[str, torch.Tensor]]:
    output, _ = process.communicate(timeout=LIMIT_S)
    assert process.returncode == 0, output
    return output, torch.load(folder / "model.pt", weights_only=True)


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="finds the workers in /proc, which is Linux")
@pytest.mark.soak
@pytest.mark.parametrize("spec", ["dgc(density=0.01)", "topk(density=0.05)"])
def test_a_killed_worker_changes_no_bit(spec: str, tmp_path: Path) -> None:
    _, expected = finish(start(tmp_path / "whole", spec), tmp_path / "whole")

    process = start(tmp_path / "killed", spec)
    try:
        deadline = time.monotonic() + LIMIT_S
        while (place := checkpoint.latest(tmp_path / "killed" / "checkpoints")) is None:
            assert process.poll() is None and time.monotonic() < deadline, "no checkpoint came"
            time.sleep(0.01)
        os.kill(children(process.pid)[-1], signal.SIGKILL)
        output, found = finish(process, tmp_path / "killed")
    finally:
        process.kill()
        process.wait()

    resumed = [int(step) for step in re.findall(r"goes on after step (\d+)", output)]
    assert len(resumed) == 2, output  # both ranks, once
    assert checkpoint.step_of(place) <= resumed[0] == resumed[1] < STEPS
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)

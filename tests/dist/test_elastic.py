"""Kill a worker with SIGKILL: training resumes from the last whole checkpoint and ends with the same bits."""

from __future__ import annotations

import os
import re
import signal
import subprocess
from pathlib import Path

import pytest
import torch

from laconic.tools.tasks import checkpoint
from tests.dist.commands import LACONIC, ROOT, children, finish, start, wait_for

SCRIPT = ROOT / "examples" / "train_ddp.py"
STEPS, EVERY = 40, 10


def begin(folder: Path, spec: str) -> subprocess.Popen[str]:
    folder.mkdir()
    command = (*LACONIC, "run", "--nproc-per-node", 2, "--max-restarts", 2, SCRIPT, "--spec", spec)
    steps = ("--steps", STEPS, "--every", EVERY)
    files = ("--checkpoints", folder / "checkpoints", "--out", folder / "model.pt")
    env = {"GLOO_SOCKET_IFNAME": "lo"}
    return start(*command, *steps, *files, stderr=subprocess.STDOUT, env=env)


def end(process: subprocess.Popen[str], folder: Path) -> tuple[str, dict[str, torch.Tensor]]:
    code, output, _ = finish(process)
    assert code == 0, output
    return output, torch.load(folder / "model.pt", weights_only=True)


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="finds the workers in /proc, which is Linux")
@pytest.mark.soak
@pytest.mark.parametrize("spec", ["dgc(density=0.01)", "topk(density=0.05)"])
def test_a_killed_worker_changes_no_bit(spec: str, tmp_path: Path) -> None:
    _, expected = end(begin(tmp_path / "whole", spec), tmp_path / "whole")
    process = begin(tmp_path / "killed", spec)
    wait_for(lambda: checkpoint.latest(tmp_path / "killed" / "checkpoints"), process)
    place = checkpoint.latest(tmp_path / "killed" / "checkpoints")
    os.kill(children(process.pid)[-1], signal.SIGKILL)
    output, found = end(process, tmp_path / "killed")

    resumed = [int(step) for step in re.findall(r"goes on after step (\d+)", output)]
    assert len(resumed) == 2, output  # both ranks, once
    assert checkpoint.step_of(place) <= resumed[0] == resumed[1] < STEPS
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)

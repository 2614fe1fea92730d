"""The examples for torchrun and Ray Train, started as their docstrings say."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[2]
QUIET = {"GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1", "RAY_USAGE_STATS_ENABLED": "0"}


def said(*command: str, timeout_s: float) -> str:
    """What a command printed. It and all that it started end with the test."""
    process = subprocess.Popen(
        [sys.executable, "-m", *command],
        cwd=ROOT,
        env={**os.environ, **QUIET},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        out, err = process.communicate(timeout=timeout_s)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        raise
    assert process.returncode == 0, err
    return out


def torchrun(folder: Path, steps: int) -> str:
    script = ["examples/integrations/torchrun_ddp.py", "--folder", str(folder), "--steps", str(steps)]
    launcher = ["torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    return said(*launcher, *script, timeout_s=300)


def test_torchrun_goes_on_with_the_same_bits(tmp_path: Path) -> None:
    torchrun(tmp_path / "whole", 60)
    torchrun(tmp_path / "half", 30)
    printed = torchrun(tmp_path / "half", 60)
    whole, rest = (torch.load(tmp_path / name / "last.pt", weights_only=True) for name in ("whole", "half"))
    assert all(torch.equal(value, rest["model"][key]) for key, value in whole["model"].items())
    assert whole["step"] == rest["step"] == 60
    found = re.search(r"loss ([\d.]+), (\d+) times less than dense", printed)
    assert found and float(found[1]) < 1.5 and int(found[2]) > 10


def ray(folder: Path, *options: str, timeout_s: float) -> dict[str, object]:
    printed = said("tests.integrations.ray_world", str(folder), *options, timeout_s=timeout_s)
    found: dict[str, object] = json.loads(printed.splitlines()[-1])
    return found


@pytest.mark.timeout(640)
def test_ray_train(tmp_path: Path) -> None:
    found = ray(tmp_path, timeout_s=600)
    assert found["steps"] == 128 and found["ranks"] == 2
    assert found["ratio"] > 12 and found["loss"] < 1.2


@pytest.mark.soak
def test_ray_train_goes_on_with_the_same_bits(tmp_path: Path) -> None:
    found = ray(tmp_path, "resumed", timeout_s=400)
    assert found["epochs"] == [2, 1, 2] and found["same"] == [True, False, True]

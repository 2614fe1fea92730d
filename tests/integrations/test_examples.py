"""The examples for torchrun and Ray Train, started as their docstrings say."""

from __future__ import annotations

import json
import os
import re
import runpy
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

from tests.dist.pool import Pool
from tests.integrations.launched import launched

ROOT = Path(__file__).parents[2]
TORCHRUN, RAY = (ROOT / "examples" / "integrations" / name for name in ("torchrun_ddp.py", "ray_train.py"))
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


@launched
def in_two_parts(folder: str) -> None:
    """A run of 60 steps and the first half of another, in the process group of this rank."""
    main = runpy.run_path(str(TORCHRUN))["main"]
    with mock.patch.multiple(dist, init_process_group=mock.DEFAULT, destroy_process_group=mock.DEFAULT):
        main(Path(folder) / "whole", 60)
        main(Path(folder) / "half", 30)


def test_torchrun_goes_on_with_the_same_bits(pool: Pool, tmp_path: Path) -> None:
    pool.run(2, in_two_parts, str(tmp_path), timeout_s=300)
    launcher = ["torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(TORCHRUN)]
    printed = said(*launcher, "--folder", str(tmp_path / "half"), "--steps", "60", timeout_s=300)
    whole, rest = (torch.load(tmp_path / name / "last.pt", weights_only=True) for name in ("whole", "half"))
    assert all(torch.equal(value, rest["model"][key]) for key, value in whole["model"].items())
    assert whole["step"] == rest["step"] == 60
    found = re.search(r"loss ([\d.]+), (\d+) times less than dense", printed)
    assert found and float(found[1]) < 1.5 and int(found[2]) > 10


@launched
def ray_workers(folder: str) -> dict[str, float]:
    """Train by Ray's example with a stand-in for Ray: as a whole, and then from the first checkpoint on."""
    ray, saved = mock.MagicMock(), []
    modules = {"ray": ray, "ray.train": ray.train, "ray.train.torch": ray.train.torch}
    with mock.patch.dict(sys.modules, modules):
        train = runpy.run_path(str(RAY))["train_func"]

    def sampled(loader: Any) -> Any:
        dataset = loader.dataset
        return DataLoader(dataset, loader.batch_size, sampler=DistributedSampler(dataset))

    def save(source: str) -> None:
        saved.append(shutil.copytree(source, Path(folder) / str(len(saved))))

    ray.train.torch.prepare_model, ray.train.torch.prepare_data_loader = DistributedDataParallel, sampled
    ray.train.get_context.return_value.get_world_rank = dist.get_rank
    ray.train.Checkpoint.from_directory = save
    ray.train.get_checkpoint.return_value = None
    train({"spec": "topk(density=0.02)", "epochs": 2})
    metrics: dict[str, float] = ray.train.report.call_args.args[0]
    dist.barrier()
    ray.train.get_checkpoint.return_value = mock.MagicMock()
    ray.train.get_checkpoint.return_value.as_directory.return_value.__enter__.return_value = f"{folder}/0"
    train({"spec": "topk(density=0.02)", "epochs": 2})
    return metrics


def test_the_workers_of_ray_go_on_with_the_same_bits(pool: Pool, tmp_path: Path) -> None:
    metrics = pool.run(2, ray_workers, str(tmp_path), timeout_s=300)[0]
    assert metrics["steps"] == 128 and metrics["ratio"] > 12 and metrics["loss"] < 1.2
    half, whole, rest = (torch.load(tmp_path / str(i) / "model.pt", weights_only=True) for i in range(3))
    assert [each["epoch"] for each in (half, whole, rest)] == [1, 2, 2]
    assert len(whole["handle"]["ranks"]) == 2
    assert all(torch.equal(value, rest["model"][key]) for key, value in whole["model"].items())
    assert not all(torch.equal(value, half["model"][key]) for key, value in whole["model"].items())


@pytest.mark.nightly  # Ray gives up where its processes take more than half a minute to start
@pytest.mark.timeout(640)
def test_ray_train(tmp_path: Path) -> None:
    found = json.loads(said("tests.integrations.ray_world", str(tmp_path), timeout_s=600).splitlines()[-1])
    assert found["steps"] == 128 and found["ranks"] == 2
    assert found["ratio"] > 12 and found["loss"] < 1.2
    assert found["epochs"] == [2, 1, 2] and found["same"] == [True, False, True]

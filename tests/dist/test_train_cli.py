"""`laconic train` on real processes: a run, Ctrl-C, a crash, a kill, and going on from a checkpoint."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from laconic.report.ledger import EVENTS, read_events
from laconic.tasks import checkpoint

LIMIT_S = 400
THIRD_PARTY = """
from laconic.reducers.sum import Sum


class Faulty(Sum):
    def bind(self, layout, comm):
        if comm.rank == 1:
            raise ZeroDivisionError("a fault of rank 1")
        return super().bind(layout, comm)
"""


def start(folder: Path, *arguments: str) -> subprocess.Popen[str]:
    command = [
        sys.executable,
        "-m",
        "laconic.cli.main",
        "train",
        "digits",
        "--workers",
        "2",
        "--out",
        str(folder),
    ]
    return subprocess.Popen(
        [*command, "--batch", "8", "--out", str(folder), *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"},
        start_new_session=True,  # a group of its own, as a terminal gives it
    )


def finish(process: subprocess.Popen[str]) -> tuple[int, str, str]:
    try:
        output, complaints = process.communicate(timeout=LIMIT_S)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
    return process.returncode, output, complaints


def wait_for(condition: Callable[[], object], process: subprocess.Popen[str]) -> None:
    deadline = time.monotonic() + LIMIT_S
    while not condition():
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.02)


def losses(folder: Path, seed: int) -> dict[tuple[int, int], float]:
    steps = [event for event in read_events(folder) if event["kind"] == "step" and event["seed"] == seed]
    return {(event["step"], event["rank"]): event["loss"] for event in steps}


def steps_done(folder: Path, seed: int = 0) -> int:
    return max((event["step"] for event in read_events(folder) if event["seed"] == seed), default=0)


def group_is_gone(group: int) -> bool:
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline:
        try:
            os.killpg(group, 0)
        except ProcessLookupError:
            return True
        time.sleep(0.05)
    return False


def test_a_run_writes_all_that_it_promises(tmp_path: Path) -> None:
    arguments = ["--steps", "12", "--with", "dgc(density=0.01)", "--against", "dense()", "--name", "run"]
    arguments += ["--with", "lsgd()"]  # a strategy, which asks each rank for its machine
    specs = ("dense()", "dgc(density=0.01)", "lsgd()")
    code, output, complaints = finish(start(tmp_path, *arguments))
    folder = tmp_path / "run"
    assert code == 0, complaints
    assert str(folder / "report.html") in output.replace("\n", "")
    for name in ("report.html", "loss.svg", "summary.json", "config.json", EVENTS):
        assert (folder / name).stat().st_size > 0
    assert len(list((folder / "tensorboard").rglob("events.out.*"))) == 3

    steps = [event for event in read_events(folder) if event["kind"] == "step"]
    expected = {(m, r, s) for m in specs for r in range(2) for s in range(1, 13)}
    assert {(event["method"], event["rank"], event["step"]) for event in steps} == expected
    assert len(steps) == len(expected)
    dense, dgc, lsgd = json.loads((folder / "summary.json").read_text())["rows"]
    parameters = 283_786
    assert dense["payload_mb"] == pytest.approx(4 * parameters / 1e6)
    assert dgc["smaller"] >= 50
    assert dgc["consensus"] == 0 < lsgd["consensus"]
    assert "dgc(density=0.01)" in output and "step 12/12" in output


def test_ctrl_c_ends_all_and_keeps_what_was_measured(tmp_path: Path) -> None:
    process = start(tmp_path, "--steps", "100000", "--eval-every", "0", "--with", "dense()", "--name", "run")
    wait_for(lambda: steps_done(tmp_path / "run") > 5, process)
    os.killpg(process.pid, signal.SIGINT)  # a terminal sends it to all processes
    code, output, complaints = finish(process)
    assert code == 130, complaints
    assert "Interrupted" in output and not complaints
    go_on, kept = output.splitlines()[-2:]
    assert go_on.startswith("to go on: laconic train digits --workers 2 ")
    assert go_on.endswith("--with 'dense()' --name run --resume")
    assert kept.endswith("goes on from its start, as there are no checkpoints")
    assert group_is_gone(process.pid), "a worker is left"
    report = (tmp_path / "run" / "report.html").read_text()
    assert "Interrupted: this report covers what was measured until then." in report
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["rows"][0]["steps"] > 5


def test_a_crash_shows_that_workers_traceback(tmp_path: Path) -> None:
    package = tmp_path / "faulty-1.dist-info"
    package.mkdir()
    (package / "METADATA").write_text("Metadata-Version: 2.1\nName: faulty\nVersion: 1\n")
    (package / "entry_points.txt").write_text("[laconic.methods]\nfaulty = faulty:Faulty\n")
    (tmp_path / "faulty.py").write_text(THIRD_PARTY)
    before = os.environ.get("PYTHONPATH")
    path = f"{tmp_path}{os.pathsep}{before}" if before else str(tmp_path)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", path)
        process = start(tmp_path, "--steps", "5", "--with", "faulty()", "--name", "run")
    code, _, complaints = finish(process)
    assert code == 1
    assert "Traceback" in complaints and "ZeroDivisionError: a fault of rank 1" in complaints
    *_, books, reason = complaints.strip().splitlines()
    assert reason == "laconic: faulty(), seed 0: rank 1: ZeroDivisionError: a fault of rank 1"
    assert books == f"all steps before this error are in {tmp_path / 'run' / EVENTS}"
    assert group_is_gone(process.pid), "a worker is left"


def test_a_training_that_diverges_is_one_line_with_the_way_out(tmp_path: Path) -> None:
    code, output, complaints = finish(
        start(tmp_path, "--steps", "40", "--lr", "1e20", "--with", "dgc(density=0.01)", "--name", "run")
    )
    assert code == 1
    (line,) = [line for line in complaints.splitlines() if "ProcessGroup" not in line]
    assert line.startswith("laconic: dgc(density=0.01), seed 0: rank ") and line.endswith(
        "; give a lower --lr"
    )
    assert "training has diverged" in line and "at a learning rate of 1e+20" in line
    assert "report.html" in output, "what was measured until then is there"


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="finds the workers in /proc, which is Linux")
def test_a_killed_worker_is_named(tmp_path: Path) -> None:
    process = start(tmp_path, "--steps", "100000", "--eval-every", "0", "--with", "dense()", "--name", "run")
    wait_for(lambda: steps_done(tmp_path / "run") > 5, process)
    workers = sorted(pid for pid in descendants(process.pid) if not descendants(pid) and is_worker(pid))
    os.kill(workers[-1], signal.SIGKILL)
    code, output, complaints = finish(process)
    assert code == 1
    assert "laconic: dense(), seed 0: rank 1: the worker was killed by SIGKILL" in complaints
    assert str(tmp_path / "run" / EVENTS) in complaints
    assert "report.html" in output
    assert group_is_gone(process.pid), "a worker is left"


def descendants(parent: int) -> list[int]:
    listed = Path(f"/proc/{parent}/task/{parent}/children").read_text().split()
    found = [int(child) for child in listed]
    return found + [deeper for child in found for deeper in descendants(child)]


def is_worker(pid: int) -> bool:
    return "forkserver" in Path(f"/proc/{pid}/cmdline").read_bytes().decode()


def test_a_resumed_run_ends_with_the_same_bits_and_never_from_a_damaged_part(tmp_path: Path) -> None:
    arguments = ["--steps", "30", "--eval-every", "15", "--checkpoint-every", "5", "--seeds", "2"]
    arguments += ["--with", "dgc(density=0.05)"]
    code, _, complaints = finish(start(tmp_path, *arguments, "--name", "whole"))
    assert code == 0, complaints

    process = start(tmp_path, *arguments, "--name", "cut")
    folder = tmp_path / "cut"
    seed1 = folder / "dgc_density_0.05" / "seed1"
    wait_for(lambda: checkpoint.latest(seed1), process)
    process.send_signal(signal.SIGTERM)
    assert finish(process)[0] == 130

    place = checkpoint.latest(seed1)
    assert place is not None
    part = place / "rank1.pt"
    whole = part.read_bytes()
    part.write_bytes(whole[:-100])
    code, _, complaints = finish(start(tmp_path, *arguments, "--name", "cut", "--resume"))
    assert code == 1
    assert f"{place.name}/rank1.pt is damaged" in complaints and "remove" in complaints
    assert "Traceback" not in complaints

    part.write_bytes(whole)
    code, output, complaints = finish(start(tmp_path, *arguments, "--name", "cut", "--resume"))
    assert code == 0, complaints
    plain = output.replace("\n", "")
    assert "seed 0: already done" in plain and "seed 1: resumes from" in plain

    def ends(name: str) -> list[dict[str, object]]:
        place = tmp_path / name / "dgc_density_0.05" / "seed1" / "step-000030"
        return [checkpoint.load(place, rank=rank, size=2) for rank in range(2)]

    for one, other in zip(ends("whole"), ends("cut"), strict=True):
        assert_equal(one, other)
    assert losses(tmp_path / "whole", 0) == losses(folder, 0)  # equal seeds train equally, others do not
    assert losses(tmp_path / "whole", 1) == losses(folder, 1) != losses(folder, 0)
    steps = [(e["seed"], e["rank"], e["step"]) for e in read_events(folder) if e["kind"] == "step"]
    assert len(steps) == len(set(steps)) == 2 * 2 * 30


def assert_equal(one: object, other: object) -> None:
    if isinstance(one, torch.Tensor):
        assert isinstance(other, torch.Tensor) and torch.equal(one, other)
    elif isinstance(one, dict):
        assert isinstance(other, dict) and one.keys() == other.keys()
        for key in one:
            assert_equal(one[key], other[key])
    elif isinstance(one, (list, tuple)):
        assert isinstance(other, (list, tuple)) and len(one) == len(other)
        for mine, yours in zip(one, other, strict=True):
            assert_equal(mine, yours)
    else:
        assert one == other


@pytest.mark.parametrize(
    "more",
    [
        ["--sparsity", "rigl(density=0.2, every=4)", "--with", "masked(dense())"],
        ["--sparsity", "swat(sparsity=0.8, refresh=7)", "--with", "cgx()"],
        pytest.param(["--sparsity", "gradual_pruning(every=3)", "--with", "dense()"], marks=pytest.mark.soak),
        pytest.param(["--lowbit", "binarise()", "--with", "dgc(density=0.05)"], marks=pytest.mark.soak),
    ],
    ids=lambda more: more[1].split("(")[0],
)
def test_what_trains_along_goes_on_after_a_kill(more: list[str], tmp_path: Path) -> None:
    arguments = ["--steps", "40", "--eval-every", "40", "--checkpoint-every", "5", *more]
    code, _, complaints = finish(start(tmp_path, *arguments, "--name", "whole"))
    assert code == 0, complaints
    (place,) = (tmp_path / "whole").glob("*/seed0")
    killed = start(tmp_path, *arguments, "--name", "cut")
    seed0 = tmp_path / "cut" / place.parent.name / "seed0"
    wait_for(lambda: checkpoint.latest(seed0), killed)
    os.kill(killed.pid, signal.SIGKILL)
    finish(killed)
    code, output, complaints = finish(start(tmp_path, *arguments, "--name", "cut", "--resume"))
    assert code == 0, complaints
    assert "resumes from" in output.replace("\n", "")
    for rank in range(2):
        one, other = (checkpoint.load(each / "step-000040", rank=rank, size=2) for each in (place, seed0))
        assert_equal(one, other)
        assert one["sparsity" if "--sparsity" in more else "lowbit"]

"""`laconic train` goes on from a checkpoint: the same bits, after a kill too, and not from a damaged part."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from laconic.tools.report.ledger import Ledger, read_events
from laconic.tools.tasks import checkpoint
from tests.dist.commands import finish, train, trained, wait_for
from tests.dist.runs import same


def losses(folder: Path, seed: int) -> dict[tuple[int, int], float]:
    steps = [event for event in read_events(folder) if event["kind"] == "step" and event["seed"] == seed]
    return {(event["step"], event["rank"]): event["loss"] for event in steps}


def terminated(seed: int, step: int, folder: Path, *words: str) -> None:
    """Train in this process, and send it SIGTERM when it has written a step of both workers."""
    plain = Ledger.write
    there: set[int] = set()

    def write(ledger: Ledger, event: dict[str, Any]) -> None:
        plain(ledger, event)
        if (event["kind"], event["seed"], event["step"]) == ("step", seed, step):
            there.add(event["rank"])
            if len(there) == 2:
                signal.raise_signal(signal.SIGTERM)

    with mock.patch.object(Ledger, "write", write):
        code, _, complaints = trained(folder, *words)
    assert code == 130, complaints


def test_a_resumed_run_ends_with_the_same_bits_and_never_from_a_damaged_part(tmp_path: Path) -> None:
    """There are two checkpoints, and two are kept: the first one is there however late the signal is."""
    arguments = ["--steps", "24", "--eval-every", "12", "--checkpoint-every", "12", "--seeds", "2"]
    arguments += ["--with", "dgc(density=0.05)"]
    code, _, complaints = trained(tmp_path, *arguments, "--name", "whole")
    assert code == 0, complaints

    folder = tmp_path / "cut"
    seed1 = folder / "dgc_density_0.05" / "seed1"
    terminated(1, 13, tmp_path, *arguments, "--name", "cut")
    part = seed1 / "step-000012" / "rank1.pt"
    whole = part.read_bytes()
    part.write_bytes(whole[:-100])
    code, _, complaints = trained(tmp_path, *arguments, "--name", "cut", "--resume")
    assert code == 1
    assert "step-000012/rank1.pt is damaged" in complaints and "remove" in complaints
    assert "Traceback" not in complaints

    part.write_bytes(whole)
    code, output, complaints = trained(tmp_path, *arguments, "--name", "cut", "--resume")
    assert code == 0, complaints
    plain = output.replace("\n", "")
    assert "seed 0: already done" in plain and "seed 1: resumes from" in plain

    def ends(name: str) -> list[dict[str, object]]:
        place = tmp_path / name / "dgc_density_0.05" / "seed1" / "step-000024"
        return [checkpoint.load(place, rank=rank, size=2) for rank in range(2)]

    for one, other in zip(ends("whole"), ends("cut"), strict=True):
        assert same(one, other)
    assert losses(tmp_path / "whole", 0) == losses(folder, 0)  # equal seeds train equally, others do not
    assert losses(tmp_path / "whole", 1) == losses(folder, 1) != losses(folder, 0)
    steps = [(e["seed"], e["rank"], e["step"]) for e in read_events(folder) if e["kind"] == "step"]
    assert len(steps) == len(set(steps)) == 2 * 2 * 24


@pytest.mark.parametrize(
    "more",
    [
        pytest.param(
            ["--sparsity", "rigl(density=0.2, every=4)", "--with", "masked(dense())"],
            marks=pytest.mark.nightly,
        ),
        pytest.param(
            ["--sparsity", "swat(sparsity=0.8, refresh=7)", "--with", "cgx()"], marks=pytest.mark.nightly
        ),
        pytest.param(["--sparsity", "gradual_pruning(every=3)", "--with", "dense()"], marks=pytest.mark.soak),
        pytest.param(["--lowbit", "binarise()", "--with", "dgc(density=0.05)"], marks=pytest.mark.soak),
    ],
    ids=lambda more: more[1].split("(")[0],
)
def test_what_trains_along_goes_on_after_a_kill(more: list[str], tmp_path: Path) -> None:
    arguments = ["--steps", "60", "--eval-every", "60", "--checkpoint-every", "5", *more]
    code, _, complaints = trained(tmp_path, *arguments, "--name", "whole")
    assert code == 0, complaints
    (place,) = (tmp_path / "whole").glob("*/seed0")
    killed = train(tmp_path, *arguments, "--name", "cut")
    seed0 = tmp_path / "cut" / place.parent.name / "seed0"
    wait_for(lambda: checkpoint.latest(seed0), killed)
    os.kill(killed.pid, signal.SIGKILL)
    finish(killed)
    code, output, complaints = trained(tmp_path, *arguments, "--name", "cut", "--resume")
    assert code == 0, complaints
    assert "resumes from" in output.replace("\n", "")
    for rank in range(2):
        one, other = (checkpoint.load(each / "step-000060", rank=rank, size=2) for each in (place, seed0))
        assert same(one, other)
        assert one["sparsity" if "--sparsity" in more else "lowbit"]

"""`laconic train` goes on from a checkpoint: the same bits, after a kill too, and not from a damaged part."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
import torch

from laconic.report.ledger import read_events
from laconic.tasks import checkpoint
from tests.dist.train_command import finish, losses, start, wait_for


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

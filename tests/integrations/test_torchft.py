"""torchft's replicas, compressed: skipped steps, and replicas that die and come back.

Two processes train all of `TRAININGS` one after the other, since each process imports torch for seconds.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.integrations.test_examples import QUIET, ROOT

STEPS, HALF, LONG = 12, 6, 200
LIMIT_S = 240
TOPK, POWER = "topk(density=0.05)", "powersgd(rank=1)"
TRAININGS: dict[str, list[dict[str, Any]]] = {  # of two replicas, by what is told to both and to each
    "torchft": [{"spec": None}],
    "sum": [{"spec": "sum()"}],
    "topk": [{"spec": TOPK}],
    "topk failed": [{"spec": TOPK}, {"fail_at": [4]}, {"fail_at": [8]}],
    "powersgd": [{"spec": POWER}],
    "powersgd failed": [{"spec": POWER}, {"fail_at": [4]}],
    "cgx": [{"spec": "cgx(bits=4)"}],
    "ef21": [{"spec": "ef21_sgdm(topk(density=0.05))"}],
    "gathers": [{"spec": "gather(sparse(topk(0.999)))", "steps": 3}],
    "left out": [{"spec": TOPK, "steps": HALF, "beside": True}],
    "not finite": [{"spec": TOPK}, {"nan_at": 3}],
    "half": [{"spec": TOPK, "steps": HALF}],
    "rest": [{"spec": TOPK}, {"resume": "half-0.pt"}, {"resume": "half-1.pt"}],
    "example": [{"example": str(ROOT / "examples" / "integrations" / "torchft_ddp.py"), "steps": 80}],
    "died": [{"spec": TOPK, "steps": LONG}, {"alone": "alone"}, {"die_at": 6}],
}


def lighthouse(at_first: int) -> Any:
    """It waits for so many replicas before the first step, and a second for others before any later one."""
    from torchft.coordination import LighthouseServer

    return LighthouseServer(
        bind="[::]:0", min_replicas=at_first, join_timeout_ms=1000, heartbeat_timeout_ms=1500
    )


class Started:
    """A process whose words go to files: nobody reads them while it runs, and a pipe would be full."""

    def __init__(self, *line: str, **variables: str) -> None:
        self.out, self.err = map(tempfile.TemporaryFile, ("w+", "w+"))
        self.process = subprocess.Popen(
            [sys.executable, "-m", *line],
            cwd=ROOT,
            env={**os.environ, **QUIET, **variables},
            stdout=self.out,
            stderr=self.err,
        )

    def end(self, code: int = 0) -> str:
        """What it printed, if it ends with this code."""
        try:
            found = self.process.wait(LIMIT_S)
        finally:
            self.process.kill()
            self.process.wait()
        for file in (self.out, self.err):
            file.seek(0)
        with self.out, self.err:
            assert found == code, self.err.read()
            return self.out.read()


def replica(*trainings: dict[str, Any]) -> Started:
    return Started("tests.integrations.torchft_replica", json.dumps(trainings))


Found = dict[str, list[dict[str, Any]]]


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Found:
    """The result of each training on its two replicas. In the last, one of them dies and returns."""
    folder = tmp_path_factory.mktemp("torchft")
    houses = {name: lighthouse(at_first=1 if name == "died" else 2) for name in TRAININGS}

    def told(name: str, number: int, **more: Any) -> dict[str, Any]:
        both, *own = TRAININGS[name]
        mine = own[number] if number < len(own) else {}
        about = {"name": f"replica_{number}", "number": number, "steps": STEPS, **both, **(more or mine)}
        fails = any("fail_at" in each or "die_at" in each for each in own)  # and then sends nothing more
        about["patience_s"] = 3 if fails else 30
        about |= {key: str(folder / about[key]) for key in ("resume", "alone") if key in about}
        return about | {"lighthouse": houses[name].address(), "out": str(folder / f"{name}-{number}.pt")}

    stays, dies = (replica(*(told(name, number) for name in TRAININGS)) for number in range(2))
    dies.end(code=9)
    while not (folder / "alone").exists():
        time.sleep(0.1)
        assert stays.process.poll() is None, stays.end()
    for each in (replica(told("died", 1, seed=5)), stays):  # with a model that is of no use
        each.end()
    for house in houses.values():
        house.shutdown()
    return {
        name: [torch.load(folder / f"{name}-{number}.pt", weights_only=True) for number in range(2)]
        for name in TRAININGS
    }


def same(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(value, b[key]) for key, value in a.items())


def equal(ones: list[dict[str, Any]], others: list[dict[str, Any]]) -> bool:
    """Whether models and memories have the same bits, on each replica."""
    pairs = list(zip(ones, others, strict=True))
    memories = all(same(one["handle"]["tensors"], other["handle"]["tensors"]) for one, other in pairs)
    return memories and all(torch.equal(one["flat"], other["flat"]) for one, other in pairs)


def test_sums_train_as_torchft_does(found: Found) -> None:
    theirs, ours = found["torchft"], found["sum"]
    assert torch.equal(ours[0]["flat"], ours[1]["flat"])
    assert torch.allclose(ours[0]["flat"], theirs[0]["flat"], atol=1e-6)


@pytest.mark.parametrize("name", ["topk", "powersgd", "cgx", "ef21"])
def test_replicas_stay_equal_and_send_less(name: str, found: Found) -> None:
    one, two = found[name]
    assert torch.equal(one["flat"], two["flat"])
    assert one["stats"]["dense"] / one["stats"]["network_sent"] > 1.5
    assert one["stats"]["steps"] == one["tried"] == STEPS
    assert re.fullmatch(r"<.* on [\d,]+ elements of a replica>", one["repr"])


@pytest.mark.parametrize(("name", "failures"), [("topk", 2), ("powersgd", 1)])
def test_a_step_that_fails_leaves_no_trace(name: str, failures: int, found: Found) -> None:
    assert [each["tried"] for each in found[f"{name} failed"]] == [STEPS + failures] * 2
    assert equal(found[name], found[f"{name} failed"])


def test_a_gradient_that_is_not_finite_throws_the_step_away(found: Found) -> None:
    assert [each["tried"] for each in found["not finite"]] == [STEPS + 1] * 2
    assert equal(found["topk"], found["not finite"])


def test_what_comes_late_for_a_layer_that_is_left_out_is_its_gradient(found: Found) -> None:
    one, two = found["left out"]
    assert torch.equal(one["flat"], two["flat"])
    assert len({*one["beside"]}) == HALF  # it moves in each step, and was used in the first alone


def test_a_checkpoint_goes_on_with_the_same_bits(found: Found) -> None:
    assert [each["tried"] for each in found["rest"]] == [STEPS - HALF] * 2
    assert equal(found["topk"], found["rest"])


def test_a_gather_that_sends_more_than_dense_is_told_once(found: Found) -> None:
    for each in found["gathers"]:
        assert len([said for said in each["words"] if "where a dense all-reduce sends" in said]) == 1
    assert found["topk"][0]["words"] == []


def test_a_replica_that_died_comes_back(found: Found) -> None:
    """The other one goes on alone, and then with it: in the end they have one model."""
    one, two = found["died"]
    assert one["size"] == two["size"] == 2
    assert torch.equal(one["flat"], two["flat"])
    assert 1 <= two["stats"]["steps"] < LONG - 6
    assert one["loss"] < 1.2  # untrained: 1.70


def example_ends_with_one_model(said: str, *ends: dict[str, Tensor]) -> None:
    words = re.search(r"loss ([\d.]+), (\d+) times less than dense", said)
    assert words and float(words[1]) < 1.5 and int(words[2]) > 8
    assert same(*ends)


def test_the_example_ends_with_one_model(found: Found) -> None:
    one, two = found["example"]
    example_ends_with_one_model(one["said"], one["model"], two["model"])


@pytest.mark.nightly  # four more processes
def test_torchrun_starts_the_example(tmp_path: Path) -> None:
    house = lighthouse(at_first=2)
    line = ["torch.distributed.run", "--standalone", "--nproc-per-node", "1"]
    line += ["examples/integrations/torchft_ddp.py", "--steps", "80", "--end"]

    def run(number: str) -> Started:
        told = {"TORCHFT_LIGHTHOUSE": house.address(), "REPLICA_GROUP_ID": number}
        return Started(*line, str(tmp_path / f"{number}.pt"), **told)

    said = [each.end() for each in [run("0"), run("1")]]
    house.shutdown()
    ends = (torch.load(tmp_path / f"{i}.pt", weights_only=True) for i in range(2))
    example_ends_with_one_model(said[0], *ends)

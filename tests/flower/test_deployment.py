"""Real processes: a SuperLink and SuperNodes with TLS and authentication; killed, hostile, not let in."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.flower.example_run import EXAMPLE, example_run

Running = tuple[subprocess.Popen[bytes], Path]  # the process and its folder
APP = Path(__file__).parent / "deployed"
LONGEST_S = 500.0
ROUNDS = 3


def processes_of(folder: Path) -> list[str]:
    """Command lines of processes that name this folder, in their arguments or environment."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            said = (process / "cmdline").read_bytes() + (process / "environ").read_bytes()
        except OSError:
            continue
        if str(folder).encode() in said and int(process.name) != os.getpid():
            found.append(said[:200].decode(errors="replace"))
    return found


def wait_for(path: Path, run: Any) -> None:
    deadline = time.monotonic() + LONGEST_S
    while not path.exists():
        assert time.monotonic() < deadline, f"{path.name} did not come"
        assert run.poll() is None, "the run has ended"
        time.sleep(0.2)


def run_app(deployment: Any, folder: Path, nodes: int, pause: int = 0) -> Any:
    folder.mkdir()
    config = f'num-server-rounds={ROUNDS} nodes={nodes} pause-after={pause} save="{folder}"'
    return deployment.start_run(APP, config)


def finished(run: Any, folder: Path) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    said, _ = run.communicate(timeout=LONGEST_S)
    assert (folder / "model.pt").exists(), said.decode(errors="replace")[-4000:]
    model = torch.load(folder / "model.pt", weights_only=True)
    return model, json.loads((folder / "traffic.json").read_text())


def restart_killed(deployment: Any, number: int) -> None:
    """A SuperLink refuses a node that it holds for alive, for two heartbeats: 60 s. So it is started until
    it is let in, as a service would be.
    """
    let_in = deployment.log("superlink").count("Activated node_id")
    deadline = time.monotonic() + LONGEST_S
    while deployment.log("superlink").count("Activated node_id") == let_in:
        assert time.monotonic() < deadline, deployment.log(f"supernode{number}")[-2000:]
        if number not in deployment.nodes or deployment.nodes[number].poll() is not None:
            deployment.start_node(number, f"partition-id={number}")
        time.sleep(0.5)


@pytest.mark.soak  # minutes: two runs, and a node that is let in again after a minute
@pytest.mark.timeout(1200)
def test_a_run_with_a_killed_and_a_hostile_node_ends_with_the_same_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(EXAMPLE))
    from deployment import Deployment

    with Deployment(tmp_path / "deployment") as deployment:
        for number in range(4):
            deployment.register(number)
        for number in range(3):
            deployment.start_node(number, f"partition-id={number}")
        run = run_app(deployment, tmp_path / "undisturbed", nodes=3)
        expected, before = finished(run, tmp_path / "undisturbed")
        assert not any(each["refused"] for each in before["rounds"])

        deployment.make_key(9)
        stranger = deployment.start_node(9, "partition-id=9")
        deployment.start_node(3, "partition-id=3 hostile=true")
        disturbed = tmp_path / "disturbed"
        run = run_app(deployment, disturbed, nodes=4, pause=1)
        wait_for(disturbed / "paused", run)
        deployment.kill_node(1)
        restart_killed(deployment, 1)
        (disturbed / "go").touch()
        model, after = finished(run, disturbed)

        assert stranger.wait(LONGEST_S) != 0, "a node without a registered key is not let in"
        assert "Failed to activate SuperNode" in deployment.log("supernode9")
    assert all(torch.equal(model[name], expected[name]) for name in expected)
    refused = [each["refused"] for each in after["rounds"]]
    assert [len(each) for each in refused[:ROUNDS]] == [1] * ROUNDS
    assert {(client, reason) for each in refused for client, reason, _ in each} == {
        (refused[0][0][0], "malformed")
    }
    assert all(len(each["up"]) == 4 for each in after["rounds"][:ROUNDS]), "the stranger sent nothing"
    kinds = [each["kinds"] for each in after["rounds"][:ROUNDS]]
    assert kinds[1] == {"updates": 3, "whole": 1, "form": 1}, "who was killed held its model: from its file"
    assert not processes_of(tmp_path)


@pytest.mark.timeout(580)
def test_the_example_ends_all_that_it_starts(deployed_example: Running) -> None:
    script, folder = deployed_example
    code, said = script.wait(LONGEST_S), (folder / "log").read_text(errors="replace")
    assert code == 0, said[-4000:]
    assert not processes_of(folder)
    assert "laconic: round 2: " in said
    rounds = json.loads((folder / "traffic.json").read_text())["rounds"]
    assert [len(each["up"]) for each in rounds[:2]] == [2, 2]
    dense = 4 * sum(value.numel() for value in torch.load(folder / "model.pt").values())
    assert all(dense / nbytes > 100 for each in rounds[:2] for nbytes in each["up"].values())


@pytest.mark.soak
@pytest.mark.timeout(580)
def test_the_example_ends_all_at_ctrl_c(tmp_path: Path) -> None:
    log = tmp_path / "log"
    with example_run(tmp_path) as script:
        while "Successfully started run" not in log.read_text(errors="replace"):
            assert script.poll() is None, log.read_text(errors="replace")[-4000:]
            time.sleep(0.2)
        os.kill(script.pid, signal.SIGINT)
        assert script.wait(LONGEST_S) == 130, log.read_text(errors="replace")[-4000:]
    assert not processes_of(tmp_path)

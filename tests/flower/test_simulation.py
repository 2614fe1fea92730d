"""Flower's simulation engine, which runs clients in processes of Ray."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

EXAMPLE = Path(__file__).parents[2] / "examples" / "flower"
ROUNDS = 2
START_S, LONGEST_S, STOP_S = 120.0, 400.0, 20.0


@pytest.fixture
def environment(tmp_path: Path) -> Iterator[dict[str, str]]:
    """Of a SuperLink that simulates clients, and of commands to it; `flwr run` alone leaves one behind."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    home = tmp_path / "flwr"
    home.mkdir()
    (home / "config.toml").write_text(
        f'[superlink]\ndefault = "here"\n[superlink.here]\naddress = "127.0.0.1:{port}"\ninsecure = true\n'
    )
    environment = {
        **os.environ,
        "FLWR_HOME": str(home),
        "FLWR_TELEMETRY_ENABLED": "0",
        "FLWR_DISABLE_UPDATE_CHECK": "1",
        "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
        "RAY_USAGE_STATS_ENABLED": "0",
        "XDG_STATE_HOME": str(tmp_path / "state"),
        "OMP_NUM_THREADS": "1",
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
    }
    command = ["flower-superlink", "--insecure", "--simulation", "--host", "127.0.0.1", "--port", str(port)]
    with (tmp_path / "superlink.log").open("wb") as log:
        link = subprocess.Popen(
            command, env=environment, stdout=log, stderr=subprocess.STDOUT, start_new_session=True
        )
    try:
        deadline = time.monotonic() + START_S
        while time.monotonic() < deadline:
            assert link.poll() is None, (tmp_path / "superlink.log").read_text(errors="replace")[-4000:]
            with socket.socket() as probe:
                if probe.connect_ex(("127.0.0.1", port)) == 0:
                    break
            time.sleep(0.2)
        yield environment
    finally:
        link.send_signal(signal.SIGTERM)
        deadline = time.monotonic() + STOP_S
        while (left := _of(home)) and time.monotonic() < deadline:
            time.sleep(0.2)
            link.poll()
        for process in left:
            os.kill(process, signal.SIGKILL)
        link.wait()


def _of(home: Path) -> list[int]:
    """Processes that were started with this FLWR_HOME, other than this one."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            environment = (process / "environ").read_bytes()
        except OSError:
            continue
        if f"FLWR_HOME={home}\0".encode() in environment and int(process.name) != os.getpid():
            found.append(int(process.name))
    return found


@pytest.mark.soak  # Ray gives up where its processes take more than half a minute to start
@pytest.mark.timeout(580)
@pytest.mark.parametrize("clients", [2, 4])
def test_the_simulation_engine_runs_compressed_clients(
    clients: int, environment: dict[str, str], tmp_path: Path
) -> None:
    command = [
        *("flwr", "run", str(EXAMPLE), "here", "--stream"),
        *(
            "--federation-config",
            f"num-supernodes={clients} client-resources-num-cpus=1 init-args-num-cpus=2",
        ),
        *("--run-config", f'num-server-rounds={ROUNDS} nodes={clients} save="{tmp_path}"'),
    ]
    run = subprocess.run(command, env=environment, capture_output=True, timeout=LONGEST_S)
    said = (run.stdout + run.stderr).decode(errors="replace")
    assert (tmp_path / "model.pt").exists(), said[-6000:]
    rounds = json.loads((tmp_path / "traffic.json").read_text())["rounds"]
    assert [len(each["up"]) for each in rounds[:ROUNDS]] == [clients] * ROUNDS
    assert [each["kinds"] for each in rounds[:ROUNDS]] == [
        {"form": clients, "whole": clients},
        *[{"updates": clients}] * (ROUNDS - 1),
    ]
    assert not any(each["refused"] for each in rounds)
    model = torch.load(tmp_path / "model.pt", weights_only=True)
    assert all(bool(value.isfinite().all()) for value in model.values())
    memories = list((tmp_path / "state" / "laconic" / "federated").glob("*/*.client"))
    assert len(memories) == clients

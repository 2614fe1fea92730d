"""The launch files of examples/clusters: their own commands run here, as two nodes on this machine.

SLURM's commands are replaced by small scripts, and Kubernetes by the variables that it sets.
"""

from __future__ import annotations

import contextlib
import os
import re
import runpy
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.run import parse_args

from laconic.tools.tasks import checkpoint
from tests.dist.commands import ROOT, children, descendants, finish, run, start, wait_for
from tests.dist.pool import Pool
from tests.unit.shared import for_each

HERE = ROOT / "examples" / "clusters"
ENDLESS = "1000000"
SCRIPTS = {
    "torchrun": f'exec {sys.executable} -m torch.distributed.run "$@"',
    "scontrol": r"""
if [ "$1" = show ]; then printf 'localhost\n127.0.0.1\n'; else echo "$@" >> "$CALLS"; fi
""",
    "srun": """
trap 'kill -TERM "${tasks[@]}"' TERM
for ((node = 0; node < SLURM_NNODES; node++)); do SLURM_NODEID=$node "$@" & tasks+=($!); done
highest=0
for task in "${tasks[@]}"; do
    wait "$task"; code=$?
    while kill -0 "$task" 2> /dev/null; do wait "$task"; code=$?; done
    if ((code > highest)); then highest=$code; fi
done
exit "$highest"
""",
}
KUBEFLOW = {  # set by Kubeflow Trainer in each pod, with the number of the pod
    "PET_NNODES": "2",
    "PET_NPROC_PER_NODE": "1",
    "PET_MASTER_ADDR": "laconic-node-0-0.laconic",
    "PET_MASTER_PORT": "29500",
}
Launch = Callable[..., "subprocess.Popen[str]"]


def scripts(folder: Path, contents: dict[str, str]) -> str:
    """Write executable scripts to a folder, and return a PATH that starts with it."""
    folder.mkdir()
    for name, text in contents.items():
        (folder / name).write_text(f"#!/bin/bash\n{text}\n")
        (folder / name).chmod(0o755)
    return f"{folder}:{os.environ['PATH']}"


@pytest.fixture
def launch(tmp_path: Path) -> Iterator[Launch]:
    """Start a command of the launch files with one output. Its processes end with the test."""
    path, started = scripts(tmp_path / "bin", SCRIPTS), []

    def begin(*words: Any, stdout: Any = subprocess.PIPE, **env: str) -> subprocess.Popen[str]:
        env = {"PATH": path, "FOLDER": str(tmp_path / "run"), "CALLS": str(tmp_path / "calls"), **env}
        process = start(*words, stdout=stdout, stderr=subprocess.STDOUT, env=env, cwd=ROOT)
        started.append(process)
        return process

    yield begin
    for process in started:
        if process.poll() is None:
            for each in (process.pid, *descendants(process.pid)):  # torchrun gives ranks other groups
                with contextlib.suppress(ProcessLookupError):
                    os.kill(each, signal.SIGKILL)
            finish(process)
        if process.stdout is not None:
            process.stdout.close()


def sbatch(launch: Launch, *arguments: str) -> subprocess.Popen[str]:
    """Start the batch script as SLURM does on the first of two nodes."""
    told = {"SLURM_JOB_ID": str(os.getpid()), "SLURM_JOB_NODELIST": "node[1-2]", "SLURM_NNODES": "2"}
    return launch("bash", HERE / "slurm.sbatch", *arguments, **told)


def free_port() -> str:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return str(free.getsockname()[1])


def train(folder: str, steps: int) -> bool:
    """Train by the script in the process group of this rank."""
    before = signal.getsignal(signal.SIGTERM)
    try:
        found: bool = runpy.run_path(str(HERE / "train.py"))["train"](Path(folder), steps=steps, every=20)
        return found
    finally:
        signal.signal(signal.SIGTERM, before)


def model_at(folder: Path, step: int) -> dict[str, torch.Tensor]:
    """Return the model of a checkpoint, after a check that it is the newest."""
    place = checkpoint.latest(folder)
    assert place is not None and checkpoint.step_of(place) == step
    model: dict[str, torch.Tensor] = torch.load(place / "rank0.pt", weights_only=True)["model"]
    return model


def continues_with_the_same_bits(pool: Pool, folder: Path, steps: int) -> None:
    """Continue in the pool if needed, and compare with an uninterrupted run."""
    assert pool.run(2, train, str(folder), steps) == [True, True]
    assert pool.run(2, train, str(folder / "whole"), steps) == [True, True]
    found, expected = model_at(folder, steps), model_at(folder / "whole", steps)
    assert all(torch.equal(found[key], value) for key, value in expected.items())


def saved_step(folder: Path) -> int:
    place = checkpoint.latest(folder)
    return 0 if place is None else checkpoint.step_of(place)


def test_slurm_saves_and_requeues_near_the_time_limit(launch: Launch, pool: Pool, tmp_path: Path) -> None:
    process = sbatch(launch, "--steps", ENDLESS, "--every", "20")
    wait_for(lambda: saved_step(tmp_path / "run"), process)
    process.send_signal(signal.SIGUSR1)
    code, output, _ = finish(process)
    assert code != 0 and "interface lo" in output
    assert (tmp_path / "calls").read_text() == f"requeue {os.getpid()}\n"
    step = saved_step(tmp_path / "run")
    assert f"step {step}: loss" in output
    place = tmp_path / "run" / f"step-{step:06d}"
    assert sorted(part.name for part in place.iterdir()) == ["COMPLETE", "rank0.pt", "rank1.pt"]
    continues_with_the_same_bits(pool, tmp_path / "run", step + 5)


def ranks_of(process: subprocess.Popen[str]) -> list[int]:
    """Return the processes that have no children, which are the ranks."""
    return [each for each in descendants(process.pid) if not children(each)]


@pytest.mark.nightly
@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="finds the ranks in /proc, which is Linux")
def test_slurm_restarts_after_the_loss_of_a_rank(launch: Launch, pool: Pool, tmp_path: Path) -> None:
    process = sbatch(launch, "--steps", "1500", "--every", "20")
    wait_for(lambda: saved_step(tmp_path / "run"), process)
    os.kill(ranks_of(process)[-1], signal.SIGKILL)
    code, output, _ = finish(process)
    assert code == 0, output
    resumed = [int(step) for step in re.findall(r"of 2 resumes after step (\d+)", output)]
    assert len(resumed) == 2 and 0 < resumed[0] == resumed[1] < 1500
    assert "finished on 2 ranks" in output and not (tmp_path / "calls").exists()
    continues_with_the_same_bits(pool, tmp_path / "run", 1500)


def test_the_interface_leads_to_another_host(tmp_path: Path) -> None:
    answers = {
        "getent": 'echo "10.0.0.${2#node}  STREAM $2"',
        "ip": 'case "$4" in 10.0.0.2) echo "$4 dev eno7 src 10.0.0.1";; *) echo "local $4 dev lo";; esac',
    }
    env = {"PATH": scripts(tmp_path / "bin", answers)}

    def found(hosts: str, **more: str) -> list[str]:
        command = 'echo "$GLOO_SOCKET_IFNAME $NCCL_SOCKET_IFNAME"'
        done = run("bash", HERE / "interface.sh", hosts, "bash", "-c", command, env=env | more)
        assert done.code == 0, done
        return done.output.splitlines()[-1].split()

    assert found("node1 node2") == found("node2\nnode1") == ["eno7", "eno7"]
    assert found("node1") == ["lo", "lo"]
    assert found("node1 node2", GLOO_SOCKET_IFNAME="ib0") == ["ib0", "eno7"]


def manifests(name: str) -> dict[str, dict[str, Any]]:
    """Return the objects of a file by their kinds."""
    yaml = pytest.importorskip("yaml", reason="PyYAML is not installed")
    return {each["kind"]: each for each in yaml.safe_load_all((HERE / name).read_text())}


def pod(name: str) -> dict[str, Any]:
    """Return the specification of the pods that a file starts."""
    spec = manifests(name)["JobSet" if name == "jobset.yaml" else "TrainingRuntime"]["spec"]
    (job,) = spec["template"]["spec"]["replicatedJobs"] if "template" in spec else spec["replicatedJobs"]
    found: dict[str, Any] = job["template"]["spec"]["template"]["spec"]
    return found


def command_and_variables(name: str, node: int) -> tuple[list[str], dict[str, str]]:
    """Return the command of a pod and the variables that it gets from Kubernetes or Kubeflow."""
    (container,) = pod(name)["containers"]
    env = {each["name"]: each.get("value", str(node)) for each in container["env"]}
    if name == "jobset.yaml":
        return container["command"], env
    trainer = manifests(name)["TrainJob"]["spec"]["trainer"]
    assert (str(trainer["numNodes"]), str(trainer["numProcPerNode"])) == ("2", "1")
    return trainer["command"], {**KUBEFLOW, "PET_NODE_RANK": str(node), **env}


FILES = ("trainjob.yaml", "jobset.yaml")


@for_each("name", FILES)
def test_torchrun_takes_the_variables_of_kubernetes(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for node in range(2):
        command, env = command_and_variables(name, node)
        for key, value in env.items():
            monkeypatch.setenv(key, value)
        assert command[0] == "torchrun"
        found = parse_args(command[1:])
        assert (found.nnodes, found.nproc_per_node, found.node_rank) == ("2", "1", node)
        assert (found.master_addr, found.master_port) == ("laconic-node-0-0.laconic", 29500)
        assert (ROOT / found.training_script).is_file()
        assert found.training_script_args == ["--folder", "/checkpoints"]


@for_each("name", FILES)
def test_manifests_are_complete(name: str) -> None:
    spec = pod(name)
    (container,) = spec["containers"]
    assert {"name", "image", "env", "volumeMounts"} <= container.keys()
    assert spec["restartPolicy"] == "Never" and spec["terminationGracePeriodSeconds"] > 30
    assert [each["mountPath"] for each in container["volumeMounts"]] == ["/checkpoints"]
    assert [each["name"] for each in container["volumeMounts"]] == [each["name"] for each in spec["volumes"]]
    for each in manifests(name).values():
        assert re.fullmatch(r"[a-z.\-0-9]+/v1alpha[12]", each["apiVersion"]) and each["metadata"]["name"]
    if name == "trainjob.yaml":
        runtime, job = (manifests(name)[kind] for kind in ("TrainingRuntime", "TrainJob"))
        assert job["spec"]["runtimeRef"] == {
            "apiGroup": "trainer.kubeflow.org",
            "kind": "TrainingRuntime",
            "name": runtime["metadata"]["name"],
        }


def test_manifests_have_the_fields_of_their_schemas() -> None:
    models = pytest.importorskip(
        "kubeflow_trainer_api.models", reason="kubeflow-trainer-api is not installed"
    )
    schemas = {
        "TrainingRuntime": models.TrainerV1alpha1TrainingRuntime,
        "TrainJob": models.TrainerV1alpha1TrainJob,
        "JobSet": models.JobsetV1alpha2JobSet,
    }

    def without_none(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: without_none(each) for key, each in value.items() if each is not None}
        return [without_none(each) for each in value] if isinstance(value, list) else value

    for name in FILES:
        for kind, given in manifests(name).items():
            assert without_none(schemas[kind].from_dict(given).to_dict()) == given  # drops unknown fields


def pods(launch: Launch, name: str, folder: Path, *arguments: str) -> list[subprocess.Popen[str]]:
    """Start the commands of both pods on this machine."""
    here = {"PET_MASTER_ADDR": "127.0.0.1", "PET_MASTER_PORT": free_port(), "GLOO_SOCKET_IFNAME": "lo"}
    started = []
    for node in range(2):
        command, env = command_and_variables(name, node)
        words = [str(folder) if word == "/checkpoints" else word for word in command]
        started.append(launch(*words, *arguments, **(env | here)))
    return started


@pytest.mark.nightly
@pytest.mark.parametrize("name", FILES)
def test_pods_save_at_an_eviction_and_resume(name: str, launch: Launch, pool: Pool, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    started = pods(launch, name, folder, "--steps", ENDLESS, "--every", "20")
    wait_for(lambda: saved_step(folder), *started)
    started[1].terminate()
    assert all(finish(each).code != 0 for each in started)  # so that both are started again
    step = saved_step(folder)
    outputs = [finish(each) for each in pods(launch, name, folder, "--steps", str(step + 5))]
    assert [each.code for each in outputs] == [0, 0]
    assert f"rank 1 of 2 resumes after step {step}" in outputs[1].output
    continues_with_the_same_bits(pool, folder, step + 5)


@pytest.mark.nightly
def test_spot_instances_leave_and_join(launch: Launch, tmp_path: Path) -> None:
    """The survivor continues alone, and then with a new instance, each time from the newest step."""
    port = free_port()
    store = launch(sys.executable, HERE / "store.py", "--port", port)
    told = {"NODES": "1:2", "PORT": port, "LAST_CALL_S": "2", "PYTHONUNBUFFERED": "1"}

    def instance() -> subprocess.Popen[str]:
        with (tmp_path / "log").open("a") as log:
            return launch("bash", HERE / "spot.sh", "127.0.0.1", "--steps", ENDLESS, stdout=log, **told)

    def logged(pattern: str) -> list[str]:
        return re.findall(pattern, (tmp_path / "log").read_text())

    first, second = instance(), instance()
    wait_for(lambda: saved_step(tmp_path / "run"), first, second, store)
    first.terminate()
    finish(first)
    wait_for(lambda: logged("rank 0 of 1 resumes"), second, store)
    left = saved_step(tmp_path / "run")
    assert left
    third = instance()
    wait_for(lambda: len(logged("of 2 resumes")) == 2, second, third, store)
    steps = [int(step) for step in logged(r"resumes after step (\d+)")]
    assert len(steps) == 3 and 0 < steps[0] < steps[1] == steps[2]
    for each in (second, third, store):
        each.terminate()
        finish(each)


def test_another_number_of_ranks_resumes(pool: Pool, tmp_path: Path) -> None:
    assert pool.run(2, train, str(tmp_path), 30) == [True, True]
    parts = [torch.load(tmp_path / "step-000030" / f"rank{r}.pt", weights_only=True) for r in range(2)]
    for size, steps in ((1, 40), (2, 60)):
        assert pool.run(size, train, str(tmp_path), steps) == [True] * size
        saved = torch.load(tmp_path / f"step-{steps:06d}" / "rank0.pt", weights_only=True)
        assert saved["handle"]["size"] == size and saved["handle"]["step"] == steps
    assert any(bool(value.any()) for value in parts[1]["handle"]["tensors"].values())


def ray_worker(folder: str) -> bool:
    """Train by the function that Ray calls, without Ray, and return whether it has saved the last step."""
    sys.path.insert(0, str(HERE))
    before = signal.getsignal(signal.SIGTERM)
    try:
        config = {"folder": folder, "steps": 30, "every": 20, "spec": "topk(density=0.05)"}
        runpy.run_path(str(HERE / "ray_job.py"))["train_func"](config)
    finally:
        signal.signal(signal.SIGTERM, before)
        sys.path.remove(str(HERE))
        sys.modules.pop("train")
    dist.barrier()
    return saved_step(Path(folder)) == 30


def test_the_function_for_ray_trains(pool: Pool, tmp_path: Path) -> None:
    assert pool.run(2, ray_worker, str(tmp_path)) == [True, True]


def test_the_page_names_every_launch_file() -> None:
    text = (ROOT / "docs" / "clusters.md").read_text()
    files = [path.name for path in HERE.iterdir() if path.is_file()]
    assert len(files) >= 8 and not [name for name in files if f"examples/clusters/{name}" not in text]

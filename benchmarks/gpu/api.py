"""Part api: the library on NCCL with one rank: groups, DDP, FSDP2, AMP, torch.compile, CUDA graphs.

One rank has nothing to send, but everything runs: groups, streams, hooks, codecs and optimisers.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD

import laconic
from benchmarks.gpu.job import Job
from benchmarks.gpu.nets import batch, optimizer_for, small_net, train
from laconic.comm.torch_comm import TorchComm
from laconic.core.errors import LaconicError

ROOT = Path(__file__).parents[2]
METHODS = (
    "fp16()",
    "bf16()",
    "cgx(bits=4)",
    "cgx(bits=8, rounding='stochastic')",
    "dgc(density=0.05)",
    "powersgd(rank=2)",
    "oktopk(density=0.05)",
    "deft(density=0.05)",
    "qsgd(levels=7)",
    "onebit_adam()",
    "zero_one_adam()",
    "auto()",
    "signum()",
    "sketchml()",
    "terngrad()",
    "stc()",
    "natural()",
    "fastsgd()",
)


def run(job: Job) -> None:
    """Run the cases; what may leave the device in a bad state is last."""
    tests = _start_tests(job)
    backend, options = ("nccl", {"device_id": job.device}) if job.cuda else ("gloo", {})
    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1, **options)
    case(job, "groups: own, among, split", lambda: groups(job.device))
    for spec in METHODS:
        case(job, f"DDP {spec}", lambda: under_ddp(job.device, spec))  # noqa: B023
    for spec in ("cgx(bits=4)", "dgc(density=0.05)", "powersgd(rank=2)"):
        case(job, f"bf16 autocast {spec}", lambda: under_ddp(job.device, spec, torch.bfloat16))  # noqa: B023
        case(job, f"fp16 GradScaler {spec}", lambda: scaled(job.device, spec))  # noqa: B023
    for spec in ("cgx(bits=4)", "cgx(bits=8)", "error_fed(scatter_reduce(minmax(bits=8)))"):
        case(job, f"FSDP2 {spec}", lambda: sharded(job.device, spec))  # noqa: B023
    if job.cuda or job.left() > 60:
        case(job, "torch.compile cgx(bits=4)", lambda: compiled(job.device))
    _end_tests(job, tests)
    if job.cuda:
        captured(job)  # the group stays open: the device may be in a bad state
    else:
        job.skip("capture in a CUDA graph", "no CUDA device")
        dist.destroy_process_group()


def case(job: Job, name: str, call: Callable[[], Any]) -> None:
    """Run one case: it is right if it raises nothing and its loss falls."""
    if job.left() < 6:
        job.skip(name, "no time")
        return
    began = time.perf_counter()
    try:
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always")
            found = call()
    except Exception as error:
        job.fail(name, error)
        return
    falls = not isinstance(found, list) or found[-1] < found[0]
    told = sorted({str(each.message)[:160] for each in seen})[:3]
    job.check(name, falls, found=found, s=round(time.perf_counter() - began, 2), warnings=told)


def groups(device: torch.device) -> list[float]:
    """Make groups in each way, and sum in them."""
    total, made = 0.0, [TorchComm.own()]
    made.append(TorchComm.among([0], "one of them", made[0]))
    made += [made[0].split(0), made[1].split(0)]
    for comm in made:
        x = torch.ones(1000, device=device)
        comm.all_reduce(x)
        total += float(x.sum()) + float(comm.all_gather(x)[0].sum())
    assert total == 2000 * len(made), total
    for comm in made[:2]:
        comm.close()
    return [1.0, 0.0]


def under_ddp(
    device: torch.device, spec: str, dtype: torch.dtype | None = None, scaler: Any = None
) -> list[float]:
    """Train under DDP by a method, and return the first and the last loss."""
    torch.manual_seed(0)
    devices = [0] if device.type == "cuda" else None
    model = DistributedDataParallel(small_net().to(device), device_ids=devices, bucket_cap_mb=0.2)
    optimizer = optimizer_for(model, spec)
    handle = laconic.compress(model, optimizer, spec, scaler=scaler)
    losses = train(model, optimizer, 0, device, dtype=dtype, scaler=scaler)
    state = handle.state_dict()
    handle.load_state_dict(state)
    handle.remove()
    return losses


def scaled(device: torch.device, spec: str) -> list[float]:
    """Train in fp16 with a GradScaler."""
    dtype = torch.float16 if device.type == "cuda" else torch.bfloat16
    return under_ddp(device, spec, dtype, torch.amp.GradScaler(device.type))


def sharded(device: torch.device, spec: str) -> list[float]:
    """Train under `fully_shard`, with compressed gradients and parameters."""
    torch.manual_seed(0)
    model = small_net().to(device)
    fully_shard(model)
    optimizer = SGD(model.parameters(), lr=0.02, momentum=0.9)
    handle = laconic.compress(model, optimizer, spec, parameters="minmax(bits=8)")
    losses = train(model, optimizer, 0, device)
    handle.remove()
    return losses


def compiled(device: torch.device) -> list[float]:
    """Train a compiled model under DDP."""
    torch.manual_seed(0)
    model = DistributedDataParallel(small_net().to(device))
    optimizer = SGD(model.parameters(), lr=0.02)
    handle = laconic.compress(model, optimizer, "cgx(bits=4)")
    losses = train(torch.compile(model), optimizer, 0, device, steps=4)  # type: ignore[arg-type]
    handle.remove()
    return losses


def captured(job: Job) -> None:
    """Check that backward in a CUDA graph is refused with an error that says so."""
    name = "capture in a CUDA graph is refused"
    model = DistributedDataParallel(small_net().to(job.device))
    optimizer = SGD(model.parameters(), lr=0.02)
    laconic.compress(model, optimizer, "cgx(bits=4)")
    x, y = batch(0, job.device)
    side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    side.wait_stream(torch.cuda.current_stream())  # type: ignore[no-untyped-call]
    try:
        with torch.cuda.stream(side):
            for _ in range(12):
                optimizer.zero_grad(set_to_none=True)
                functional.cross_entropy(model(x), y).backward()  # type: ignore[no-untyped-call]
                optimizer.step()
        torch.cuda.current_stream().wait_stream(side)  # type: ignore[no-untyped-call]
        optimizer.zero_grad(set_to_none=True)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            functional.cross_entropy(model(x), y).backward()  # type: ignore[no-untyped-call]
    except Exception as error:
        chain: list[BaseException] = []
        link: BaseException | None = error
        while link is not None and link not in chain:
            chain.append(link)
            link = link.__cause__ or link.__context__
        texts = [f"{type(each).__name__}: {str(each)[:200]}" for each in chain]
        clear = any("capture" in str(each) and isinstance(each, LaconicError) for each in chain)
        clear = clear or any(
            "laconic" in str(each).lower() and "graph" in str(each).lower() for each in chain
        )
        job.check(name, clear, errors=texts)
    else:
        job.check(name, False, errors=["it was captured"])


def _start_tests(job: Job) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "pytest", "-q", "-x", "--timeout", "60", "-p", "no:cacheprovider"]
    command += ["-W", "ignore", "-o", "addopts=--import-mode=importlib", "tests/dist/test_cuda.py"]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(ROOT)])}
    return subprocess.Popen(
        command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )


def _end_tests(job: Job, tests: subprocess.Popen[str]) -> None:
    name = "tests/dist/test_cuda.py"
    try:
        said = tests.communicate(timeout=max(5.0, job.left() - 10))[0]
    except subprocess.TimeoutExpired:
        tests.kill()
        job.skip(name, "no time")
        return
    last = said.strip().splitlines()[-1] if said.strip() else ""
    job.check(name, tests.returncode == 0, result=last, tail="" if tests.returncode == 0 else said[-2500:])

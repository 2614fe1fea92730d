"""Part ranks: two processes on one card over gloo: equal replicas, streams that wait, the CPU's results.

A model whose gradients are given exactly is trained three times: on the GPU with pauses of the GPU before
gradients and before exchanges, which shows a stream that does not wait for another; without pauses; and on
the CPU with the reference. Learning rate and momentum are powers of 2, so rounding is the same on both.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD, Adam

import laconic
from benchmarks.gpu.compare import difference, relative, same
from benchmarks.gpu.job import Job, brief
from benchmarks.gpu.nets import digest, optimizer_for, small_net, train
from laconic import kernels
from laconic.exchange.attached import Attached

ROOT = Path(__file__).parents[2]
SHAPES = ((64, 300), (64,), (128, 260), (40, 7, 3, 3), (1000, 65), (1000,))
STEPS = 6
PAUSE = 1_000_000  # cycles: half a millisecond
PAUSED: dict[str, bool] = {"now": False}  # read by the patched exchange
EQUAL = (
    "fp16()",
    "cgx(bits=4)",
    "cgx(bits=8, rounding='stochastic')",
    "dgc(density=0.05)",
    "qsgd(levels=7)",
    "terngrad()",
    "oktopk(density=0.05)",
    "deft(density=0.05)",
    "stc()",
    "sketchml(density=0.05, bins=16)",
    "topk(density=0.05)",
    "natural()",
    "fastsgd()",
    "server(sparse(topk(density=0.1)), down=sparse(topk(density=0.1)))",
)
NEAR = ("powersgd(rank=2)", "signum()", "onebit_adam()", "dgc(density=0.05, down=0.05)")
WITHIN = 1e-5  # |a - b| / |b| of parameters for methods whose bits may differ from the CPU's
Row = dict[str, Any]


class Given(nn.Module):
    """A model whose gradient is its argument."""

    def __init__(self) -> None:
        super().__init__()
        rng = torch.Generator().manual_seed(1)
        tensors = [nn.Parameter(torch.randn(shape, generator=rng)) for shape in SHAPES]
        self.tensors = nn.ParameterList(tensors)

    def forward(self, grads: list[Tensor]) -> Tensor:
        products = [(each * grad).sum() for each, grad in zip(self.tensors, grads, strict=True)]
        return torch.stack(products).sum()


def run(job: Job) -> None:
    """Run as rank 0, and start rank 1."""
    with tempfile.TemporaryDirectory() as folder:
        meeting = f"{folder}/meeting"
        command = [sys.executable, "-m", __name__, job.device.type, meeting, f"{job.left():.0f}"]
        command.append(f"{job.shard}/{job.shards}")
        log = (job.out / f"ranks.{job.shard + 1}.other.log").open("w")
        other = subprocess.Popen(command, cwd=ROOT, env={**os.environ}, stdout=log, stderr=log)
        try:
            play(0, job.device, meeting, slice(job.shard, None, job.shards), job)
        finally:
            other.kill()
            log.close()


def play(
    rank: int, device: torch.device, meeting: str, mine: slice, job: Job | None, seconds: float = 0.0
) -> None:
    """Run the cases of a shard as one of two ranks; rank 0, which has the job, compares."""
    end = time.monotonic() + (job.left() if job else seconds)
    dist.init_process_group(
        "gloo", init_method=f"file://{meeting}", rank=rank, world_size=2, timeout=timedelta(seconds=60)
    )
    patch_exchange()
    from tests.laws.table import specs  # the registry's examples

    from laconic.strategies.strategy import Strategy

    cases: list[tuple[str, Callable[[], Row]]] = []
    for spec in (*EQUAL, *NEAR):
        cases.append((f"given gradients: {spec}", lambda spec=spec: given(spec, rank, device)))  # type: ignore[misc]
    for spec in ("fp16()", "cgx(bits=4)", "dgc(density=0.05)", "powersgd(rank=2)", "auto()", "signum()"):
        cases.append((f"training: {spec}", lambda spec=spec: trained(spec, rank, device)))  # type: ignore[misc]
    for spec in specs(Strategy):
        cases.append((f"distribute {spec}", lambda spec=spec: strategy(spec, rank, device)))  # type: ignore[misc]
    for name, call in cases[mine]:
        if not _time_for_all(end):
            if job is not None:
                job.skip(name, "no time")
            continue
        try:
            row = call()
        except Exception as error:
            row = {"error": brief(error)}
        rows: list[Row | None] = [None, None]
        dist.all_gather_object(rows, row)
        if job is not None:
            judge(job, name, [each or {} for each in rows])
    dist.destroy_process_group()


def _time_for_all(end: float) -> bool:
    """Return whether rank 0 has time for another case: both ranks get the same answer."""
    left = torch.tensor([end - time.monotonic()])
    dist.broadcast(left, src=0)
    return bool(left > 15)


def judge(job: Job, name: str, rows: list[Row]) -> None:
    """Store the result of a case: the replicas are equal, and all that each rank has found is right."""
    errors = [f"rank {rank}: {row['error']}" for rank, row in enumerate(rows) if "error" in row]
    if errors and all("SpecError" in error for error in errors):
        job.skip(name, f"not for 2 ranks: {errors[0][:200]}")
        return
    wrong = errors + [text for row in rows for text in row.get("wrong", [])]
    if not errors and rows[0].get("replicas") and rows[0]["replicas"] != rows[1]["replicas"]:
        wrong.append("replicas differ")
    job.check(name, not wrong, wrong=wrong[:4], found=rows[0].get("found"), s=rows[0].get("s"))


def patch_exchange() -> None:
    """Let the GPU pause before each exchange, on the stream on which it runs, where `PAUSED` says so."""
    mean = Attached.mean_

    def late(self: Attached, bucket: Tensor, *args: Any, **kwargs: Any) -> bool:
        if PAUSED["now"] and bucket.is_cuda:
            torch.cuda._sleep(PAUSE)  # type: ignore[no-untyped-call]
        return mean(self, bucket, *args, **kwargs)

    Attached.mean_ = late  # type: ignore[method-assign]


@contextmanager
def paused(on: bool) -> Iterator[None]:
    """Pause the GPU before exchanges inside the block."""
    PAUSED["now"] = on
    try:
        yield
    finally:
        PAUSED["now"] = False


def given(spec: str, rank: int, device: torch.device) -> Row:
    """Compare the trainings of the model of given gradients."""
    began = time.perf_counter()
    with paused(True):
        late = parameters(spec, rank, device, pause=True)
    plain = parameters(spec, rank, device)
    with kernels.using("reference"):
        cpu = parameters(spec, rank, torch.device("cpu"))
    wrong = []
    if not same(late, plain):
        wrong.append(f"rank {rank}: with pauses: {difference(late, plain)}")
    far = relative(plain, cpu)
    if spec in EQUAL and not same(plain, cpu):
        wrong.append(f"rank {rank}: CPU: {difference(plain, cpu)}, {far:.1e} apart")
    if not far <= WITHIN:
        wrong.append(f"rank {rank}: {far:.1e} from the CPU, at most {WITHIN:g}")
    found = {"from_cpu": far}
    return {"wrong": wrong, "replicas": digest([plain]), "found": found, "s": time.perf_counter() - began}


def parameters(spec: str, rank: int, device: torch.device, pause: bool = False) -> Tensor:
    """Return the parameters after some steps, on the CPU."""
    model = DistributedDataParallel(Given().to(device), bucket_cap_mb=0.1)
    if "adam" in spec:
        optimizer: torch.optim.Optimizer = Adam(model.parameters(), lr=1 / 64)
    else:
        optimizer = SGD(model.parameters(), lr=1 / 16, momentum=0.5)
    handle = laconic.compress(model, optimizer, spec)
    hooks = (
        [each.register_hook(_pause) for each in model.parameters()] if pause and device.type == "cuda" else []
    )
    rng = torch.Generator().manual_seed(50 + rank)
    for _ in range(STEPS):
        grads = [(torch.randn(shape, generator=rng) ** 3).to(device) for shape in SHAPES]
        optimizer.zero_grad()
        model(grads).backward()
        optimizer.step()
    found = torch.cat([each.detach().flatten() for each in model.parameters()]).cpu()
    for hook in hooks:
        hook.remove()
    handle.remove()
    return found


def _pause(grad: Tensor) -> Tensor:
    """Let the gradient be late: what copies it must wait for this stream."""
    torch.cuda._sleep(PAUSE)  # type: ignore[no-untyped-call]
    return grad * 1


def trained(spec: str, rank: int, device: torch.device) -> Row:
    """Train a small net on batches that differ by rank."""
    began = time.perf_counter()
    torch.manual_seed(0)
    devices = [0] if device.type == "cuda" else None
    model = DistributedDataParallel(small_net().to(device), device_ids=devices, bucket_cap_mb=0.2)
    optimizer = optimizer_for(model, spec)
    handle = laconic.compress(model, optimizer, spec)
    with paused(True):
        losses = train(model, optimizer, rank, device)
    row = {"replicas": digest(model.parameters()), "found": losses, "s": time.perf_counter() - began}
    handle.remove()
    return row if losses[-1] < losses[0] else {**row, "wrong": [f"rank {rank}: the loss does not fall"]}


def strategy(spec: str, rank: int, device: torch.device) -> Row:
    """Train by a strategy, whose replicas are equal once it has handed over its result."""
    began = time.perf_counter()
    torch.manual_seed(0)
    model = small_net().to(device)
    wrapped, optimizer = laconic.distribute(model, SGD(model.parameters(), lr=0.02), spec)
    losses = train(wrapped, optimizer, rank, device, steps=8)
    optimizer.finish()
    row = {"replicas": digest(model.parameters()), "found": losses, "s": time.perf_counter() - began}
    return row if losses[-1] < 2 * losses[0] else {**row, "wrong": [f"rank {rank}: the loss grows"]}


if __name__ == "__main__":
    kind, where, left, part = sys.argv[1:]
    shard, shards = (int(word) for word in part.split("/"))
    if kind == "cuda":
        torch.cuda.set_device(0)
    place = torch.device(kind, 0) if kind == "cuda" else torch.device("cpu")
    play(1, place, where, slice(shard, None, shards), None, float(left))

"""Part step: milliseconds, launches and host waits of the exchange of ResNet-50's gradient.

`exchange`: one rank of 2 and of 8 with the recorded messages of the others, so the figures are those of
encoding and decoding, not of a network. `ddp`: steps of ResNet-50 under DDP with one rank over NCCL, where a
user sees what remains of them.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD

import laconic
from benchmarks.gpu.compare import Waits
from benchmarks.gpu.job import Job, Row
from benchmarks.gpu.nets import small_net
from benchmarks.gpu.replay import Log, Recorded, Replayed, rank_gradients
from laconic.comm.comm import Comm
from laconic.comm.loopback import Loopback
from laconic.comm.metered import Metered
from laconic.core.layout import Layout
from laconic.exchange.attached import Attached
from laconic.exchange.method import lift
from laconic.exchange.no_optimiser import MOMENTUM_SGD

BUCKET = 25 << 20  # bytes, as DDP has them
GOALS = {  # ms of an exchange among 8 ranks
    "cgx(bits=4)": 2.0,
    "powersgd(rank=2)": 8.0,
    "terngrad()": 3.0,
    "qsgd(levels=7)": 3.0,
    "dgc(density=0.001)": 3.0,
}
SPECS = (
    *GOALS,
    "fp16()",
    "oktopk(density=0.01)",
    "deft(density=0.01)",
    "signum()",
    "onebit_adam()",
    "sketchml()",
    "topk(density=0.01)",
    "natural()",
)
WARM, ROUNDS = 2, 6  # steps before and in a measurement
WAITS, LAUNCHES = 2, 40  # per bucket
LAUNCHES_CGX, LAUNCHES_POWERSGD = 25, 16  # per bucket; per bucket and shape of its matrices
DDP = (
    None,
    "fp16()",
    "cgx(bits=4)",
    "powersgd(rank=2)",
    "dgc(density=0.001)",
    "qsgd(levels=7)",
    "auto()",
    None,
)


def run(job: Job) -> None:
    """Time exchanges, then steps under DDP."""
    layout, buckets = resnet50(small=not job.cuda)
    job.note("gradient", elements=layout.numel, tensors=len(layout), buckets=len(buckets))
    for size in (8, 2):
        for spec in SPECS:
            name = f"exchange {spec}, {size} ranks"
            if job.left() < 40:
                job.skip(name, "no time")
                continue
            try:
                exchanged(job, name, spec, size, layout, buckets)
            except Exception as error:
                job.fail(name, error)
            if job.cuda:
                torch.cuda.empty_cache()
    under_ddp(job)


def resnet50(small: bool = False) -> tuple[Layout, list[Layout]]:
    """Return ResNet-50's layout, and its buckets, last tensors first; with `small` the first 40 tensors."""
    from tests.unit.resnet import resnet50 as whole

    layout = whole()
    shapes = [(entry.name, tuple(entry.shape)) for entry in layout]
    if small:
        shapes = shapes[:40]
        layout = Layout.of(shapes)
    buckets, part, nbytes = [], [], 0
    for name, shape in reversed(shapes):
        part.append((name, shape))
        nbytes += 4 * torch.Size(shape).numel()
        if nbytes >= BUCKET:
            buckets.append(Layout.of(part))
            part, nbytes = [], 0
    return layout, [*buckets, Layout.of(part)] if part else buckets


def exchanged(job: Job, name: str, spec: str, size: int, layout: Layout, buckets: list[Layout]) -> None:
    """Time the exchange of a gradient, and count its launches and host waits."""
    began = time.perf_counter()
    record(job, spec, size, layout, buckets, 1)
    rounds = ROUNDS if (took := time.perf_counter() - began) < 1.5 else 1
    if took > 8:
        job.skip(name, f"a step of {size} ranks takes {took:.0f} s")
        return
    log = record(job, spec, size, layout, buckets, WARM + 2 + rounds)
    metered = Metered(Replayed(0, size, log))
    step = Step(spec, layout, buckets, metered, 0, job.device)
    if job.cuda:
        torch.cuda.reset_peak_memory_stats()
    for _ in range(WARM):
        step()
    before = metered.snapshot().network_sent
    with Waits(job.device) as waits:
        step()
    sent = metered.snapshot().network_sent - before
    times = timed(step, job, rounds)
    figures: Row = {**times, "sent_mb": sent / 1e6}
    if job.cuda:
        figures |= {
            "waits": waits.count,
            "peak_gb": torch.cuda.max_memory_allocated() / 1e9,
            **profiled(step),
        }
    row: Row = {"figures": figures, "where": waits.where, "buckets": len(buckets)}
    goal = GOALS.get(spec) if size == 8 else None
    if goal is not None:
        figures["goal_ms"] = goal
    if goal is None or not job.cuda:
        job.note(name, **row)
    else:
        job.check(name, times["ms"] <= goal, **row)
    if job.cuda:
        within(job, spec, size, figures, buckets)


class Step:
    """The exchange of a rank's gradient, bucket by bucket."""

    def __init__(
        self, spec: str, layout: Layout, buckets: list[Layout], comm: Metered, rank: int, device: torch.device
    ) -> None:
        self.buckets = buckets
        self.exchange = Attached(lift(spec), layout, comm, MOMENTUM_SGD)
        sizes = [bucket.numel for bucket in buckets]
        self.grads = rank_gradients(sizes, rank, device, lambda x: x**3)
        self.flat = [grad.clone() for grad in self.grads]

    def __call__(self) -> None:
        self.exchange.begin()
        for grad, flat, bucket in zip(self.grads, self.flat, self.buckets, strict=True):
            flat.copy_(grad)
            self.exchange.mean_(flat, bucket)
        self.exchange.end()
        if self.exchange.skip_reason is not None:
            raise RuntimeError(f"the step is void: {self.exchange.skip_reason}")


def record(job: Job, spec: str, size: int, layout: Layout, buckets: list[Layout], steps: int) -> Log:
    """Run some steps of all ranks, as threads on one device, and return what rank 0 received."""
    log: Log = []

    def play(comm: Loopback) -> None:
        own: Comm = Recorded(comm, log) if comm.rank == 0 else comm
        step = Step(spec, layout, buckets, Metered(own), comm.rank, job.device)
        for _ in range(steps):
            step()

    Loopback.run(size, play, timeout_s=60.0)
    synchronise(job)
    return log


def within(job: Job, spec: str, size: int, figures: Row, buckets: list[Layout]) -> None:
    """Check the budgets of host waits and launches; a copy of this benchmark a bucket is not counted."""
    waits = figures["waits"]
    job.check(f"waits of {spec}, {size} ranks", waits <= WAITS * len(buckets), waits=waits)
    limit = budget(spec, size, buckets)
    launches = figures["launches"] - len(buckets)
    job.check(f"launches of {spec}, {size} ranks", launches <= limit, launches=launches, limit=limit)


def budget(spec: str, size: int, buckets: list[Layout]) -> int:
    """Return the most launches of an exchange. Sparse messages are added in one launch for each rank.

    >>> budget("cgx(bits=4)", 8, resnet50()[1]), budget("dgc(density=0.001)", 8, resnet50()[1])
    (100, 192)
    """
    if spec.startswith("cgx"):
        return LAUNCHES_CGX * len(buckets)
    if spec.startswith("powersgd"):
        shapes = [{(e.shape[0], e.numel) for e in bucket if len(e.shape) > 1} for bucket in buckets]
        return LAUNCHES_POWERSGD * sum(map(len, shapes))
    sparse = any(name in spec for name in ("dgc", "topk", "sketchml", "deft"))
    return (LAUNCHES + (size if sparse else 0)) * len(buckets)


def timed(step: Callable[[], object], job: Job, rounds: int) -> dict[str, float]:
    """Return median milliseconds of a step: until it is done, and until the host has launched it."""
    done, launched = [], []
    for _ in range(rounds):
        synchronise(job)
        began = time.perf_counter()
        step()
        launched.append(time.perf_counter() - began)
        synchronise(job)
        done.append(time.perf_counter() - began)
        if sum(done) > 4:
            break
    return {"ms": 1e3 * statistics.median(done), "host_ms": 1e3 * statistics.median(launched)}


def synchronise(job: Job) -> None:
    """Wait for the GPU, if there is one."""
    if job.cuda:
        torch.cuda.synchronize()


def profiled(step: Callable[[], object]) -> Row:
    """Return the number of launches of a step, and the milliseconds in which the GPU works."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as found:
        step()
        torch.cuda.synchronize()
    events = [each for each in found.events() if each.device_type == torch.autograd.DeviceType.CUDA]
    busy = sum(each.self_device_time_total for each in events)
    return {"launches": len(events), "busy_ms": busy / 1e3}


def under_ddp(job: Job) -> None:
    """Time steps of ResNet-50 with one rank over NCCL, batch 64, bf16 autocast, channels_last."""
    if job.left() < 10:
        job.skip("ddp", "no time")
        return
    device = job.device
    backend, options = ("nccl", {"device_id": device}) if job.cuda else ("gloo", {})
    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1, **options)
    size, count = (224, 64) if job.cuda else (16, 8)
    x = torch.randn(count, 3, size, size, device=device).to(memory_format=torch.channels_last)
    y = torch.randint(0, 10, (count,), device=device)
    for spec in DDP:
        if job.left() < 6:
            job.skip(f"ddp {spec or 'plain'}", "no time")
            continue
        try:
            job.note(f"ddp {spec or 'plain'}", figures=ddp_step(job, spec, x, y))
        except Exception as error:
            job.fail(f"ddp {spec or 'plain'}", error)
    dist.destroy_process_group()


def ddp_step(job: Job, spec: str | None, x: Tensor, y: Tensor) -> Row:
    """Return milliseconds of a training step, with a method or without."""
    torch.manual_seed(0)
    model: nn.Module = _model(job).to(job.device).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    wrapped = DistributedDataParallel(model, device_ids=[0] if job.cuda else None)
    optimizer = SGD(wrapped.parameters(), lr=0.01, momentum=0.9)
    handle = laconic.compress(wrapped, optimizer, spec) if spec else None

    def step() -> None:
        optimizer.zero_grad()
        with torch.autocast(job.device.type, torch.bfloat16):
            loss = functional.cross_entropy(wrapped(x), y)
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()

    for _ in range(4):
        step()
    figures = {key: round(value, 2) for key, value in timed(step, job, rounds=9).items()}
    if handle is not None:
        handle.remove()
    return figures


def _model(job: Job) -> nn.Module:
    if not job.cuda:
        return small_net()
    from torchvision.models import resnet50 as build

    model: nn.Module = build()
    return model

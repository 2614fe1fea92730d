"""One rank of `benchmarks.wire`, on its host: the bytes of a step, by the model and by the interface."""

from __future__ import annotations

import json
import sys
import time
import warnings
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import laconic
from laconic.comm.metered import Metered
from laconic.comm.torch_comm import TorchComm
from laconic.tools.lab.linux import interface_bytes

Case = tuple[str, int]  # a collective or a method's spec, and bytes of a dense float32 tensor
Figures = dict[str, float]

STEPS = 10
SETTLE_S = 0.4  # the last acknowledgements may be 0.2 s late
KEYS = ("payload_sent", "payload_received", "network_sent", "network_received")


def main(cases: list[Case]) -> None:
    """Play all cases; a JSON list of figures a step on stdout."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    dist.init_process_group("gloo")
    print(json.dumps([play(what, nbytes) for what, nbytes in cases]))
    dist.destroy_process_group()


def play(what: str, nbytes: int) -> Figures:
    """Figures of one step, on the average of STEPS."""
    step, told = training(what, nbytes) if "(" in what else collective(what, nbytes)
    for _ in range(3):  # DDP regroups its buckets after its first step
        step()
    dist.barrier()
    time.sleep(SETTLE_S)
    before = {**told(), **counters()}
    for _ in range(STEPS):
        step()
    time.sleep(SETTLE_S)
    after = {**told(), **counters()}
    time.sleep(SETTLE_S)
    dist.barrier()
    return {key: (after[key] - before[key]) / STEPS for key in after}


def collective(name: str, nbytes: int) -> tuple[Callable[[], object], Callable[[], Figures]]:
    """A step that is one collective."""
    comm = Metered(TorchComm.own())
    x, room = torch.zeros(nbytes // 4), torch.empty(nbytes // 4)
    after, before = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
    steps: dict[str, Callable[[], object]] = {
        "all_reduce": lambda: comm.all_reduce(x),
        "all_gather": lambda: comm.all_gather(x),
        "broadcast": lambda: comm.broadcast(x),
        "exchange": lambda: comm.exchange({after: x}, {before: room}),
    }
    return steps[name], lambda: {key: getattr(comm.snapshot(), key) for key in KEYS}


def training(spec: str, nbytes: int) -> tuple[Callable[[], object], Callable[[], Figures]]:
    """A training step of a model whose gradient is `nbytes` long, exchanged by this method."""
    layers = [torch.nn.Linear(250, 250) for _ in range(nbytes // (4 * 250 * 251))]
    model = DistributedDataParallel(torch.nn.Sequential(*layers), bucket_cap_mb=0.5)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)
    handle = laconic.compress(model, optimizer, spec)

    def step() -> None:
        optimizer.zero_grad()
        model(torch.randn(4, 250)).square().mean().backward()
        optimizer.step()

    return step, lambda: {key: getattr(handle.stats(), key) for key in KEYS}


def counters() -> Figures:
    """What the interface has sent and received so far."""
    sent, received = interface_bytes("eth0")
    return {"counted_sent": sent, "counted_received": received}


if __name__ == "__main__":
    main([(what, n) for what, n in json.loads(sys.argv[1])])

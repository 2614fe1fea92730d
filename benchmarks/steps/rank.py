"""One rank of `benchmarks.steps`, on its host: does what it is told on stdin, a JSON line each, and answers.

{"do": "build", "contender": ..., "steps": 4}   a new model, and steps that warm it up
{"do": "steps", "count": 8}                     seconds of each, and what a step costs besides
{"do": "alone", "count": 8}                     seconds of each with no communication
{"do": "copies", "entries": 1000, "count": 8}   seconds of copying so many floats
{"do": "network"}, {"do": "work"}               what `laconic probe` would measure here
{"do": "said"}                                  what was decided since the last time
{"do": "end"}
"""

from __future__ import annotations

import gc
import json
import sys
import time
import warnings
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.steps.contenders import ALONE, build
from benchmarks.steps.running import Running, sgd
from benchmarks.steps.workloads import WORKLOADS
from laconic.comm.torch_comm import TorchComm
from laconic.tools.lab.linux import interface_bytes
from laconic.tools.plan.probe import probe_network, probe_work
from laconic.tools.tasks.decisions import Decisions

Answer = dict[str, Any]
FIGURES = ("encode_s", "communicate_s", "decode_s", "payload_sent")


class Rank:
    """The model that this rank trains now, and with whom."""

    def __init__(self, workload: str, cores: float) -> None:
        self.make, self.cores = WORKLOADS[workload].make, cores
        self.running: Running | None = None
        self.idle: Running | None = None
        self.decisions = Decisions()

    def build(self, contender: str, steps: int) -> Answer:
        """A contender, ready to be timed."""
        self.let_go()
        model, self.loss = self.make()
        self.running = build(contender, model)
        for _ in range(steps):
            self.running.step(self.loss)
        return {}

    def steps(self, count: int) -> Answer:
        """Seconds of each step; bytes and processor seconds of one, on the average."""
        assert self.running is not None
        before = self.counted()
        seconds = self.timed(self.running, count)
        after = self.counted()
        return {"seconds": seconds} | {key: (after[key] - before[key]) / count for key in after}

    def alone(self, count: int) -> Answer:
        """Seconds of each step with no communication, while the present contender waits.

        All ranks begin each step together, as they do where they exchange: so they share the cores alike.
        """
        if self.idle is None:
            self.idle = build(ALONE, self.make()[0])
            self.idle.step(self.loss)
        return {"seconds": [self.timed(self.idle, 1)[0] for _ in range(count)]}

    def timed(self, running: Running, count: int) -> list[float]:
        """Seconds of each of so many steps, which all ranks begin together."""
        dist.barrier()
        seconds, clock = [], time.perf_counter()
        for _ in range(count):
            running.step(self.loss)
            seconds.append(time.perf_counter() - clock)
            clock += seconds[-1]
        return seconds

    def counted(self) -> dict[str, float]:
        """What has been used so far."""
        sent, received = interface_bytes("eth0")
        found = {"sent": float(sent), "received": float(received), "processor_s": time.process_time()}
        handle = self.running and self.running.handle
        return found | ({key: getattr(handle.stats(), key) for key in FIGURES} if handle else {})

    def copies(self, entries: int, count: int) -> Answer:
        """Seconds of each copy of so many floats, which all ranks begin together."""
        source, target = torch.ones(entries), torch.zeros(entries)
        seconds = []
        for _ in range(count):
            dist.barrier()
            clock = time.perf_counter()
            target.copy_(source)
            seconds.append(time.perf_counter() - clock)
        return {"seconds": seconds}

    def network(self) -> Answer:
        """Latency and rate of the links when all ranks send at once."""
        return asdict(probe_network(TorchComm()))

    def work(self) -> Answer:
        """Seconds of a step's parts with no communication."""
        self.let_go()
        model, loss = self.make()
        shapes = [(name, tuple(each.shape)) for name, each in model.named_parameters()]
        found = probe_work(model, lambda: loss(model), sgd(model), TorchComm(), self.cores)
        return asdict(found) | {"layout": shapes}

    def said(self) -> Answer:
        """What methods have decided."""
        return {"said": self.decisions.pop_all()}

    def let_go(self) -> None:
        """Free the last contender's memory, threads and groups."""
        if self.running is not None and self.running.handle is not None:
            self.running.handle.remove()
        self.running = None
        gc.collect()


def main(workload: str, cores: str) -> None:
    """Answer until told to end."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")  # torch's, of its hooks and masks
    dist.init_process_group("gloo")
    rank = Rank(workload, float(cores))
    does = (rank.build, rank.steps, rank.alone, rank.copies, rank.network, rank.work, rank.said)
    known: dict[str, Callable[..., Answer]] = {each.__name__: each for each in does}
    for line in sys.stdin:
        told = json.loads(line)
        do = told.pop("do")
        if do == "end":
            break
        print(json.dumps(known[do](**told)), flush=True)
    rank.let_go()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])

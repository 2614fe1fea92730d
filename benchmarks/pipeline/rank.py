"""One rank of `benchmarks.pipeline`, on its host: does what stdin tells it, a JSON line each, and answers.

{"do": "build", "spec": ..., "stages": 2, "replicas": 1, "between": "dense()", "schedule": "1f1b"}
{"do": "steps", "count": 8}      seconds of each step, and what one costs on the average
{"do": "end"}
"""

from __future__ import annotations

import gc
import json
import sys
import time
import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.pipeline.workloads import WINDOW, WORKLOADS
from laconic.pipeline.crossing import crossing
from laconic.tools.lab.linux import interface_bytes
from laconic.tools.tasks.settings import Pipeline
from laconic.tools.tasks.stage import StageAtWork
from laconic.tools.tasks.task import Recipe

Answer = dict[str, Any]


class Rank:
    """The stage that this rank trains now."""

    def __init__(self, workload: str) -> None:
        self.workload = WORKLOADS[workload]
        self.work: StageAtWork | None = None

    def build(self, spec: str, stages: int, replicas: int, between: str, schedule: str) -> Answer:
        """A pipeline whose replicas see the same examples in every step."""
        self.let_go()
        recipe: Recipe = self.workload.recipe
        torch.manual_seed(0)
        whole = recipe.build()
        rng = torch.Generator().manual_seed(1)
        shape = (self.workload.batch, WINDOW)
        self.x = torch.randint(0, 65, shape, generator=rng)
        self.y = torch.randint(0, 65, shape, generator=rng)
        self.ids = torch.arange(self.workload.batch)
        pipeline = Pipeline(stages, replicas, self.workload.micro_batches, schedule, between)
        crosses = crossing(spec)
        self.work = StageAtWork(pipeline, recipe, whole, self.x, crossing=crosses, samples=len(self.x))
        return {}

    def steps(self, count: int) -> Answer:
        """Seconds of each step, which all ranks begin together; bytes and seconds of one on the average."""
        assert self.work is not None
        dist.barrier()
        sent, passed, seconds = interface_bytes("eth0")[0], self.work.passed(), []
        clock = began = time.perf_counter()
        for _ in range(count):
            self.work.optimizer.zero_grad()
            self.work.step(self.x, self.y, self.ids)
            self.work.update()
            seconds.append(time.perf_counter() - clock)
            clock += seconds[-1]
        dist.barrier()
        whole_s = time.perf_counter() - began
        done = self.work.passed().minus(passed)
        figures = {name: getattr(done, name) for name in ("forward_s", "backward_s", "encode_s", "decode_s")}
        figures |= {"up": done.activations.sent_bytes, "down": done.gradients.sent_bytes}
        figures |= {"sent": interface_bytes("eth0")[0] - sent}
        return {"seconds": seconds, "whole_s": whole_s / count} | {
            name: value / count for name, value in figures.items()
        }

    def let_go(self) -> None:
        """Free the last pipeline."""
        if self.work is not None and self.work.handle is not None:
            self.work.handle.remove()
        self.work = None
        gc.collect()


def main(workload: str, cores: str) -> None:
    """Answer until told to end."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    dist.init_process_group("gloo")
    rank = Rank(workload)
    known: dict[str, Callable[..., Answer]] = {"build": rank.build, "steps": rank.steps}
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

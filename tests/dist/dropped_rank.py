"""One rank of a training whose link goes down and up: `python dropped_rank.py FOLDER SPEC`.

It says in the folder that it has begun. The link is up for good when the file `up` is there; all then end
together some steps after everybody is back.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
import time
from datetime import timedelta
from pathlib import Path

import torch.distributed as dist

from tests.dist.nets import flat
from tests.dist.runs import advance, distributed

PATIENCE_S = 2.0
AFTER = 20  # steps: no rank is so many ahead of another


def main(folder: Path, spec: str) -> None:
    dist.init_process_group("gloo", timeout=timedelta(seconds=120))
    rank, size = dist.get_rank(), dist.get_world_size()
    store = dist.distributed_c10d._get_default_store()
    model, optimizer = distributed(spec, patience_s=PATIENCE_S)
    end, regroups = None, 0
    while (step := optimizer.stats().steps) != end:
        advance(model, optimizer, [step])
        time.sleep(0.05)
        (folder / f"begun{rank}").touch()
        regroups = optimizer.controller.membership.generation
        if end is None and store.check(["end"]):
            end = int(store.get("end"))
        elif (
            end is None
            and rank == 0
            and (folder / "up").exists()
            and len(optimizer.notes()["living"]) == size
        ):
            store.set("end", str(optimizer.stats().steps + AFTER))  # once: who reads it late reads the same
    optimizer.finish()
    report = {
        "steps": end,
        "regroups": regroups,
        "model": hashlib.sha256(flat(model).numpy().tobytes()).hexdigest(),
        "finite": bool(flat(model).isfinite().all()),
    }
    print(json.dumps(report), flush=True)
    store.set(f"ended {rank}", "")
    if rank == 0:  # it holds the store
        store.wait([f"ended {other}" for other in range(size)])
    os._exit(0)  # how a process ends is the matter of other tests


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])

"""Scripts that end as scripts do: by Python's own finalisation. Run as a program, which plays many of them.

A worker of the pool ends by `os._exit`, as all children of `multiprocessing` do, and so cannot show what
happens when Python is finalised. Here a process that has imported torch forks the ranks, which fall off the
end of the program. It reads groups of scripts, one a line, `[[spec, patience_s, ending], ...]`, plays those
of a line all at once, and answers with a line of ends, `[[of rank 0, of rank 1], ...]`: each is the exit code
and the seconds from the script's end to that of the process, or "hung" for a rank that it had to kill.
"""

from __future__ import annotations

import gc
import itertools
import json
import mmap
import os
import signal
import sys
import time
import warnings

import torch
import torch._dynamo  # as every optimiser does
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import laconic
from laconic.exchange.method import lift
from laconic.strategies.distribute import strategy_or_method
from laconic.strategies.strategy import Strategy
from tests.dist.nets import SGD, net
from tests.dist.runs import MANY, advance
from tests.laws.method_ranks import optimizer_for

SIZE, STEPS = 2, 4
HUNG_S, ENDING_S = 180.0, 30.0  # of a whole script, and from its end to that of its process: many are at work
Asked = tuple[str | None, float | None, str]  # the spec, patience_s and the ending
ENDINGS = {"plain": 0, "destroy": 0, "exception": 1, "exit": 3, "terminated": 143}


def trained(spec, patience_s):
    """What a script has after a few steps: model, optimiser, handle. Without a spec it uses torch alone."""
    torch.manual_seed(0)
    model = net()
    if spec is None:
        model = DistributedDataParallel(model, **MANY)
        optimizer, handle = torch.optim.SGD(model.parameters(), **SGD), None
    elif isinstance(strategy := strategy_or_method(spec), Strategy):
        own = {**SGD, "momentum": 0.0, "nesterov": False} if strategy.owns_momentum else SGD
        plain = torch.optim.SGD(model.parameters(), **own)
        model, optimizer = laconic.distribute(model, plain, spec, patience_s=patience_s)
        handle = optimizer
    else:
        model = DistributedDataParallel(model, **MANY)
        optimizer = optimizer_for(lift(spec), [*model.parameters()])
        handle = laconic.compress(model, optimizer, spec)
    for step in range(STEPS):
        (loss,) = advance(model, optimizer, [step])
        dist.all_reduce(torch.tensor(loss))  # as scripts do for their log
    return model, optimizer, handle


def script(rank: int, port: int, name: str, asked: Asked, ended: memoryview) -> None:
    """What one rank runs. `ended[0]` becomes the time at which nothing is left to it but to end."""
    spec, patience_s, ending = asked
    torch.set_num_threads(1)
    machine = {"RANK": str(rank), "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}  # each rank has one of its own
    os.environ.update(machine, GLOO_SOCKET_IFNAME="lo")
    warnings.simplefilter("ignore")  # torch's, of a group that was not destroyed
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(ENDINGS["terminated"]))
    store = dist.PrefixStore(name, dist.TCPStore("127.0.0.1", port, is_master=False))
    dist.init_process_group("gloo", store=store, rank=rank, world_size=SIZE)
    kept = trained(spec, patience_s)
    if ending == "destroy" and spec is not None and isinstance(strategy_or_method(spec), Strategy):
        kept[1].finish()
    ended[0] = time.monotonic()
    if ending == "destroy":
        dist.destroy_process_group()
    elif ending == "exception":
        raise ZeroDivisionError("on purpose")
    elif ending == "exit":
        sys.exit(ENDINGS["exit"])
    elif ending == "terminated":
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(HUNG_S)


def played(groups: list[Asked], port: int, numbers) -> list | None:
    """The ends of all ranks of these scripts; None in a rank that has done its part, and shall end."""
    ranks: dict[int, tuple[int, int]] = {}
    ended = memoryview(mmap.mmap(-1, 8 * SIZE * len(groups))).cast("d")  # shared with the ranks
    for index, asked in enumerate(groups):
        name = f"script{next(numbers)}"
        for rank in range(SIZE):
            if pid := os.fork():
                ranks[pid] = index, rank
                continue
            null = os.open(os.devnull, os.O_RDWR)
            os.dup2(null, 0)
            os.dup2(null, 1)
            os.dup2(null, 2)
            place = SIZE * index + rank
            script(rank, port, name, asked, ended[place : place + 1])
            return None
    ends: list[list[tuple[int, float] | str]] = [["hung"] * SIZE for _ in groups]
    deadline = time.monotonic() + HUNG_S
    while ranks and time.monotonic() < deadline:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if pid:
            index, rank = ranks.pop(pid)
            seconds = time.monotonic() - ended[SIZE * index + rank]
            ends[index][rank] = os.waitstatus_to_exitcode(status), seconds
            continue
        time.sleep(0.005)
        for pid, (index, rank) in list(ranks.items()):
            if 0 < ended[SIZE * index + rank] < time.monotonic() - ENDING_S:
                kill(pid)
                del ranks[pid]
    for pid in ranks:
        kill(pid)
    return ends


def kill(pid: int) -> None:
    """End a rank that does not end by itself."""
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)


def serve(port: int) -> None:
    """Play what comes line by line. Returns in every rank, and at the end of input."""
    gc.collect()
    gc.freeze()  # what is imported here need not be searched at the end of every rank
    numbers = itertools.count()
    for line in sys.stdin:
        ends = played(json.loads(line), port, numbers)
        if ends is None:
            return
        print(json.dumps(ends), flush=True)


if __name__ == "__main__":
    serve(int(sys.argv[1]))

"""Training of one rank of a disturbed run."""

from __future__ import annotations

import faulthandler
import hashlib
import json
import math
import os
import signal
import time
import warnings
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from tests.dist.nets import flat, loss_of, net
from tests.dist.pool import wait_for_all
from tests.dist.runs import MANY, advance, distributed, same, spike
from tests.laws.method_ranks import optimizer_for
from torch.nn.parallel import DistributedDataParallel

import laconic
from benchmarks.faults.schedule import NOT_FINITE, RAISED, STOPPED, Run
from benchmarks.faults.verdicts import ON_PURPOSE
from laconic.core.errors import NonFiniteError
from laconic.exchange.method import lift

STEPS, MOST_STEPS, OVER = 24, 4000, -1.0
AFTER = 6  # steps after a stopped rank is back
PATIENCE_S, STEP_S = 4.0, 0.02
CONNECT = timedelta(minutes=2)


def take_part(run: Run, rank: int, port: int, name: str, board: memoryview, folder: Path) -> None:
    """Train with the other ranks, and write the result to `<rank>.json`.

    `board`: shared by all; the current step of each rank, `OVER` after its training, and finally whether a
    rank has noticed that the victim is gone. Errors of the training are not caught: the process ends as that
    of a script.
    """
    errors = (folder / f"{rank}.err").open("w")
    null = os.open(os.devnull, os.O_RDWR)
    for descriptor, target in enumerate((null, null, errors.fileno())):
        os.dup2(target, descriptor)
    faulthandler.register(signal.SIGUSR1, file=errors, all_threads=True)
    torch.set_num_threads(1)
    machine = {"RANK": str(rank), "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "GLOO_SOCKET_IFNAME": "lo"}
    os.environ.update(machine)
    warnings.simplefilter("ignore")
    store = dist.PrefixStore(name, dist.TCPStore("127.0.0.1", port, is_master=False))
    dist.init_process_group("gloo", store=store, rank=rank, world_size=run.size)
    wait_for_all(store, run.size, CONNECT)
    train = _under_a_strategy if run.strategy else _under_a_method
    result = train(run, rank, board)
    (folder / f"{rank}.json").write_text(json.dumps(result))
    dist.destroy_process_group()


def _under_a_strategy(run: Run, rank: int, board: memoryview) -> dict[str, Any]:
    """Train to a fixed step, or, after a stop, for some steps after the victim is back."""
    model, optimizer = distributed(run.spec, patience_s=PATIENCE_S)
    end = None if run.fault == STOPPED else STEPS
    while (step := optimizer.stats().steps) != end and step < MOST_STEPS:
        board[rank] = step
        if run.fault == RAISED and rank == run.victim and step >= run.at:  # a regroup may skip a step
            raise ZeroDivisionError(ON_PURPOSE)
        advance(model, optimizer, [step])
        time.sleep(STEP_S)
        living = optimizer.notes()["living"]
        if run.victim not in living:
            board[run.size] = 1
        elif end is None and optimizer.controller.membership.generation >= 2:
            end = optimizer.stats().steps + AFTER  # the same on all: they left that regroup together
    board[rank] = OVER
    optimizer.finish()
    result = {"living": optimizer.notes()["living"], "steps": optimizer.stats().steps, **_fingerprint(model)}
    optimizer.remove()
    return result


def _under_a_method(run: Run, rank: int, board: memoryview) -> dict[str, Any]:
    """Train; note which steps were skipped, and whether they left parameters and memory unchanged."""
    model = DistributedDataParallel(net(), **MANY)  # type: ignore[arg-type]
    optimizer = optimizer_for(lift(run.spec), [*model.parameters()])
    handle = laconic.compress(model, optimizer, run.spec)
    skipped, parameters_kept, memory_kept = [], True, True
    for step in range(STEPS):
        board[rank] = step
        if run.fault == RAISED and rank == run.victim and step == run.at:
            raise ZeroDivisionError(ON_PURPOSE)
        parameters, memory = flat(model), handle.state_dict()["tensors"] if step == run.at else None
        broken = run.fault == NOT_FINITE and rank == run.victim and step == run.at
        try:
            advance(model, optimizer, [step], _broken_loss if broken else loss_of)
        except NonFiniteError:
            skipped.append(step)
            optimizer.zero_grad()
            parameters_kept &= torch.equal(parameters, flat(model))
            memory_kept &= same(memory, handle.state_dict()["tensors"])
        time.sleep(STEP_S)
    board[rank] = OVER
    handle.remove()
    kept = {"parameters_kept": parameters_kept, "memory_kept": memory_kept}
    return {"skipped": skipped, **kept, **_fingerprint(model)}


def _broken_loss(model: Any, step: int) -> torch.Tensor:
    """Return a loss whose gradient is infinite in one place."""
    return loss_of(model, step) + spike(next(model.parameters()))


def _fingerprint(model: Any) -> dict[str, Any]:
    """Return a hash of all parameters, and whether they are finite."""
    whole = flat(model)
    return {
        "model": hashlib.sha256(whole.numpy().tobytes()).hexdigest(),
        "finite": math.isfinite(whole.abs().sum().item()),
    }

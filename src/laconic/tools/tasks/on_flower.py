"""A task among clients in Flower's simulation engine.

The engine has its own process, since it and Ray leave threads and log much. Settings go to its stdin; events
come through a pipe, one line of JSON each; logs go to a file.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import nn

from laconic.core.errors import LaconicError
from laconic.core.extras import INSTALL_FEDERATED, require
from laconic.data.partition import Deal
from laconic.federated.form import Tensors as Model
from laconic.federated.rounds import Outcome
from laconic.federated.samplings.constant import Constant
from laconic.federated.schemes import Scheme, scheme_of
from laconic.tools.tasks.catalogue import find
from laconic.tools.tasks.federation import Federation, deal, local_training, told_of
from laconic.tools.tasks.task import Tensors

COMMAND = "from laconic.tools.tasks.on_flower import main; main()"
STOP_S = 20.0
TAIL = 3


class EngineFailed(LaconicError):
    pass


def check_engine() -> None:
    for module in ("flwr", "ray"):
        require(module, "Flower's simulation engine", INSTALL_FEDERATED)


def federate_on_flower(settings: Federation, data: Path | None, log: Path) -> Iterator[dict[str, Any]]:
    """Train, and yield rounds like `tasks.federation.federate`. Raises `EngineFailed`.

    Differences: the first model is sent and counted; a client without examples counts as failed.
    """
    check_engine()
    reads, writes = os.pipe()
    logged = 0
    with (
        os.fdopen(reads, encoding="utf-8") as events,
        tempfile.TemporaryDirectory() as folder,
        log.open("ab") as said,
    ):
        began = said.tell()
        try:
            engine = subprocess.Popen(
                [sys.executable, "-c", COMMAND, str(writes), folder],
                stdin=subprocess.PIPE,
                stdout=said,
                stderr=subprocess.STDOUT,
                pass_fds=(writes,),
                start_new_session=True,  # this process stops the engine after Ctrl-C
            )
        finally:
            os.close(writes)
        try:
            assert engine.stdin is not None, "it was asked for"
            given = {"settings": asdict(settings), "data": None if data is None else str(data)}
            with suppress(BrokenPipeError), engine.stdin as stdin:  # the log has the reason
                stdin.write(json.dumps(given).encode())
            for line in events:
                yield json.loads(line)
                logged += 1
            with suppress(subprocess.TimeoutExpired):  # Ray may end slowly
                engine.wait(STOP_S)
        finally:
            _stop(engine)
    if logged < settings.rounds:
        ends = "\n".join(log.read_bytes()[began:].decode(errors="replace").strip().splitlines()[-TAIL:])
        raise EngineFailed(
            f"Flower's engine ended with exit code {engine.returncode} after {logged} of {settings.rounds}"
            f" rounds; {log} ends with:\n{ends}"
        )


def _stop(engine: subprocess.Popen[bytes]) -> None:
    for number in (signal.SIGTERM, signal.SIGKILL):
        if engine.poll() is not None:
            return
        os.killpg(engine.pid, number)
        try:
            engine.wait(STOP_S)
        except subprocess.TimeoutExpired:
            continue


@dataclass(frozen=True)
class LocalTraining:
    """A client's training, pickled to Ray's processes, which read the data once."""

    settings: Federation
    data: Path | None

    def __call__(self, client: int, model: Model, number: int) -> tuple[Model, int]:
        tensors, net, shares, scheme = _read(self.settings, self.data)
        task = find(self.settings.task)
        return local_training(self.settings, task, tensors, net, shares, scheme, client, model, number)


@cache
def _read(settings: Federation, data: Path | None) -> tuple[Tensors, nn.Module, Deal, Scheme]:
    torch.set_num_threads(1)
    task = find(settings.task)
    tensors = task.load(data)
    torch.manual_seed(settings.seed)
    net = task.recipe(settings.model).build()
    return tensors, net, deal(settings, tensors), scheme_of(settings.spec).attached(net)


def main() -> None:
    from laconic.federated.flower.engine import simulate

    given = json.load(sys.stdin)
    settings = Federation(**given["settings"])
    data = None if given["data"] is None else Path(given["data"])
    tensors, net, _, scheme = _read(settings, data)
    with os.fdopen(int(sys.argv[1]), "w", encoding="utf-8") as events:

        def tell(outcome: Outcome) -> None:
            event = told_of(settings, find(settings.task), tensors, net, outcome)
            print(json.dumps(event), file=events, flush=True)

        simulate(
            {name: value.detach().clone() for name, value in net.state_dict().items()},
            LocalTraining(settings, data),
            scheme,
            tell,
            Path(sys.argv[2]),
            clients=settings.clients,
            sampling=scheme.sampling or Constant(settings.per_round / settings.clients),
            rounds=settings.rounds,
            seed=settings.seed,
        )

"""A replica of torchft in a process of its own: trainings one after the other, each leaves a file.

python -m tests.integrations.torchft_replica '[{"lighthouse": ..., "out": ...}, ...]'
"""

from __future__ import annotations

import json
import logging
import os
import runpy
import sys
import time
from contextlib import redirect_stdout
from datetime import timedelta
from io import StringIO
from pathlib import Path
from typing import Any

import torch
import torchft
from torch import Tensor, nn
from torch.distributed import TCPStore
from torch.nn.functional import cross_entropy

from laconic.integrations import TorchftDDP
from tests.dist.nets import flat, net

STEPS_AT_MOST = 1000


class Words(logging.Handler):
    """What our log was told."""

    def __init__(self) -> None:
        super().__init__()
        self.told: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.told.append(record.getMessage())


class Beside(nn.Module):
    """A net, and a layer beside it that a pass may leave out."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner, self.beside = inner, nn.Linear(20, 5)
        nn.init.zeros_(self.beside.weight)

    def forward(self, x: Tensor, whole: bool = False) -> Tensor:
        out: Tensor = self.inner(x)
        return out + self.beside(x) if whole else out


class Replica:
    """A training of the net of these tests, whose batches are those of the committed steps."""

    def __init__(self, told: dict[str, Any]) -> None:
        self.told = told
        self.words = Words()
        logging.getLogger("laconic").addHandler(self.words)
        self.plain = net(seed=told.get("seed", 0))
        self.beside: list[float] = []  # by step, how far the layer beside the net has come
        if told.get("beside"):
            self.plain = Beside(self.plain)
        self.store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self.manager = torchft.Manager(
            pg=torchft.ProcessGroupGloo(timeout=timedelta(seconds=told["patience_s"])),
            min_replica_size=told.get("least", 1),
            load_state_dict=self.load,
            state_dict=self.state,
            replica_id=told["name"],
            store_addr="127.0.0.1",
            store_port=self.store.port,
            rank=0,
            world_size=1,
            lighthouse_addr=told["lighthouse"],
            hostname="localhost",
            init_sync=told.get("sync", False),
        )
        spec = told["spec"]
        kind = torchft.DistributedDataParallel if spec is None else TorchftDDP
        self.model = kind(self.manager, self.plain, *([] if spec is None else [spec]))
        inside = torch.optim.SGD(self.model.parameters(), lr=0.05, momentum=0.9)
        self.optimizer = torchft.Optimizer(self.manager, inside)

    def load(self, state: dict[str, Any]) -> None:
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])

    def state(self) -> dict[str, Any]:
        return {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}

    @torch.no_grad()
    def loss(self) -> float:
        """Return the mean loss of 1,000 examples: that of a last batch of 8 varies by a factor of ten."""
        x = torch.randn(1000, 20, generator=torch.Generator().manual_seed(7))
        return cross_entropy(self.plain(x), x[:, :5].argmax(1)).item()

    def go(self) -> dict[str, Any]:
        """Train until the last step; then what is to be compared."""
        told, manager, sizes, tried = self.told, self.manager, [], 0
        if told.get("resume"):
            saved = torch.load(told["resume"], weights_only=True)
            self.load(saved)
            manager.load_state_dict(saved["manager"])
            self.model.handle.load_state_dict(saved["handle"])
        while manager.current_step() < told["steps"]:
            step, tried = manager.current_step(), tried + 1
            if tried > 1 and step >= told.get("die_at", STEPS_AT_MOST):
                os._exit(9)
            rng = torch.Generator().manual_seed(1000 * step + told["number"])
            x = torch.randn(8, 20, generator=rng)
            self.optimizer.zero_grad()
            more = (step == 0,) if told.get("beside") else ()
            loss = cross_entropy(self.model(x, *more), x[:, :5].argmax(1))
            if step in told.get("fail_at", ()) and step not in sizes[-1:]:
                manager.wait_quorum()
                manager.report_error(RuntimeError("a fault of this test"))
            sizes.append(step)
            if told.get("nan_at") == tried:
                loss = loss * torch.nan
            loss.backward()
            self.optimizer.step()
            if isinstance(self.plain, Beside):
                self.beside.append(float(self.plain.beside.weight.detach().abs().sum()))
            if "alone" in told and step > 10 and manager.num_participants() == 1:
                Path(told["alone"]).touch()  # and slowly, until another comes
                time.sleep(0.2)
        end: dict[str, Any] = {"flat": flat(self.plain), "tried": tried, "loss": self.loss()}
        if told["spec"] is not None:
            handle = self.model.handle
            end |= {"handle": dict(handle.state_dict()), "stats": vars(handle.stats()), "repr": repr(handle)}
            end["stats"].pop("noise")
            end["stats"]["phases"] = dict(end["stats"]["phases"])
        logging.getLogger("laconic").removeHandler(self.words)
        end["words"], end["beside"] = self.words.told, self.beside
        return end | self.state() | {"manager": manager.state_dict(), "size": manager.num_participants()}


def example(told: dict[str, Any]) -> dict[str, Any]:
    """The printed line and the model of an example, in the environment that torchrun would give it."""
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    os.environ |= {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.port)}
    os.environ |= {"TORCHFT_LIGHTHOUSE": told["lighthouse"], "REPLICA_GROUP_ID": str(told["number"])}
    with redirect_stdout(StringIO()) as said:
        runpy.run_path(told["example"])["main"](told["steps"], Path(told["out"]))
    return {"said": said.getvalue(), "model": torch.load(told["out"], weights_only=True)}


def main(trainings: list[dict[str, Any]]) -> None:
    logging.getLogger("torchft").setLevel(logging.ERROR)
    logging.getLogger("laconic").propagate = False  # what it says is kept, above
    for told in trainings:
        if "example" in told:
            torch.save(example(told), Path(told["out"]))
            continue
        replica = Replica(told)
        torch.save(replica.go(), Path(told["out"]))
        replica.manager.shutdown()


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))

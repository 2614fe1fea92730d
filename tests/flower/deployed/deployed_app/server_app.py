"""A server that can wait between two rounds, until the test says go."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import torch
from flwr.app import ArrayRecord, Context
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg

import laconic

app = ServerApp()


class Pausing(FedAvg):
    folder = Path()
    after = 0

    def aggregate_train(self, server_round: int, replies: Any) -> Any:
        result = super().aggregate_train(server_round, replies)
        if server_round == self.after:
            (self.folder / "paused").touch()
            while not (self.folder / "go").exists():
                time.sleep(0.2)
        return result


@app.main()
def main(grid: Grid, context: Context) -> None:
    config = context.run_config
    nodes, folder = int(config["nodes"]), Path(str(config["save"]))
    inner = Pausing(min_train_nodes=nodes, min_available_nodes=nodes, fraction_evaluate=0.0)
    inner.folder, inner.after = folder, int(config["pause-after"])
    strategy = laconic.federated.compressed(inner, up="stc(density=0.05)", down="stc(density=0.05)")
    rng = torch.Generator().manual_seed(0)
    first = {"w": torch.randn(60, 50, generator=rng), "b": torch.randn(60, generator=rng)}
    rounds = int(config["num-server-rounds"])
    result = strategy.start(grid, ArrayRecord(first), num_rounds=rounds)
    torch.save(dict(result.arrays.to_torch_state_dict()), folder / "model.pt")
    (folder / "traffic.json").write_text(json.dumps(strategy.traffic.as_dict()))

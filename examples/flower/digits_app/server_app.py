"""The server: a plain Flower app, and one line."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from flwr.app import ArrayRecord, Context, MetricRecord
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg

import laconic

from .task import accuracy, net

app = ServerApp()


def evaluate(number: int, arrays: ArrayRecord) -> MetricRecord:
    model = net()
    model.load_state_dict(arrays.to_torch_state_dict())
    return MetricRecord({"accuracy": accuracy(model)})


@app.main()
def main(grid: Grid, context: Context) -> None:
    config = context.run_config
    nodes = int(config["nodes"])
    strategy = FedAvg(min_train_nodes=nodes, min_available_nodes=nodes, fraction_evaluate=0.0)
    strategy = laconic.federated.compressed(strategy, up=config["up"], down=config["down"] or None)
    result = strategy.start(
        grid,
        ArrayRecord(net().state_dict()),
        num_rounds=int(config["num-server-rounds"]),
        evaluate_fn=evaluate,
    )
    traffic = strategy.traffic
    for each in traffic.rounds:
        if each.up:
            down, up = sum(each.down.values()), sum(each.up.values())
            print(f"laconic: round {each.number}: {down:,} bytes down, {up:,} bytes up", flush=True)
    if save := str(config.get("save", "")):
        torch.save(result.arrays.to_torch_state_dict(), Path(save) / "model.pt")
        (Path(save) / "traffic.json").write_text(json.dumps(traffic.as_dict()))
